"""Corners of env.toml: what is inherited and filled in, whose key is at fault, and what is shown."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.config.profiles import OpenProfile, Profile, load_environment
from nemotron_steps.errors import ConfigError, UnknownNameError, UnsupportedError
from nemotron_steps.runs.executors.base import profile_model


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> None:
        (tmp_path / "env.toml").write_text(text)

    return write


def profile(name: str, model: type[Profile] = Profile) -> Profile:
    return load_environment().profile(name, lambda executor: model)


@pytest.mark.parametrize(
    ("keys", "here", "variables"),
    [
        ("", True, {}),
        ('env_vars = {A = "1"}', True, {"A": "1"}),
        ('setup_lines = ["x"]\nenv_vars = {A = "1"}', False, {"A": "1"}),
        ('executor = "slurm"\nenv_vars = {A = "1"}', False, {}),
    ],
)
def test_a_profile_without_setup_works_in_the_process_that_asks(write, keys, here, variables):
    write(f"[a]\n{keys}\n")
    found = profile("a")
    assert (found.runs_here, dict(found.variables_here)) == (here, variables)


def test_a_key_of_the_nearest_profile_counts_whole_and_variables_add_up(write):
    write(
        '[base]\nnodes = 2\nsetup_lines = ["a", "b"]\nenv_vars = {A = "1", B = "2"}\n'
        '[middle]\nextends = "base"\nnodes = 3\n[top]\nextends = "middle"\nenv_vars = {C = "3"}\n'
    )
    top = profile("top")
    assert (top.nodes, top.setup_lines, top.env_vars, top.extends) == (
        3,
        ("a", "b"),
        {"A": "1", "B": "2", "C": "3"},
        "middle",
    )


def test_a_wrong_key_is_where_it_is_written_though_another_profile_inherits_it(write):
    write('[base]\nnodes = 0\n[top]\nextends = "base"\ngpus_per_node = -1\n')
    with pytest.raises(ConfigError) as caught:
        profile("top")
    assert {(p.what, Path(p.where).name) for p in caught.value.problems} == {
        ("'nodes' in [top] is wrong", "env.toml:2"),
        ("'gpus_per_node' in [top] is wrong", "env.toml:5"),
    }


def test_what_a_profile_extends_is_a_name(write):
    write("[a]\nextends = 3\n")
    with pytest.raises(ConfigError, match=r"'extends' in \[a\] is wrong"):
        profile("a")
    write('[a]\nextends = "b"\n[b]\nextends = "c"\n[c]\nextends = "b"\n')
    with pytest.raises(ConfigError, match="circle: a → b → c → b") as caught:
        profile("a")
    assert caught.value.where.endswith("env.toml:4")


def test_an_executor_that_is_not_there_is_told_where_it_is_named(write):
    write('[base]\nexecutor = "cloud"\n[top]\nextends = "base"\n')

    def models(executor: str) -> type[Profile]:
        raise UnsupportedError(f"no executor {executor}", where="elsewhere")

    with pytest.raises(UnsupportedError, match="no executor cloud") as caught:
        load_environment().profile("top", models)
    assert caught.value.where.endswith("env.toml:2")
    write("[a]\nexecutor = 3\n")
    with pytest.raises(ConfigError, match=r"'executor' in \[a\] is wrong"):
        load_environment().profile("a", models)


def test_variables_are_filled_in_wherever_a_text_stands(write, monkeypatch):
    monkeypatch.setenv("SITE", "here")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("NONE", raising=False)
    write(
        '[a]\nnested = {list = ["${oc.env:SITE}/x", 3, ["${oc.env:NONE,a b}"]]}\n'
        'two = "${oc.env:SITE}-${oc.env:SITE}"\nempty = "<${oc.env:NONE,}${oc.env:EMPTY,x}>"\nother = "${SITE}"\n'
    )
    found = profile("a", OpenProfile).model_dump()
    assert found["nested"] == {"list": ["here/x", 3, ["a b"]]}
    assert (found["two"], found["empty"], found["other"]) == ("here-here", "<>", "${SITE}")


def test_a_profile_is_shown_with_what_it_sets_and_without_secrets(write):
    write(
        '[base]\nnodes = 1\n[a]\nextends = "base"\ngpus_per_node = 8\nsetup_lines = ["export HF_TOKEN=abc"]\n'
        'env_vars = {HF_TOKEN = "abc", MODE = "fast"}\n'
    )
    assert profile("a").shown() == {
        "executor": "local",
        "gpus_per_node": 8,
        "env_vars": {"HF_TOKEN": "***", "MODE": "fast"},
        "setup_lines": ["export HF_TOKEN=***"],
    }
    assert profile("base").shown() == {"executor": "local"}


@pytest.mark.parametrize(
    ("name", "hint", "found"),
    [
        ("YOUR-CLUSTER", "printf '\\n[YOUR-CLUSTER]\\nexecutor = \"slurm\"\\n' >> ", "YOUR-CLUSTER"),
        ("my_local", "printf '\\n[my_local]\\nexecutor = \"local\"\\n' >> ", "my_local"),
        ("lepton_gpu", 'printf \'\\n[lepton_gpu]\\nexecutor = "lepton"\\nresource_shape = ', "lepton_gpu"),
        ("wandb", None, "[wandb], a mirror, not a profile"),
        ("bsae", "-r base", "bsae"),
        ("a b", None, "a b"),
        ("cli", None, "[cli], which other tools read"),
    ],
)
def test_a_profile_that_is_not_there_is_offered_or_made(write, name, hint, found):
    write("[base]\n[wandb]\nproject = 'x'\n[cli]\n")
    with pytest.raises(UnknownNameError, match=f"no profile '{name}'") as caught:
        load_environment().profile(name, profile_model)
    assert [h.startswith(str(hint)) for h in caught.value.hints] == ([True] if hint else [])
    assert (caught.value.expected, caught.value.found) == ("base", found)
    assert str(caught.value.where).endswith("env.toml:2" if name == "wandb" else "env.toml")
    if hint and hint.startswith("printf"):
        assert os.system(caught.value.hints[0]) == 0
        made = load_environment().profile(name, profile_model)
        assert f'executor = "{made.executor}"' in caught.value.hints[0]


def test_a_key_of_another_tools_profile_says_why_it_does_nothing(write):
    write('[a]\npackager = "git"\nnodess = 2\nzzzzzz = 1\n')
    with pytest.raises(ConfigError) as caught:
        profile("a")
    packager, nodes, other = caught.value.problems
    assert packager.what.endswith(": a job runs the `steps` installed where it runs; nothing is packed")
    assert packager.hints[0].startswith("sed -i '2s/^/# /' ") and packager.expected.startswith(
        "executor, extends, nodes"
    )
    assert nodes.expected == "nodes" and nodes.hints[0].startswith("sed -i '3s/\\bnodess\\b/nodes/' ")
    assert other.expected == packager.expected and other.hints == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[wandb]\nproject = "x"\nmode = "sometimes"\n', r"'mode' in \[wandb\] is wrong"),
        ("[wandb]\n", r"\[wandb\] needs 'project'"),
        ("[tensorboard]\nfolder = 3\n", r"'folder' in \[tensorboard\] is wrong"),
    ],
)
def test_tables_of_mirrors_are_checked_when_they_are_read(write, text, said):
    write(text)
    environment = load_environment()
    assert environment.names == ()
    with pytest.raises(ConfigError) as caught:
        _ = environment.mirrors
    assert caught.value.where.endswith(f"env.toml:{text.count(chr(10)) if 'project' not in said else 1}")
    assert re.search(said, caught.value.what)


def test_keys_are_found_in_tables_however_they_are_written(write):
    write('# first\n[ "a" ]\n"nodes" = 0\n[a.env_vars]\n"1A" = "x"\n[b]\nenv_vars."2B" = "x"\n')
    for name, lines in (("a", [3, 4]), ("b", [7])):
        with pytest.raises(ConfigError) as caught:
            profile(name)
        places = [p.where.rpartition(":")[2] for p in caught.value.problems or [caught.value]]
        assert places == [str(line) for line in lines]


def test_a_file_that_cannot_be_read_is_named(write, tmp_path):
    (tmp_path / "env.toml").write_bytes(b"[a]\nx = '\xff'\n")
    with pytest.raises(ConfigError, match=r"cannot read env\.toml") as caught:
        load_environment()
    assert caught.value.where == str(tmp_path / "env.toml")


def test_a_table_in_one_line_is_found_as_well(write):
    write('"long name" = {}\na = {nodes = 0}\n')
    with pytest.raises(ConfigError) as caught:
        profile("a")
    assert caught.value.where.endswith("env.toml:2")


@pytest.mark.parametrize(("line", "right"), [("mem = 0  # all: 0", 'mem = "0"  # all: 0'), ('nodes="16"', "nodes= 16")])
def test_a_number_written_as_the_other_kind_is_put_right_by_the_hint(
    write: Any, tmp_path: Path, line: str, right: str
) -> None:
    write(f'[a]\nexecutor = "slurm"\n{line}\n')
    with pytest.raises(ConfigError, match="is wrong") as caught:
        load_environment().profile("a", profile_model)
    assert os.system(caught.value.hints[0]) == 0
    assert (tmp_path / "env.toml").read_text().splitlines()[2] == right
    assert load_environment().profile("a", profile_model)
