"""Installed packages that raise, print, sleep, hang or lie: they harm no command, and are named where they matter."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemotron_steps.manifest.packs import builtin_pack_root
from tests.manifest.packs_on_disk import write_files

MODULE = """
from pydantic import BaseModel, ConfigDict
from nemotron_steps.environments.base import Environment, GradeResult

class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

class Rewards(Environment):
    name = "{name}"
    async def verify(self, row, response, session):
        return GradeResult(0.0)

class Queue:
    def submit(self, launch): return "1"
    def status(self, job): return None
    def cancel(self, job): return None

def run(context): pass
"""
AT_IMPORT = {
    "raising": "raise RuntimeError('not today')",
    "leaving": "raise SystemExit(7)",
    "sleeping": "import time; time.sleep(60)",
    "printing": "print('hello from a pack')",
    "lacking": "import no_such_library",
}
MANIFEST = """\
[step]
id = "{name}/step"
entry = "{name}.code:run"
config_schema = "{name}.code:Config"
[[produces]]
type = "training_jsonl"
"""


def install(site: Path) -> None:
    """A package for each misdeed."""
    files: dict[str, str] = {}

    def add(name: str, points: str, **texts: str) -> None:
        files[f"{name}-1.0.dist-info/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        files[f"{name}-1.0.dist-info/entry_points.txt"] = points
        for path, text in texts.items():
            files[f"{name}/{path.replace('__', '/')}.{'toml' if 'manifest' in path else 'py'}"] = text

    for name, line in AT_IMPORT.items():
        points = (
            f"[nemotron_steps.packs]\n{name} = {name}:pack\n"
            f"[nemotron_steps.environments]\n{name} = {name}.code:Rewards\n"
            f"[nemotron_steps.executors]\n{name} = {name}.code:Queue\n"
        )
        add(name, points, pack__manifests__step=MANIFEST.format(name=name), code=line + MODULE.format(name=name))
        files[f"{name}/__init__.py"] = line if name != "printing" else ""
    wrong = '[step]\nid = 3\nname = ["x"]\n[[consumes]]\ntype = 1\n'
    add("lying", "[nemotron_steps.packs]\nlying = lying:pack\n", pack__manifests__wrong=wrong)
    files["lying/__init__.py"] = ""
    nowhere = "[nemotron_steps.packs]\nnowhere = nowhere:pack\n[nemotron_steps.environments]\nnowhere = nowhere:X\n"
    add("nowhere", nowhere + "[nemotron_steps.executors]\nnowhere = nowhere:X\n")
    add(
        "doubling",
        "[nemotron_steps.packs]\ndoubling = doubling:pack\n",
        pack__manifests__a=MANIFEST.format(name="raising"),
    )
    files["doubling/__init__.py"] = ""
    write_files(site, files)
    os.mkfifo(site / "lying/pack/manifests/pipe.toml")
    (site / "lying/pack/manifests/endless.toml").symlink_to("/dev/zero")
    (site / "lying/pack/manifests/circle").symlink_to(site / "lying/pack")
    with (site / "lying/pack/manifests/huge.toml").open("wb") as huge:
        huge.truncate(1 << 30)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    install(folder)
    return folder


def run(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{site}:{builtin_pack_root()}",
        "XDG_CACHE_HOME": str(site / "cache"),
        "HOME": str(site),
    }
    command = [sys.executable, "-m", "nemotron_steps.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environ, cwd=site, timeout=50)


def told(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """The error of a command under --json; what was printed is JSON and nothing else."""
    error = json.loads(done.stdout)["error"]
    first = error["problems"][0] if error.get("problems") else error
    assert first["code"], done.stdout
    return first


@pytest.mark.parametrize(
    "words",
    [
        ("list", "--json"),
        ("env", "show", "mcqa", "--json"),
        ("plan", "data_prep/rl_prep", "-c", "tiny", "--json"),
    ],
)
def test_commands_about_other_things_answer_as_without_them(site: Path, words: tuple[str, ...]) -> None:
    begin = time.monotonic()
    done = run(site, *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert "hello from a pack" not in done.stdout
    assert time.monotonic() - begin < 40  # of 60 that the sleeping one takes


def test_steps_list_names_what_is_wrong_by_package_and_file(site: Path) -> None:
    listed = json.loads(run(site, "list", "--json").stdout)
    ids = {step["id"] for step in listed["steps"]}
    assert {"rl/nemo_rl/rlhf", "raising/step", "sleeping/step"} <= ids
    problems = {str(problem["where"]): problem["what"] for problem in listed["problems"]}
    for file in ("wrong.toml:2", "pipe.toml", "endless.toml", "huge.toml"):
        assert any(where.endswith(f"lying/pack/manifests/{file}") for where in problems), (file, problems)
    assert problems["entry point 'nowhere' of distribution 'nowhere'"].startswith("pack 'nowhere' cannot be located")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raising", "RuntimeError: not today"),
        ("leaving", "SystemExit: 7"),
    ],
)
def test_a_package_that_fails_at_import_is_named_with_its_line(site: Path, name: str, message: str) -> None:
    for words in (("plan", f"{name}/step"), ("env", "show", name)):
        done = run(site, *words, "--json")
        error = told(done)
        assert done.returncode == 2
        assert message in error["what"]
        assert f"{site}/{name}/__init__.py:1" in str(error["where"])


def test_what_a_package_prints_at_import_stays_out_of_json(site: Path) -> None:
    for words in (("plan", "printing/step"), ("env", "show", "printing"), ("run", "printing/step", "-d")):
        done = run(site, *words, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        json.loads(done.stdout)
        assert "hello from a pack" in done.stderr


def test_an_executor_that_fails_or_prints_at_import_is_named(site: Path) -> None:
    (site / "env.toml").write_text('[a]\nexecutor = "raising"\n[b]\nexecutor = "printing"\n')
    error = told(run(site, "run", "printing/step", "-d", "-r", "a", "--json"))
    assert "executor 'raising' cannot be loaded" in error["what"] and "not today" in error["what"]
    done = run(site, "run", "printing/step", "-d", "-r", "b", "--json")
    assert done.returncode == 0, done.stdout
    json.loads(done.stdout)


def test_two_packages_with_an_environment_of_one_name_are_both_named(tmp_path: Path) -> None:
    files = {}
    for name in ("first", "second"):
        files[f"{name}/__init__.py"] = MODULE.format(name="shared")
        files[f"{name}-1.0.dist-info/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        files[f"{name}-1.0.dist-info/entry_points.txt"] = f"[nemotron_steps.environments]\nshared = {name}:Rewards\n"
    error = told(run(write_files(tmp_path, files), "env", "show", "shared", "--json"))
    assert error["found"] == "first, second"
