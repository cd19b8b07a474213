"""Without the engine's packages all that neither trains nor generates works; what does, says what to install."""

import json
import os
import subprocess
import tomllib
import venv
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.packaging.conftest import ROOT


def closure(requirements: list[str]) -> Iterator[Distribution]:
    """The installed distributions that requirements need, and what those need, without extras."""
    seen: set[str] = set()
    left = [Requirement(text) for text in requirements]
    while left:
        wanted = left.pop()
        if wanted.name.lower() in seen or (wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})):
            continue
        seen.add(wanted.name.lower())
        try:
            found = distribution(wanted.name)
        except PackageNotFoundError:
            continue  # for another platform, as its own metadata says
        yield found
        left += [Requirement(text) for text in found.requires or ()]


@pytest.fixture(scope="module")
def core(commands: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of an environment that has the wheel, its core dependencies, and nothing else."""
    folder = tmp_path_factory.mktemp("core")
    venv.create(folder, with_pip=False)
    (site,) = (folder / "lib").glob("python*/site-packages")
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for found in closure(wanted):
        base = Path(str(found.locate_file("")))
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(base / top)
    (wheels,) = (commands.parent / "lib").glob("python*/site-packages")
    for top in wheels.glob("nemotron_steps*"):
        (site / top.name).symlink_to(top)
    return folder / "bin"


@pytest.fixture
def run(core: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "STEPS"))}
        environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        command = [str(core / "python"), "-m", "nemotron_steps.cli.main", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("list", "--json"),
        ("plan", "super3_rl", "-c", "tiny", "--json"),
        ("env", "show", "math_with_judge", "--json"),
        ("artifacts", "list", "--json"),
    ],
)
def test_looking_and_planning_work_without_the_engine(run, words):
    done = run(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    json.loads(done.stdout)


@pytest.mark.slow
def test_what_needs_the_engine_says_so_before_anything_runs(run, tmp_path):
    done = run("run", "rl/nemo_rl/rlhf", "-c", "tiny", "--json")
    assert done.returncode == 2, done.stdout + done.stderr
    error = json.loads(done.stdout)["error"]
    problems = error.get("problems") or [error]
    assert {"pip install 'nemotron-steps[engine]'", "steps doctor"} == {
        hint for problem in problems for hint in problem["hints"]
    }
    assert any("rl/nemo_rl/rlhf need" in problem["what"] and "torch" in problem["what"] for problem in problems)
    assert not (tmp_path / ".steps" / "runs").exists()
