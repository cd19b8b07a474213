"""`steps doctor` and `steps new`."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from nemotron_steps.cli.main import steps


def test_doctor_looks_at_everything(cli, workplace):
    result = cli("doctor", "--json")
    findings = {finding["name"]: finding for finding in result.json}
    assert result.code == 0, findings
    assert findings["torch"]["state"] == "ok"
    assert {"python", "megatron-core", "ray", "vllm", "bubblewrap", "C compiler", "slurm", "home", "disk"} <= set(
        findings
    )
    assert findings["toy_pack"]["detail"].startswith("4 steps")
    assert {"local", "ray", "slurm"} <= set(findings["executors"]["detail"].split(", "))
    for finding in findings.values():
        assert finding["state"] == "ok" or finding["fix"] or finding["detail"], finding


def test_doctor_finds_what_is_wrong(cli, workplace, monkeypatch):
    monkeypatch.setattr("nemotron_steps.cli.doctor._software", lambda: iter(()))
    (workplace / "manifests").mkdir()
    (workplace / "manifests" / "bad.toml").write_text("[step\n")
    (workplace / "env.toml").write_text("[here]\nnodez = 2\n")
    monkeypatch.setenv("STEPS_HOME", "/proc/nowhere")
    result = cli("doctor")
    assert result.code == 1
    assert "bad.toml" in result.out
    assert "unknown key 'nodez'" in result.out
    assert "✗ home" in result.out
    assert "3 to fix" in result.out


def test_a_new_step_runs_as_it_is(cli, workplace, monkeypatch):
    made = cli("new", "data_prep/my_prep")
    assert made.code == 0, made.err
    pack = workplace / "steps_pack"
    monkeypatch.setenv("STEPS_PATH", str(pack / "steps_pack" / "pack"))
    monkeypatch.syspath_prepend(str(pack))
    rows = workplace / "rows.jsonl"
    rows.write_text('{"a": "short"}\n{"a": "' + "x" * 90 + '"}\n')
    run = cli("run", "data_prep/my_prep", "--input", f"rows={rows}", "max_characters=50", "--json")
    assert run.code == 0, run.out + run.err
    assert run.json["steps"][0]["summary"] == {"kept": 1, "dropped": 1}
    assert cli("show", "data_prep/my_prep").code == 0


def test_a_pack_grows_and_nothing_is_overwritten(cli, workplace):
    assert steps(["new", "data_prep/first", "--into", "pack"]) == 0
    assert steps(["new", "eval/second", "--into", "pack"]) == 0
    again = cli("new", "data_prep/first", "--into", "pack")
    assert again.code == 2
    assert "overwrite" in again.err
    assert (workplace / "pack" / "pack" / "second.py").is_file()
    (workplace / "other").mkdir()
    (workplace / "other" / "file").write_text("")
    assert "not a pack" in cli("new", "data_prep/x", "--into", "other").err
    assert cli("new", "Bad Name").code == 2


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
