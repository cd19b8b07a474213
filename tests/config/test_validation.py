"""What is said of a value that a config cannot have: what it is, what it should be, and what it was meant to be."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from nemotron_steps.config.compose import ComposedConfig, compose
from nemotron_steps.config.schema.base import OPERATIONAL, Rule, Section, raise_if_broken
from nemotron_steps.config.validation import (
    complete,
    default_of,
    has_key,
    known_keys,
    load_schema,
    operational_keys,
    validate,
)
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
    ("key", "exists"),
    [
        ("optimizer", True),
        ("optimizer.lr", True),
        ("optimizer.lr.x", False),
        ("judge.tries", True),
        ("judges.any.tries", True),
        ("judges.any.trials", False),
        ("options.a.b.c", True),
        ("stages.0.lr", True),
        ("stages.0.x", False),
        ("nothing", False),
    ],
)
def test_has_key(key, exists):
    assert has_key(Toy, key) is exists


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


class NotFrozen(BaseModel):
    steps: int = 1


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        (f"{__name__}:NotFrozen", "would let unknown keys"),
        (f"{__name__}:MISTAKES", "not a pydantic model"),
        (f"{__name__}:Gone", "cannot be imported"),
        ("no_such_module:Gone", "cannot be imported"),
    ],
)
def test_a_schema_that_is_not_strict_is_refused(reference, said):
    with pytest.raises(ConfigError, match=said):
        load_schema(reference)


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
        ({"on": "flase"}, "on", "false"),
        ({"on": "maybe"}, "on", None),
        ({"on": 2}, "on", None),
        ({"count": "1,000"}, "count", "1000"),
        ({"count": "1_0 0"}, "count", "100"),
        ({"count": "ten"}, "count", None),
        ({"count": 2.5}, "count", None),
        ({"count": float("inf")}, "count", None),
        ({"count": "2.0x"}, "count", None),
        ({"count": [1]}, "count", None),
        ({"inner": {"needed": 1, "rate": "1 e-3"}}, "inner.rate", "0.001"),
        ({"inner": {"needed": 1, "rate": "x"}}, "inner.rate", None),
        ({"inner": {"needed": 1, "mode": "solw"}}, "inner.mode", "slow"),
        ({"inner": {"needed": 1, "mode": 3}}, "inner.mode", None),
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


def test_keys_and_those_that_change_no_result_are_told_section_by_section() -> None:
    assert operational_keys(Outer) == ("quick", "group")
    assert [key for key in known_keys(Outer) if key.startswith("open")] == [
        "open", "open.*", "open.*.rate", "open.*.mode", "open.*.needed"
    ]  # fmt: skip

    class Whole(Section):
        outer: Outer
        named: dict[str, Outer] = Field(default_factory=dict)

    assert operational_keys(Whole) == ("outer.quick", "outer.group", "named.*.quick", "named.*.group")


class Ruled(Section):
    low: int = 0
    high: int = 1

    def model_post_init(self, context: Any) -> None:
        raise_if_broken([Rule("low", "low is above high", "low=0 high=1")] if self.low > self.high else [])


class Ruling(Section):
    path: str
    ruled: dict[str, Ruled] = Field(default_factory=dict)
    one: Ruled = Ruled()


def test_a_rule_of_a_section_is_told_under_the_sections_own_keys() -> None:
    error = refusal({"ruled": {"a": {"low": 2}}}, Ruling)
    assert (error.what, error.where) == ("low is above high", "ruled.a.low")
    assert error.hints == ("ruled.a.low=0 ruled.a.high=1",)
