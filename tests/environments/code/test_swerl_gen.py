from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.environments.base import Response, Session
from nemotron_steps.environments.code import swerl_gen as rule
from nemotron_steps.environments.registry import create
from nemotron_steps.errors import DataError

FILES = {"pkg/a.py": "def f():\n    return 1\n\n\ndef g():\n    return 2\n", "pkg/b.py": "x = 1"}
INSTANCE = {"FAIL_TO_PASS": '["t::new"]', "PASS_TO_PASS": ["t::old"], "test_script": "pytest -rA", "patch": "p"}


def row(mode: str = "eval", **instance: Any) -> dict[str, Any]:
    return {
        "responses_create_params": {"input": "Fix."},
        "metadata": {"image": "repo:1", "relevant_file_contents": json.dumps(FILES)},
        "instance": {**INSTANCE, **instance},
        "mode": mode,
    }


def edit(path: str, search: str, replace: str) -> str:
    return f"```python\n### {path}\n<<<<<<< SEARCH\n{search}\n=======\n{replace}\n>>>>>>> REPLACE\n```"


def test_edits_become_a_patch_that_git_applies(tmp_path: Path) -> None:
    edits = [edit("pkg/a.py", "    return 1", "    return 3"), edit("pkg/b.py", "x = 1", "x = 2")]
    answer = "\n".join(["<solution>", *edits, "</solution>"])
    patch = rule.make_patch(FILES, answer)
    assert patch is not None
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply", "-"], input=patch.encode(), cwd=tmp_path, check=True)
    assert (tmp_path / "pkg/a.py").read_text() == FILES["pkg/a.py"].replace("return 1", "return 3")
    assert (tmp_path / "pkg/b.py").read_text() == "x = 2"


@pytest.mark.parametrize(
    "answer",
    [
        "no edits",
        edit("pkg/c.py", "x = 1", "x = 2"),
        edit("pkg/a.py", "    return 9", "    return 3"),
        edit("pkg/a.py", "    return", "    yield"),  # there twice
        edit("pkg/b.py", "x = 1", "x = 1"),
        edit("pkg/b.py", "x = 1", "x = 2") + "<solution></solution>",
    ],
)
def test_what_cannot_be_applied_is_no_patch(answer: str) -> None:
    assert rule.make_patch(FILES, answer) is None
    assert asyncio.run(create("swerl_gen").verify(row(), Response(answer), Session())).reward == 0.0


def test_a_pytest_summary_is_read() -> None:
    output = (
        "PASSED t::old\nPASSED t::p[a b]\nFAILED t::new - assert 1 == 2\nXFAIL t::x - why\nPASSED t::new\nERROR t::e\n"
    )
    assert rule.passed_tests(output) == {"t::old", "t::p[a b]", "t::x"}


@pytest.mark.parametrize(
    ("passed", "reward"),
    [({"a", "b", "k"}, 1.0), ({"a", "k"}, 0.2), ({"k"}, 0.0), ({"a", "b"}, 0.0), (set(), 0.0)],
)
def test_full_partial_and_none(passed: set[str], reward: float) -> None:
    assert rule.resolution(passed, {"a", "b"}, {"k"}) == reward


@pytest.mark.parametrize("bad", [row("guess"), row(test_script=""), row("repro-gen", patch=""), row(FAIL_TO_PASS="[")])
def test_unusable_rows_are_refused(bad: dict[str, Any]) -> None:
    environment = create("swerl_gen")
    environment.check_row(row(), "f:1")
    environment.check_row(row("repro-gen"), "f:1")
    with pytest.raises(DataError):
        environment.check_row(bad, "f:1")
