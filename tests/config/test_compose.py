from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron_steps.config.compose import SearchPath, compose
from nemotron_steps.config.validation import validate
from nemotron_steps.errors import ConfigError

from .toy_schema import Toy

GRPO = """\
defaults:
  - ../base/common
  - _self_
steps: 4
optimizer:
  lr: 1e-4
inputs:
  policy: {step: sft/toy, config: tiny}
"""
COMMON = """\
# @package _global_
steps: 2
optimizer:
  lr: 1e-2
  name: sgd
options:
  words: [a, b, c]
"""


def test_defaults_list_merges_bases_and_the_last_writer_is_the_origin(configs):
    search = configs({"rl/toy/default.yaml": GRPO, "rl/base/common.yaml": COMMON})
    composed = compose(None, search=search)
    assert composed.values == {
        "steps": 4,
        "optimizer": {"lr": 1e-4, "name": "sgd"},
        "options": {"words": ["a", "b", "c"]},
    }
    assert composed.inputs == {"policy": {"step": "sft/toy", "config": "tiny"}}
    assert composed.origin("steps").endswith("rl/toy/default.yaml:4")
    assert composed.origin("optimizer.name").endswith("common.yaml:5")
    assert composed.file.endswith("default.yaml")


def test_a_group_of_configs_has_one_chosen_by_the_defaults_or_an_override(configs):
    search = configs(
        {
            "rl/toy/default.yaml": "defaults: [optimizer: adam, _self_]\nsteps: 4\n",
            "rl/toy/optimizer/adam.yaml": "lr: 1\n",
            "rl/toy/optimizer/sgd.yaml": "lr: 2\n",
        }
    )
    assert compose(None, search=search).values == {"optimizer": {"lr": 1}, "steps": 4}
    chosen = compose(None, ["rl/toy/optimizer@optimizer=sgd", "steps=6"], search=search)
    assert chosen.values == {"optimizer": {"lr": 2}, "steps": 6}
    assert chosen.origin("optimizer.lr").endswith("sgd.yaml:1")
    with pytest.raises(ConfigError, match="sdg") as caught:
        compose(None, ["rl/toy/optimizer@optimizer=sdg"], search=search)
    assert "adam" in str(caught.value) and "sgd" in str(caught.value)


def test_overrides_follow_hydras_grammar(configs):
    search = configs({"rl/toy/default.yaml": GRPO, "rl/base/common.yaml": COMMON})
    composed = compose(
        None,
        [
            "steps=12",
            "+options.extra={a: 1, b: [x, 'y z']}",
            "options.words=[d]",
            "~optimizer.name",
            "either='1,2'",
            "++judge.model=hub/name",
            "inputs.policy.config=default",
        ],
        search=search,
        schema=Toy,
    )
    assert composed.values == {
        "steps": 12,
        "optimizer": {"lr": 1e-4},
        "options": {"words": ["d"], "extra": {"a": 1, "b": ["x", "y z"]}},
        "either": "1,2",
        "judge": {"model": "hub/name"},
    }
    assert composed.inputs["policy"]["config"] == "default"
    assert composed.origin("options.extra.a") == "override '+options.extra={a: 1, b: [x, 'y z']}'"
    assert composed.origin("options.words") == "override 'options.words=[d]'"


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("judge.model=a=b:{", "\"judge.model='a=b:{'\"   # quotes special characters"),
        ("steps", "'steps'   # quotes special characters"),
        ("steps=1,000", "steps=1000"),
        ("options.words=a,b", "'options.words=[a,b]'   # a list"),
    ],
)
def test_an_override_that_is_none_is_offered_in_quotes_or_as_a_list(configs, override, hint):
    with pytest.raises(ConfigError) as caught:
        compose(None, [override], search=configs({}), schema=Toy)
    error = caught.value
    assert error.where == f"override '{override}'" and error.hints[0] == hint


def test_every_wrong_override_is_reported_at_once(configs):
    search = configs({"rl/toy/default.yaml": "steps: 2\n"})
    with pytest.raises(ConfigError) as caught:
        compose(None, ["steps=1,2", "~options", "+steps=1"], search=search, schema=Toy)
    problems = {problem.where: problem for problem in caught.value.problems}
    assert set(problems) == {"override 'steps=1,2'", "override '~options'", "override '+steps=1'"}
    assert "sweep" in problems["override 'steps=1,2'"].what


@pytest.mark.parametrize(("schema", "hint"), [(Toy, "optimizer.lr=1"), (None, "optimizer.lr=1")])
def test_a_key_that_is_not_there_is_refused_with_the_nearest(configs, schema, hint):
    search = configs({"rl/toy/default.yaml": "optimizer: {lr: 2}\n"})
    with pytest.raises(ConfigError, match="unknown key 'lr'") as caught:
        composed = compose(None, ["lr=1"], search=search, schema=schema)
        validate(composed, schema)
    assert caught.value.hints[0] == hint and caught.value.where == "override 'lr=1'"


def test_a_misspelt_key_of_a_secret_is_told_without_it(configs):
    with pytest.raises(ConfigError) as caught:
        validate(compose(None, ["judge.api_keyy=canary"], search=configs({}), schema=Toy), Toy)
    assert "canary" not in str(caught.value)


def test_environment_interpolation_with_default(configs, monkeypatch):
    search = configs({"rl/toy/default.yaml": "judge: {model: '${oc.env:RL_REWARD_MODEL,meta-llama/Llama-3.2-1B}'}\n"})
    monkeypatch.delenv("RL_REWARD_MODEL", raising=False)
    assert compose(None, search=search).values["judge"]["model"] == "meta-llama/Llama-3.2-1B"
    monkeypatch.setenv("RL_REWARD_MODEL", "")
    found = compose(None, ["+a='${oc.env:RL_REWARD_MODEL}'", "+b='${oc.env:RL_REWARD_MODEL,null}'"], search=search)
    assert found.values == {"judge": {"model": "meta-llama/Llama-3.2-1B"}, "a": "", "b": None}
    assert found.variables == {"a": ("RL_REWARD_MODEL",)}
    monkeypatch.setenv("RL_REWARD_MODEL", "/models/judge")
    assert compose(None, search=search).values["judge"]["model"] == "/models/judge"


@pytest.mark.parametrize("key", ["'a.b'", "3"])
def test_an_interpolation_that_does_not_resolve_is_told_whatever_its_key(key, configs):
    search = configs({"rl/toy/default.yaml": f"judge: {{{key}: '${{oc.env:RL_NOT_SET}}'}}\n"})
    with pytest.raises(ConfigError, match="RL_NOT_SET is not set") as caught:
        compose(None, search=search)
    assert caught.value.hints[0] == "export RL_NOT_SET=VALUE"


def test_a_mandatory_value_that_nobody_set(configs):
    search = configs({"rl/toy/default.yaml": "steps: ???\n"})
    with pytest.raises(ConfigError) as caught:
        compose(None, search=search)
    assert caught.value.hints == ("steps=VALUE",)
    assert compose(None, ["steps=4"], search=search).values == {"steps": 4}


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("steps: 2\nsteps: 3\n", 2, "written twice"),
        ("- a\n- b\n", 1, "keys and values"),
        ("steps: 1\ndefaults: {a: b}\n", 2, "defaults must be a list"),
    ],
)
def test_a_malformed_file_is_named_with_its_line(configs, text, line, said):
    search = configs({"rl/toy/default.yaml": text})
    with pytest.raises(ConfigError) as caught:
        compose(None, search=search)
    assert f"default.yaml:{line}" in caught.value.where
    assert said in caught.value.what


_SCALARS = st.one_of(
    st.integers(),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    st.text(st.characters(codec="ascii", exclude_categories=["Cc"])),
)
_TREES = st.dictionaries(
    st.from_regex(r"[a-z_]{1,6}", fullmatch=True),
    st.recursive(
        _SCALARS,
        lambda child: (
            st.lists(child, max_size=3)
            | st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), child, max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=4,
)


@settings(max_examples=20, deadline=None)
@given(base=_TREES, top=_TREES)
def test_agrees_with_hydra_compose(tmp_path_factory, base, top):
    import hydra
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for tree in (base, top):
        for reserved in ("defaults", "hydra", "inputs"):
            tree.pop(reserved, None)
    root: Path = tmp_path_factory.mktemp("agree") / "configs"
    (root / "rl/toy").mkdir(parents=True)
    (root / "base").mkdir()
    try:
        base_text = OmegaConf.to_yaml(OmegaConf.create(base))
        top_text = OmegaConf.to_yaml(OmegaConf.create(top))
    except OmegaConfBaseException:
        return
    header = "# @package _global_\n"
    (root / "base/common.yaml").write_text(header + base_text)
    (root / "rl/toy/default.yaml").write_text(header + "defaults: [/base/common, _self_]\n" + top_text.lstrip("{}"))
    overrides = ["+zz_added={a: 1, b: [1.5, 'x,y']}", "++zz_forced=1e-3"]
    with hydra.initialize_config_dir(str(root), version_base="1.3"):
        try:
            expected = OmegaConf.to_container(hydra.compose("rl/toy/default", overrides), resolve=True)
        except Exception as error:
            with pytest.raises(ConfigError):
                compose(None, overrides, search=SearchPath("rl/toy", (root,)))
            assert error is not None
            return
    if "???" in repr(expected):
        return
    assert compose(None, overrides, search=SearchPath("rl/toy", (root,))).values == expected
