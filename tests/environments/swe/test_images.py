"""Rows with a container image: in real containers, and over an `apptainer` that runs commands on this machine."""

import os
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.errors import SandboxError
from tests.containers.engines import Engines
from tests.containers.image import REPOSITORY, commit
from tests.environments.swe.tasks import CALC, FIXED, LIBRARIES, TESTS, Call, bash, rollout, task

APPTAINER = """#!/bin/sh
[ "$1" != version ] || exit 0
rm -rf {root}; cp -a {image} {root}
while [ "$1" != repo.sif ]; do shift; done; shift; exec "$@"
"""
ATTACKS = {
    "own tests": "mkdir -p tests; echo 'def test_add(): pass' > tests/test_calc.py; git add -A; git -c user.name=x "
    "-c user.email=x@y commit -qm x",
    "hooks": "printf '#!/bin/sh\\ntrue\\n' > .git/hooks/pre-commit; echo 'import os; os._exit(0)' > conftest.py",
    "link": "ln -s /etc/passwd pkg/x.py",
    "git's settings": "git config core.fsmonitor 'touch owned'; git config diff.external 'echo nothing'; "
    "echo '*.py diff=x' > .gitattributes; git config diff.x.textconv 'echo nothing'",
    "no git": "rm -rf .git",
}


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository in an `image`, which every new container has as it was."""
    (tmp_path / "image").mkdir()
    folder = commit(tmp_path / "image", {"pkg/__init__.py": "", "pkg/calc.py": CALC})
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "apptainer").write_text(APPTAINER.format(root=tmp_path / "testbed", image=folder))
    (programs / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", LIBRARIES[0])
    return tmp_path


def graded(calls: list[Call], engine: str, image: str, repository: str = REPOSITORY, **changed: Any) -> Any:
    added = "".join(f"+{line}\n" for line in TESTS.splitlines())
    patch = f"--- /dev/null\n+++ b/tests/test_calc.py\n@@ -0,0 +1,{len(TESTS.splitlines())} @@\n{added}"
    row = task("pytest", files=None, test_files=None, test_command=None, image=image, base_commit="HEAD")
    row |= {"test_patch": patch, **changed}
    settings = {"engine": engine, "repository": repository, "tests_timeout_s": 60, "command_timeout_s": 30}
    settings["test_command"] = "python -m pytest -rA -p no:cacheprovider {tests}"
    return rollout(calls, row, **settings)


@pytest.mark.containers
def test_a_fix_in_a_container_earns_1_and_each_starts_from_the_image(
    real_engine: str, container_engines: Engines
) -> None:
    look = ("view", {"path": "pkg/calc.py", "view_range": [1, 2]})
    answers, verdict = graded([look, *FIXED], real_engine, container_engines.image)
    assert answers[0].endswith("return a - b\n") and verdict.reward == 1.0, verdict
    assert graded([bash("true")], real_engine, container_engines.image)[1].reward == 0.0
    assert container_engines.names(real_engine) == []


@pytest.mark.containers
@pytest.mark.parametrize(("calls", "reward"), [(FIXED, 1.0), ([], 0.0)], ids=["with a fix", "alone"])
def test_attacks_in_a_container_earn_nothing_and_spoil_no_fix(
    real_engine: str, container_engines: Engines, calls: list[Call], reward: float
) -> None:
    attacks = [bash(attack) for name, attack in ATTACKS.items() if name != "no git"]
    answers, verdict = graded([*calls, *attacks], real_engine, container_engines.image)
    assert verdict.reward == reward, (answers, verdict)


def test_a_fix_in_an_apptainer_image_earns_1_and_starts_from_the_image_each_time(image: Path) -> None:
    look = ("view", {"path": "pkg/calc.py", "view_range": [1, 2]})
    answers, verdict = graded([look, *FIXED], "apptainer", "repo.sif", str(image / "testbed"))
    assert answers[0].endswith("return a - b\n") and verdict.reward == 1.0, verdict
    assert graded([bash("true")], "apptainer", "repo.sif", str(image / "testbed"))[1].reward == 0.0


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_in_an_apptainer_image_earns_nothing_and_what_does_not_count_spoils_no_fix(
    image: Path, attack: str
) -> None:
    place = ("apptainer", "repo.sif", str(image / "testbed"))
    _, verdict = graded([bash(ATTACKS[attack])], *place)
    assert verdict.reward == 0.0, verdict
    _, fixed = graded([*FIXED, bash(ATTACKS[attack])], *place)
    assert fixed.reward == (0.0 if attack == "no git" else 1.0), fixed


def test_an_image_without_the_repository_says_so(image: Path) -> None:
    with pytest.raises(SandboxError, match="does not have the repository") as refused:
        graded(FIXED, "apptainer", "repo.sif", str(image / "testbed"), base_commit="0123456789abcdef")
    assert "repository=" in refused.value.hints[0]
