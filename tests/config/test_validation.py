from __future__ import annotations

import pytest
from pydantic import BaseModel

from nemotron_steps.config.compose import compose
from nemotron_steps.config.validation import has_key, known_keys, load_schema, nearest_keys
from nemotron_steps.errors import ConfigError

from .toy_schema import Section, Toy

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


def test_values_become_the_frozen_model(configs):
    search = configs({"rl/toy/default.yaml": "steps: 4\njudges: {safety: {model: m}}\nstages: [{lr: 0.5}]\n"})
    toy = compose(None, search=search, schema=Toy).model(Toy)
    assert (toy.steps, toy.judges["safety"].model, toy.stages[0].lr, toy.optimizer.name) == (4, "m", 0.5, "adam")
    with pytest.raises(ValueError):
        toy.steps = 5


def test_every_mistake_is_reported_at_once_with_key_line_and_nearest_name(configs):
    search = configs({"rl/toy/default.yaml": MISTAKES})
    composed = compose(None, ["optimizer.name=lion"], search=search, schema=Toy)
    with pytest.raises(ConfigError) as caught:
        composed.model(Toy)
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
    ("written", "hints"),
    [
        ("steps: '2,000'", ("steps=2000",)),
        ("steps: 2.5", ()),
        ("steps: inf", ()),  # in YAML a text, as nan is
        ("steps: nan", ()),
        ("optimizer: {lr: '1 e-3'}", ("optimizer.lr=0.001",)),
        ("optimizer: {name: adm}", ("optimizer.name=adam",)),
    ],
)
def test_a_wrong_value_is_mended_where_there_is_no_doubt_what_was_meant(configs, written, hints):
    composed = compose(None, search=configs({"rl/toy/default.yaml": f"{written}\n"}), schema=Toy)
    with pytest.raises(ConfigError, match="has a wrong value") as caught:
        composed.model(Toy)
    assert caught.value.hints == hints


def test_what_must_be_given_is_named_whole_with_an_override_to_fill_in(configs):
    class Data(Section):
        path: str

    class Asking(Section):
        data: Data
        seed: int

    search = configs({"rl/toy/default.yaml": "data: {}\n"})
    with pytest.raises(ConfigError) as caught:
        compose(None, search=search, schema=Asking).model(Asking)
    assert {(p.what, p.hints) for p in caught.value.problems} == {
        ("'data.path' must be given a value", ("data.path=VALUE",)),
        ("'seed' must be given a value", ("seed=VALUE",)),
    }


def test_a_rule_over_several_keys_says_so(configs):
    composed = compose(None, ["steps=3"], search=configs({}), schema=Toy)
    with pytest.raises(ConfigError) as caught:
        composed.model(Toy)
    assert caught.value.what == "steps must be even, not 3"


def test_known_keys_of_nested_optional_and_open_sections():
    keys = known_keys(Toy)
    assert "optimizer.lr" in keys
    assert "judge.model" in keys
    assert "judges.*.tries" in keys
    assert "options.*" in keys


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


def test_nearest_keys_prefers_siblings_and_finds_moved_keys():
    assert nearest_keys(Toy, "optimizer.lrr")[0] == "optimizer.lr"
    assert nearest_keys(Toy, "lr")[0] == "optimizer.lr"


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


def test_load_schema():
    assert load_schema("nemotron_steps.config.schema.rl:RlConfig").__name__ == "RlConfig"
