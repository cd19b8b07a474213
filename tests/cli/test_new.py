"""`steps new`: what it writes can be installed, and its own tests are green, soon."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from nemotron_steps.cli.main import steps
from nemotron_steps.cli.scaffold import KINDS, with_entry_point
from nemotron_steps.errors import RequestError

NAMES = {
    "step": "acme/filter_prompts",
    "environment": "acme_lookup",
    "executor": "acme_queue",
    "type": "acme_table",
    "pipeline": "acme_rl",
}


def as_installed(root: Path, site: Path) -> dict[str, str]:
    """The environment of a process that has the package at `root` installed in place, as `pip install -e` does it."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = ""
    for group, entries in project["entry-points"].items():
        points += f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
    (info / "entry_points.txt").write_text(points)
    return {
        **os.environ,
        "PYTHONPATH": f"{site}{os.pathsep}{root}",
        "OMP_NUM_THREADS": "1",
        "STEPS_PATH": "",
        "PYTEST_ADDOPTS": "",
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", NAMES)
def test_what_is_new_is_green(cli, workplace: Path, kind: str):
    made = cli("new", kind, NAMES[kind])
    assert made.code == 0, made.err
    pack = workplace / "steps_pack"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(pack)],
        capture_output=True,
        text=True,
        timeout=240,
        env=as_installed(pack, workplace / "site"),
        cwd=workplace,
    )
    assert done.returncode == 0, done.stdout + done.stderr  # 5 where there are no tests


def test_every_kind_is_tested():
    assert set(NAMES) == set(KINDS)


def test_an_empty_folder_may_become_a_package(cli, workplace: Path):
    (workplace / "steps_pack").mkdir()
    assert cli("new", "acme/filter_prompts").code == 0


def test_a_name_alone_is_a_steps(cli, workplace: Path):
    assert cli("new", "acme/filter_prompts").code == 0
    assert (workplace / "steps_pack/steps_pack/pack/manifests/acme/filter_prompts.toml").is_file()
    assert cli("new", "step", "step", "--into", "other").code == 0
    assert (workplace / "other/other/pack/manifests/step.toml").is_file()


def test_what_is_new_joins_a_package_that_is_there(cli, workplace: Path):
    assert cli("new", "acme/filter_prompts").code == 0
    assert cli("new", "environment", "acme_lookup").code == 0
    assert cli("new", "environment", "acme_other").code == 0
    points = tomllib.loads((workplace / "steps_pack/pyproject.toml").read_text())["project"]["entry-points"]
    assert points == {
        "nemotron_steps.packs": {"steps_pack": "steps_pack:pack"},
        "nemotron_steps.environments": {
            "acme_lookup": "steps_pack.acme_lookup:AcmeLookup",
            "acme_other": "steps_pack.acme_other:AcmeOther",
        },
    }
    again = cli("new", "environment", "acme_other")
    assert again.code == 2 and "overwrite" in again.err


@pytest.mark.parametrize("words", [("acme/3d_prep",), ("acme/class",), ("environment", "none"), ("executor", "import")])
def test_what_is_written_is_python_whatever_the_name(cli, workplace: Path, words: tuple[str, ...]):
    assert cli("new", *words).code == 0
    modules = list((workplace / "steps_pack").rglob("*.py"))
    assert len(modules) == 3
    for module in modules:
        ast.parse(module.read_text(), str(module))


def test_a_name_that_is_taken_or_malformed_is_refused(cli):
    taken = cli("new", "environment", "mcqa")
    assert taken.code == 2 and "there is an environment 'mcqa' already" in taken.err
    malformed = cli("new", "environment", "Acme-Lookup")
    assert malformed.code == 2 and "steps new environment acme_lookup" in malformed.err
    unknown = cli("new", "thing", "acme")
    assert unknown.code == 2 and "steps new environment acme_lookup" in unknown.err


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        (("type",), "steps new type acme_type"),
        (("enviroment", "acme_x"), "steps new environment acme_x"),
        (("executor", "my", "queue"), "steps new executor my_queue"),
        (("filter", "prompts"), "steps new step acme/filter_prompts"),
    ],
)
def test_the_hint_is_what_was_meant(cli, workplace: Path, typed: tuple[str, ...], hint: str):
    refused = cli("new", *typed, "--json")
    assert refused.code == 2 and refused.json["error"]["hints"][0] == hint
    assert cli(*hint.split()[1:]).code == 0


def test_an_entry_point_of_another_thing_is_not_replaced():
    text = with_entry_point('[project]\nname = "x"\n', "group", "a", "x:A")
    assert with_entry_point(text, "group", "a", "x:A") == text
    with pytest.raises(RequestError, match="announces another 'a'"):
        with_entry_point(text, "group", "a", "x:B")


def test_every_template_is_filled_in(cli, workplace: Path):
    for kind, name in NAMES.items():
        assert steps(["new", kind, name]) == 0
    left = [file for file in (workplace / "steps_pack").rglob("*.*") if re.search(r"@\w+@", file.read_text())]
    assert left == []


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("pipeline", "super3_rl", "a pipeline"),
        ("type", "rl_prompts", "a type"),
        ("executor", "slurm", "an executor"),
        ("step", "sft/automodel", "a step"),
    ],
)
def test_a_name_that_something_has_already_is_refused_for_every_kind(cli, kind: str, name: str, said: str):
    taken = cli("new", kind, name)
    assert taken.code == 2 and f"there is {said} '{name}' already" in taken.err and f"{name}_mine" in taken.err


def test_what_was_written_is_listed_with_what_to_do_next(cli, workplace: Path):
    lines = cli("new", "acme/filter_prompts").out.splitlines()
    written = [line.removeprefix("  + ") for line in lines if line.startswith("  + ")]
    assert all((workplace / "steps_pack" / path).is_file() for path in written) and len(written) == 7
    assert [line.split("   #")[0].strip() for line in lines[-4:]] == [
        "pip install -e './steps_pack[test]'",
        "pytest steps_pack",
        "steps show acme/filter_prompts",
        "steps run acme/filter_prompts --input rows=FILE.jsonl",
    ]
    more = cli("new", "environment", "acme_lookup", "--into", str(workplace / "steps_pack"))
    assert (
        "steps show" not in more.out and "pyproject.toml" not in more.out and "steps env show acme_lookup" in more.out
    )


@pytest.mark.parametrize(("name", "category"), [("acme/filter_prompts", "acme"), ("filter_prompts", "data_prep")])
def test_a_steps_category_is_the_first_part_of_its_name(cli, workplace: Path, name: str, category: str):
    assert cli("new", name).code == 0
    manifest = tomllib.loads((workplace / f"steps_pack/steps_pack/pack/manifests/{name}.toml").read_text())
    assert (manifest["step"]["id"], manifest["step"]["category"]) == (name, category)
