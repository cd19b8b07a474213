"""Rows with a container image, over engines that run commands on this machine instead."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.errors import SandboxError, UnsupportedError
from tests.environments.swe.tasks import CALC, FIXED, LIBRARIES, TESTS, Call, bash, rollout, task

DOCKER = """#!/bin/sh
case $1 in
  info|version) exit 0;;
  image) echo '{{}}';;
  run|--quiet) rm -rf {root}; cp -a {image} {root};;
esac
case $1 in
  run) echo ready; exec cat > /dev/null;;
  exec)
    shift 2
    while [ "$1" = --user ] || [ "$1" = --workdir ]; do [ "$1" = --user ] || cd "$2"; shift 2; done
    shift
    exec "$@";;
  --quiet) while [ "$1" != repo.sif ]; do shift; done; shift; exec "$@";;
esac
"""


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository in an `image`, which every new container has as it was."""
    folder = tmp_path / "image"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg/__init__.py").write_text("")
    (folder / "pkg/calc.py").write_text(CALC)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@y"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "base"]):
        subprocess.run([*git, *command], cwd=folder, check=True)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("docker", "podman", "apptainer"):
        (programs / name).write_text(DOCKER.format(root=tmp_path / "testbed", image=folder))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", LIBRARIES[0])
    return tmp_path


def graded(image: Path, /, calls: list[Call], engine: str = "docker", **changed: Any) -> Any:
    added = "".join(f"+{line}\n" for line in TESTS.splitlines())
    patch = f"--- /dev/null\n+++ b/tests/test_calc.py\n@@ -0,0 +1,{len(TESTS.splitlines())} @@\n{added}"
    row = task("pytest", files=None, test_files=None, test_command=None, image="repo.sif", base_commit="HEAD")
    row |= {"test_patch": patch, **changed}
    settings = {"engine": engine, "repository": str(image / "testbed"), "tests_timeout_s": 60, "command_timeout_s": 30}
    settings["test_command"] = "python -m pytest -rA -p no:cacheprovider {tests}"
    return rollout(calls, row, **settings)


@pytest.mark.parametrize("engine", ["docker", "podman", "apptainer"])
def test_a_fix_in_an_image_earns_1_and_starts_from_the_image_each_time(image: Path, engine: str) -> None:
    answers, verdict = graded(image, [("view", {"path": "pkg/calc.py", "view_range": [1, 2]}), *FIXED], engine)
    assert answers[0].endswith("return a - b\n") and verdict.reward == 1.0, verdict
    assert graded(image, [bash("true")], engine)[1].reward == 0.0


@pytest.mark.parametrize(
    "attack",
    [
        "mkdir -p tests; echo 'def test_add(): pass' > tests/test_calc.py; git add -A; git -c user.name=x "
        "-c user.email=x@y commit -qm x",
        "printf '#!/bin/sh\\ntrue\\n' > .git/hooks/pre-commit; echo 'import os; os._exit(0)' > conftest.py",
        "ln -s /etc/passwd pkg/x.py",
        "rm -rf .git",
        "git config core.fsmonitor 'touch owned'; git config diff.external 'echo nothing'; echo '*.py diff=x' "
        "> .gitattributes; git config diff.x.textconv 'echo nothing'",
    ],
)
def test_an_attack_in_an_image_earns_nothing_and_what_does_not_count_spoils_no_fix(image: Path, attack: str) -> None:
    _, verdict = graded(image, [bash(attack)])
    assert verdict.reward == 0.0, verdict
    _, fixed = graded(image, [*FIXED, bash(attack)])
    assert fixed.reward == (0.0 if attack == "rm -rf .git" else 1.0), fixed


def test_a_row_may_name_its_image_by_its_instance(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="podman"):
        monkeypatch.setenv("PATH", str(image))
        rollout(FIXED, task(files=None, test_files=None, test_patch="x"), image="x/{instance_id}", engine="podman")


def test_an_engine_that_does_not_start_says_why(image: Path) -> None:
    with pytest.raises(SandboxError, match="apptainer could not be started") as refused:
        graded(image, FIXED, "apptainer", image="x" * 200_000)  # longer than an argument may be
    assert "Argument list too long" in str(refused.value.found)


def test_an_image_without_the_repository_says_so(image: Path) -> None:
    with pytest.raises(SandboxError, match="does not have the repository") as refused:
        graded(image, FIXED, base_commit="0123456789abcdef")
    assert "repository=" in refused.value.hints[0]
