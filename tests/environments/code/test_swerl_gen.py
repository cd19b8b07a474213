from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.environments.base import GradeResult, Response, Session
from nemotron_steps.environments.code import swerl_gen as rule
from nemotron_steps.environments.registry import create
from nemotron_steps.sandbox import Outcome, SandboxResult
from nemotron_steps.sandbox.session import SessionOverError

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


def repository(folder: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(exist_ok=True, parents=True)
        (folder / path).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)


def applied(folder: Path, patch: str | None) -> None:
    assert patch is not None
    subprocess.run(["git", "apply", "-"], input=patch.encode(), cwd=folder, check=True)


def test_edits_become_a_patch_that_git_applies(tmp_path: Path) -> None:
    edits = [edit("pkg/a.py", "    return 1", "    return 3"), edit("pkg/b.py", "x = 1", "x = 2")]
    repository(tmp_path, FILES)
    applied(tmp_path, rule.make_patch(FILES, "\n".join(edits)))
    assert (tmp_path / "pkg/a.py").read_text() == FILES["pkg/a.py"].replace("return 1", "return 3")
    assert (tmp_path / "pkg/b.py").read_text() == "x = 2"


@pytest.mark.parametrize(
    ("search", "replacement", "after"),
    [
        ("a", "a\nnew", "a\nnew\nb\nc\nd\ne\nf\ng\nh"),
        ("h", "h\n", "a\nb\nc\nd\ne\nf\ng\nh\n"),
        ("d\ne\n", "", "a\nb\nc\nf\ng\nh"),
    ],
)
def test_insertions_and_deletions_apply_at_every_end_of_a_file(
    tmp_path: Path, search: str, replacement: str, after: str
) -> None:
    files = {"f.txt": "a\nb\nc\nd\ne\nf\ng\nh"}
    repository(tmp_path, files)
    applied(tmp_path, rule.make_patch(files, edit("f.txt", search, replacement)))
    assert (tmp_path / "f.txt").read_text() == after


def test_several_edits_of_a_file_are_looked_for_in_the_file_as_it_was(tmp_path: Path) -> None:
    files = {"f.py": "one\ntwo\nthree\n"}
    edits = [edit("f.py", "three", "one"), edit("f.py", "one", "two\ntwo"), edit("f.py", "one", "two\ntwo")]
    repository(tmp_path, files)
    applied(tmp_path, rule.make_patch(files, "\n".join(edits)))
    assert (tmp_path / "f.py").read_text() == "two\ntwo\ntwo\none\n"


@pytest.mark.parametrize(
    "answer",
    [
        "no edits",
        edit("pkg/a.py", "    return 9", "    return 3"),
        edit("pkg/a.py", "return 1", "return 3"),  # not where a line begins
        edit("pkg/a.py", "", "import os"),
        edit("pkg/b.py", "x = 1", "x = 1"),
        edit("pkg/b.py", "x = 1", "x = 2").replace("=======", ""),
        "\n".join(edit("pkg/b.py", "x = 1", f"x = {n}") for n in range(2, 300)),
    ],
)
def test_what_cannot_be_applied_is_no_patch(answer: str) -> None:
    assert rule.make_patch(FILES, answer) is None
    verdict = asyncio.run(create("swerl_gen").verify(row(), Response(f"<solution>{answer}</solution>"), Session()))
    assert verdict.reward == 0.0


def test_edits_count_only_inside_solution_tags_unless_relaxed() -> None:
    inside = f"plan <solution>{edit('pkg/b.py', 'x = 1', 'x = 2')}</solution>"
    for text in (
        edit("pkg/b.py", "x = 1", "x = 2"),
        inside.removesuffix("</solution>"),
        f"<solution></solution>{inside}",
    ):
        body = rule.solution_of(text, relaxed=False)
        assert body is None or rule.make_patch(FILES, body) is None
    body = rule.solution_of(inside, relaxed=False)
    assert body is not None and rule.make_patch(FILES, body) is not None
    assert rule.solution_of("no tags", relaxed=True) == "no tags"


class Container:
    """A container whose programs end as told: outcome, exit code and output, by a word of the command.

    The code -1 ends the session."""

    def __init__(self, ends: dict[str, tuple[Outcome, int, str]], *, on_stderr: bool = False) -> None:
        self.ends, self.on_stderr = ends, on_stderr

    async def __aenter__(self) -> Container:
        return self

    async def __aexit__(self, *arguments: Any) -> None: ...

    async def write(self, files: dict[str, str]) -> None: ...

    async def run(self, argv: list[str], *, cwd: str, wall_s: float | None = None) -> SandboxResult:
        for word, (outcome, code, output) in self.ends.items():
            if word in " ".join(argv):
                if code == -1:
                    raise SessionOverError(outcome)
                out, err = ("", output) if self.on_stderr else (output, "")
                return SandboxResult(outcome, code if outcome is Outcome.EXITED else None, out, err, 0.0)
        return SandboxResult(Outcome.EXITED, 0, "", "", 0.0)


def judged(mode: str, ends: dict[str, tuple[Outcome, int, str]], monkeypatch: pytest.MonkeyPatch) -> GradeResult:
    environment = create("swerl_gen")
    monkeypatch.setattr(environment, "_container", lambda row: Container(ends))
    answer = f"<solution>{edit('pkg/b.py', 'x = 1', 'x = 2')}</solution>" if mode == "eval" else "```python\n1\n```"
    asked = row(mode, setup_script="make ready")
    return asyncio.run(environment.judge_group(asked, [Response(answer)], [Session()]))[0]


class TestTimeouts:
    def test_tests_that_do_not_end_score_zero(self, monkeypatch: pytest.MonkeyPatch) -> None:
        verdict = judged("eval", {"pytest": (Outcome.TIMEOUT, 0, "PASSED t::new\nPASSED t::old\n")}, monkeypatch)
        assert (verdict.reward, verdict.components["finished"]) == (0.0, 0.0)
        assert judged("repro-gen", {"reproduce": (Outcome.TIMEOUT, 0, "")}, monkeypatch).reward == 0.0

    def test_tests_that_end_the_session_score_zero(self, monkeypatch: pytest.MonkeyPatch) -> None:
        verdict = judged("eval", {"pytest": (Outcome.MEMORY_LIMIT, -1, "")}, monkeypatch)
        assert (verdict.reward, verdict.details["outcome"]) == (0.0, "memory_limit")
        verdict = judged("repro-gen", {"reproduce": (Outcome.EXITED, -1, "")}, monkeypatch)
        assert (verdict.reward, verdict.details["exit_codes"]["mended"]) == (0.0, "session over: exited")

    @pytest.mark.parametrize(
        ("ends", "failure"),
        [
            ({"make ready": (Outcome.TIMEOUT, 0, "")}, "setup_failed"),
            ({"git apply": (Outcome.TIMEOUT, 0, "")}, "setup_failed"),
            ({"make ready": (Outcome.TIMEOUT, -1, "")}, "setup_failed"),
            ({"git apply": (Outcome.EXITED, 1, "")}, "patch_not_applicable"),
        ],
    )
    def test_what_the_answer_did_not_cause_is_a_failure(
        self, monkeypatch: pytest.MonkeyPatch, ends: dict[str, tuple[Outcome, int, str]], failure: str
    ) -> None:
        assert judged("eval", ends, monkeypatch).failure == failure


@pytest.mark.parametrize(
    ("codes", "reward"),
    [((2, 0, 2), 1.0), ((2, 0, 0), 0.0), ((1, 0), 0.0), ((2, 2), 0.0), ((0, 0), 0.0), ((0, 2), 0.0)],
)
def test_a_reproduction_fails_before_the_patch_and_passes_after_it(
    codes: tuple[int, ...], reward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = create("swerl_gen")
    left = list(codes)
    monkeypatch.setattr(
        environment, "_container", lambda row: Container({"reproduce": (Outcome.EXITED, left.pop(0), "")})
    )
    answer = Response("```python\n1\n```")
    verdict = asyncio.run(environment.verify(row("repro-gen"), answer, Session()))
    assert (verdict.reward, [*verdict.details["exit_codes"].values()]) == (reward, [*codes]) and not left


@pytest.mark.parametrize("on_stderr", [False, True])
@pytest.mark.parametrize(
    ("passed", "reward"),
    [("new other old", 1.0), ("new old", 0.2), ("other old", 0.2), ("old", 0.0), ("new other", 0.0)],
)
def test_some_of_the_issues_tests_earn_a_part_where_nothing_else_breaks(
    passed: str, reward: float, on_stderr: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = create("swerl_gen")
    output = "".join(f"PASSED t::{name}\n" for name in passed.split())
    told = Container({"pytest": (Outcome.EXITED, 1, output)}, on_stderr=on_stderr)
    monkeypatch.setattr(environment, "_container", lambda row: told)
    answer = Response(f"<solution>{edit('pkg/b.py', 'x = 1', 'x = 2')}</solution>")
    asked = row(FAIL_TO_PASS=["t::new", "t::other"])
    assert asyncio.run(environment.verify(asked, answer, Session())).reward == reward


@pytest.mark.parametrize("removed", [False, True])
def test_the_repositorys_name_is_left_out_of_a_patch_where_the_row_says_so(
    removed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = create("swerl_gen", {"relaxed_formatting": True})
    monkeypatch.setattr(environment, "_container", lambda row: Container({}))
    asked = row()
    asked["metadata"]["remove_repo_name"] = removed
    bare = Response(edit("pkg/b.py", "x = 1", "x = 2"))  # no tags: it is relaxed
    patch = asyncio.run(environment.verify(asked, bare, Session())).details["patch"]
    assert patch.startswith("--- a/b.py\n+++ b/b.py\n" if removed else "--- a/pkg/b.py\n")
