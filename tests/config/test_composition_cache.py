"""A remembered composition is used only while composing again would give the same."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

from nemotron_steps.config import composition_cache
from nemotron_steps.config.compose import compose
from nemotron_steps.config.locations import cache_folder
from nemotron_steps.config.search import SearchPath
from nemotron_steps.errors import ConfigError

from .toy_schema import Toy

FILES = {
    "rl/toy/default.yaml": "defaults: [../base/common, _self_]\nsteps: 4\n",
    "rl/base/common.yaml": "# @package _global_\nsteps: 2\noptimizer: {lr: 1e-2}\n",
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TOY_MODEL", raising=False)


@pytest.fixture
def hydra_calls(monkeypatch):
    """Counts real compositions."""
    from nemotron_steps.config import hydra_loader

    calls = []
    real = hydra_loader.compose_mounts

    def counted(*arguments):
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(hydra_loader, "compose_mounts", counted)
    return calls


def _compose(search: SearchPath, overrides=(), config=None):
    remembered = compose(config, overrides, search=search, schema=Toy, remember=True)
    assert remembered == compose(config, overrides, search=search, schema=Toy)
    return remembered


def test_the_second_time_is_remembered_and_the_same(configs, hydra_calls):
    search = configs(FILES)
    first = compose(None, ["steps=8"], search=search, schema=Toy, remember=True)
    second = compose(None, ["steps=8"], search=search, schema=Toy, remember=True)
    assert first == second
    assert second.origin("optimizer.lr").endswith("common.yaml:3")
    assert len(hydra_calls) == 1
    compose(None, ["steps=6"], search=search, schema=Toy, remember=True)
    assert len(hydra_calls) == 2


def test_a_changed_file_is_seen_even_with_the_same_size_and_time(configs, hydra_calls, tmp_path):
    import os

    search = configs(FILES)
    _compose(search)
    base = tmp_path / "pack/configs/rl/base/common.yaml"
    times = base.stat()
    base.write_text(base.read_text().replace("1e-2", "1e-3"))
    os.utime(base, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert _compose(search).values["optimizer"]["lr"] == 1e-3


def test_a_file_that_appears_before_one_that_was_used_is_seen(tmp_path, configs):
    search = configs(FILES)
    beside = tmp_path / "beside"
    beside.mkdir()
    search = SearchPath(search.step, search.roots, beside)
    assert _compose(search).values["steps"] == 4
    (beside / "default.yaml").write_text("steps: 6\n")
    assert _compose(search).values["steps"] == 6


def test_a_removed_file_is_seen(configs, tmp_path):
    search = configs(FILES)
    _compose(search)
    (tmp_path / "pack/configs/rl/base/common.yaml").unlink()
    with pytest.raises(ConfigError):
        compose(None, search=search, schema=Toy, remember=True)


def test_environment_variables_are_seen_and_their_values_not_kept(configs, monkeypatch, hydra_calls):
    search = configs({"rl/toy/default.yaml": "judge: {model: '${oc.env:TOY_MODEL,hub/default}'}\n"})
    for _ in range(2):
        assert compose(None, search=search, schema=Toy, remember=True).get("judge.model") == "hub/default"
    assert len(hydra_calls) == 1
    monkeypatch.setenv("TOY_MODEL", "/models/mine")
    for _ in range(2):
        assert compose(None, search=search, schema=Toy, remember=True).get("judge.model") == "/models/mine"
    assert len(hydra_calls) == 3
    assert not any("/models/mine" in path.read_text() for path in cache_folder().rglob("*.json"))


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("options: {a: '${oc.decode:\"1\"}'}\n", ()),
        ("options: {hf_token: abcdefgh}\n", ()),
        ("steps: 2\n", ("api_key=abcdefgh",)),
        ("options: {a: .nan}\n", ()),
        ("options: {1: a}\n", ()),
    ],
)
def test_what_may_not_be_kept_is_not(configs, text, overrides):
    search = configs({"rl/toy/default.yaml": text})
    compose(None, overrides, search=search, schema=Toy, remember=True)
    assert list(cache_folder().rglob("*.json")) == []


@pytest.mark.parametrize("name", ["compose", "references", "published.table", "published.translate", "schema.rl"])
def test_another_version_of_what_composes_has_entries_of_its_own(name, monkeypatch):
    def key() -> str:
        return composition_cache.request_key("rl/toy", "rl/toy/tiny", (), (), schema_keys=("a",))

    before, stat = key(), composition_cache._stat
    changed = import_module(f"nemotron_steps.config.{name}").__file__
    monkeypatch.setattr(composition_cache, "_stat", lambda path: [0] if str(path) == changed else stat(path))
    assert key() != before


def test_a_published_key_that_a_step_has_since_made_its_own_is_left_out_no_more(configs):
    class Mine(Toy):
        policy: dict[str, bool]

    search = configs({"rl/toy/default.yaml": "steps: 2\npolicy: {offload_optimizer_for_logprob: false}\n"})
    left_out, own = {}, {"offload_optimizer_for_logprob": False}
    for schema, policy in ((Toy, left_out), (Mine, own)):
        assert compose(None, search=search, schema=schema, remember=True).get("policy", {}) == policy


def test_errors_are_not_kept(configs):
    search = configs({"rl/toy/default.yaml": "steps: 2\n"})
    for _ in range(2):
        with pytest.raises(ConfigError):
            compose(None, ["stpes=1"], search=search, schema=Toy, remember=True)
    assert list(cache_folder().rglob("*.json")) == []


def test_a_damaged_or_unwritable_cache_costs_only_time(configs, hydra_calls):
    search = configs(FILES)
    compose(None, search=search, schema=Toy, remember=True)
    (entry,) = cache_folder().rglob("*.json")
    for damage in ("", "{", "[]", '{"files": 3}', '{"files": {}, "absent": [], "folders": [], "unset": []}'):
        entry.write_text(damage)
        assert compose(None, search=search, schema=Toy, remember=True).values["steps"] == 4
    entry.unlink()
    entry.parent.rmdir()
    entry.parent.write_text("not a folder")
    assert compose(None, search=search, schema=Toy, remember=True).values["steps"] == 4


def test_the_cache_stays_small(configs, monkeypatch):
    monkeypatch.setattr(composition_cache, "_KEPT", 3)
    search = configs(FILES)
    for steps in range(2, 14, 2):
        compose(None, [f"steps={steps}"], search=search, schema=Toy, remember=True)
    assert len(list(cache_folder().rglob("*.json"))) == 3


def test_a_remembered_composition_needs_no_hydra(configs, tmp_path):
    import subprocess

    search = configs(FILES)
    code = (
        "import sys; from pathlib import Path; from nemotron_steps.config.compose import compose;"
        "from nemotron_steps.config.search import SearchPath;"
        f"search = SearchPath('rl/toy', (Path({str(search.roots[0])!r}),));"
        "c = compose(None, ['steps=6'], search=search, remember=True);"
        "print(c.values['steps'], 'hydra' in sys.modules, 'yaml' in sys.modules)"
    )
    said = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout for _ in range(2)]
    assert [line.split() for line in said] == [["6", "True", "True"], ["6", "False", "False"]]


def test_nothing_is_kept_unless_it_is_asked_for(configs):
    compose(None, search=configs(FILES), schema=Toy)
    assert list(cache_folder().rglob("*.json")) == []


def test_values_know_the_variables_that_they_are_read_from(configs, monkeypatch):
    monkeypatch.setenv("TOY_MODEL", "mine")
    monkeypatch.setenv("TOY_FOLDER", "mine")
    monkeypatch.delenv("TOY_OTHER", raising=False)
    text = (
        "judge: {model: 'a/${oc.env:TOY_MODEL}', tries: '${oc.env:TOY_OTHER,3}'}\n"
        "list: [x, {y: '${ oc.env : TOY_MODEL }', z: '${oc.env:TOY_FOLDER}/${oc.env:TOY_MODEL}'}]\n"
    )
    search = configs({"rl/toy/default.yaml": text})
    composed = compose(None, search=search)
    assert composed.variables == {
        "judge.model": ("TOY_MODEL",),
        "list.1.y": ("TOY_MODEL",),
        "list.1.z": ("TOY_FOLDER", "TOY_MODEL"),
    }
    assert composed.get("list") == ["x", {"y": "mine", "z": "mine/mine"}]
    monkeypatch.delenv("TOY_MODEL")
    plain = compose(None, ["judge.model=x", "list=[]"], search=search, remember=True)
    assert plain.variables == {} == compose(None, ["judge.model=x", "list=[]"], search=search, remember=True).variables


def test_a_defaults_list_that_depends_on_more_than_its_files_is_not_kept(configs):
    text = "defaults: [optimizer: '${oc.env:TOY_OPTIMIZER,adam}', _self_]\nsteps: 4\n"
    search = configs({"rl/toy/default.yaml": text, "rl/toy/optimizer/adam.yaml": "lr: 1\n"})
    assert compose(None, search=search, remember=True).values == {"steps": 4, "optimizer": {"lr": 1}}
    assert list(cache_folder().rglob("*.json")) == []
