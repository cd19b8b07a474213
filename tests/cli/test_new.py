"""`steps new`: what it writes can be installed, and its own tests are green, soon."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from nemotron_steps.cli.scaffold import with_entry_point
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


def test_an_entry_point_of_another_thing_is_not_replaced():
    text = with_entry_point('[project]\nname = "x"\n', "group", "a", "x:A")
    assert with_entry_point(text, "group", "a", "x:A") == text
    with pytest.raises(RequestError, match="announces another 'a'"):
        with_entry_point(text, "group", "a", "x:B")


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
