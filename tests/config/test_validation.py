"""What is said of a value that a config cannot have: what it is, what it should be, and what it was meant to be."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from nemotron_steps.config.compose import ComposedConfig, compose
from nemotron_steps.config.schema.base import OPERATIONAL, Section
from nemotron_steps.config.validation import complete, default_of, validate
from nemotron_steps.errors import ConfigError

from .toy_schema import Toy

MISTAKES = """\
steps: many
optimizer:
  lr: -1
  nmae: adam
judge:
  modle: x
judges:
  safety:
    tries: [1]
stages:
  - {lr: 0.1}
  - {lr: 0.1, momentum: 0.9}
max_steps: 5
either: [1]
api_key: {value: hunter2hunter2}
"""


def test_every_mistake_is_reported_at_once_with_key_line_and_nearest_name(configs):
    search = configs({"rl/toy/default.yaml": MISTAKES})
    composed = compose(None, ["optimizer.name=lion"], search=search, schema=Toy)
    with pytest.raises(ConfigError) as caught:
        validate(composed, Toy)
    found = {(p.what, p.where.rsplit("/", 1)[-1]): p for p in caught.value.problems}
    assert set(found) == {
        ("'steps' has a wrong value", "default.yaml:1"),
        ("'optimizer.lr' has a wrong value", "default.yaml:3"),
        ("unknown key 'optimizer.nmae'", "default.yaml:4"),
        ("'optimizer.name' has a wrong value", "override 'optimizer.name=lion'"),
        ("unknown key 'judge.modle'", "default.yaml:6"),
        ("'judges.safety.tries' has a wrong value", "default.yaml:9"),
        ("unknown key 'stages.1.momentum'", "default.yaml:12"),
        ("unknown key 'max_steps'", "default.yaml:13"),
        ("'either' has a wrong value", "default.yaml:14"),
        ("'api_key' has a wrong value", "default.yaml:15"),
    }
    assert found["unknown key 'optimizer.nmae'", "default.yaml:4"].hints[0].startswith("sed -i '4s/\\bnmae\\b/name/' ")
    assert found["'optimizer.name' has a wrong value", "override 'optimizer.name=lion'"].expected == "'adam' or 'sgd'"
    assert found["'either' has a wrong value", "default.yaml:14"].expected == "integer or string"
    assert "unknown key 'max_steps'" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "default"),
    [
        ("steps", 10),
        ("optimizer", {"lr": 1e-3, "name": "adam"}),
        ("optimizer.lr", 1e-3),
        ("stages.0", ...),
        ("no", ...),
    ],
)
def test_a_key_that_nobody_sets_has_the_models_default(key, default):
    assert default_of(Toy, key) == default


class Inner(Section):
    rate: float = 1.0
    mode: Literal["fast", "slow"] = "fast"
    needed: int


class Outer(Section):
    path: str
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    on: bool = False
    count: int = 1
    open: dict[str, Inner] = Field(default_factory=dict)
    anything: dict[str, Any] = Field(default_factory=dict)
    quick: Annotated[int, OPERATIONAL] = 1
    group: Annotated[Inner | None, OPERATIONAL] = None


def refusal(values: dict[str, Any], schema: type[Section] = Outer) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        validate(ComposedConfig("toy", {"path": "x", **values}), schema)
    return caught.value


@pytest.mark.parametrize(
    ("values", "key", "right"),
    [
        ({"on": "ture"}, "on", "true"),
        ({"on": "maybe"}, "on", None),
        ({"count": "1,000"}, "count", "1000"),
        ({"count": "1_0 0"}, "count", "100"),
        ({"count": float("inf")}, "count", None),
        ({"inner": {"needed": 1, "rate": "1 e-3"}}, "inner.rate", "0.001"),
        ({"inner": {"needed": 1, "mode": "solw"}}, "inner.mode", "slow"),
        ({"many": [{"needed": 1}, {"needed": "1 0"}]}, "many.1.needed", "10"),
    ],
)
def test_a_slip_is_mended_where_there_is_no_doubt(values: dict[str, Any], key: str, right: str | None) -> None:
    error = refusal(values)
    assert error.what == f"'{key}' has a wrong value"
    assert error.hints == (() if right is None else (f"{key}={right}",))


def test_what_a_run_fills_in_may_be_missing_and_nothing_else() -> None:
    def completed(values: dict[str, Any], *later: str) -> dict[str, Any]:
        return complete(ComposedConfig("toy", values), Outer, frozenset(later))

    filled = completed({"path": "x", "many": [{"needed": 1}]})
    assert (filled["count"], filled["open"]) == (1, {})
    assert filled["many"] == [{"rate": 1.0, "mode": "fast", "needed": 1}]  # as JSON has it
    assert completed({"count": 2}, "path") == {"count": 2}
    with pytest.raises(ConfigError, match="'path' must be given a value"):
        completed({"count": 2})
    with pytest.raises(ConfigError, match=r"'inner\.needed' must be given a value"):
        completed({"inner": {}}, "path")
    with pytest.raises(ConfigError, match="'count' has a wrong value"):
        completed({"count": "x"}, "path")
