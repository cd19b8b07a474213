from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.environments.base import Response, Session, ToolCall
from nemotron_steps.environments.code import math_formal_lean as lean
from nemotron_steps.environments.registry import create
from nemotron_steps.environments.tools.ns_tools import TOOL
from nemotron_steps.errors import DataError, UnsupportedError
from nemotron_steps.sandbox import Outcome, SandboxResult

MATH = {"responses_create_params": {"input": "How many?"}, "question": "How many?", "expected_answer": "70"}


def cells(*codes: Any, **config: Any) -> list[str]:
    environment = create("ns_tools", {"should_use_judge": False, **config})

    async def run() -> list[str]:
        await environment.start()
        session = await environment.seed(MATH)
        outputs = [await environment.call_tool(session, TOOL, {"code": code}) for code in codes]
        await environment.close()
        return outputs

    return asyncio.run(run())


@pytest.mark.sandbox
class TestPythonTool:
    def test_state_lasts_and_the_last_expression_is_shown(self) -> None:
        assert cells("x = 3\nprint('once')", "x += 1\nx", "x * 10", "print(x)") == ["once\n", "4\n", "40\n", "4\n"]

    def test_a_failed_cell_shows_its_error_and_leaves_no_state(self) -> None:
        outputs = cells("x = 1", "x = 2\n1/0", "x", "this is not python!")
        assert "ZeroDivisionError" in outputs[1]
        assert outputs[2] == "1\n"
        assert "SyntaxError" in outputs[3]

    def test_loops_output_and_calls_are_bounded(self) -> None:
        outputs = cells("while True: pass", "print('x' * 50_000)", "1", tool_timeout_s=2.0, max_tool_calls=2)
        assert "stopped by timeout" in outputs[0]
        assert outputs[1].endswith("[output cut]") and len(outputs[1]) < 11_000
        assert "limit of 2" in outputs[2]

    def test_bad_calls_are_answered_not_raised(self) -> None:
        environment = create("ns_tools", {"should_use_judge": False})

        async def run() -> list[str]:
            session = await environment.seed(MATH)
            return [
                await environment.call_tool(session, "shell", {}),
                await environment.call_tool(session, TOOL, {"code": 3}),
            ]

        assert all(output.startswith("error:") for output in asyncio.run(run()))

    def test_the_final_box_is_the_grade(self) -> None:
        environment = create("ns_tools", {"should_use_judge": False})

        async def run() -> list[float | None]:
            session = await environment.seed(MATH)
            assert session.tools[0]["name"] == TOOL
            await environment.call_tool(session, TOOL, {"code": "21 + 49"})
            right = await environment.verify(MATH, Response(r"\boxed{70}"), session)
            wrong = await environment.verify(MATH, Response("70"), session)
            await environment.close()
            assert right.components["tool_calls"] == 1.0
            return [right.reward, wrong.reward]

        assert asyncio.run(run()) == [1.0, 0.0]


ROW: dict[str, Any] = {
    "responses_create_params": {"input": "Prove."},
    "header": "import Mathlib\n\n",
    "formal_statement": "theorem t (a : ℕ) : a = a := by\n",
}


def test_only_the_proof_is_taken_from_the_answer() -> None:
    answer = (
        "Plan := by hand\n```lean4\ntheorem easier : 1 = 1 := by\n  rfl\n```\n"
        "then\n```lean\nlemma t : True := by\n  trivial\n```"
    )
    proof = lean.extract_proof(answer)
    assert proof == "by\n  trivial"
    assert lean.assemble(ROW, proof) == "import Mathlib\n\ntheorem t (a : ℕ) : a = a := by\n  trivial\n"


@pytest.mark.parametrize(
    ("text", "proof"),
    [
        # the statement's own `:=` is the proof's, whatever comes inside of the proof
        (
            "```lean4\ntheorem t : P := by\n  have h : Q := by simp\n  exact h\n```",
            "by\n  have h : Q := by simp\n  exact h",
        ),
        ("```lean\ntheorem t (n : ℕ := 3) : P n :=\n  by simp\n```", "by simp"),
        ("```lean\ntheorem t : P := foo.bar\n```", "foo.bar"),
        (
            "```lean\n-- theorem old : P := by skip\n/- := -/\nexample : P := by\n  -- go\n  rfl\n```",
            "by\n  -- go\n  rfl",
        ),
        # tactics alone, cut nowhere
        ("```lean4\nhave h : Q := by\n  simp\nexact h\n```", "by\n  have h : Q := by\n    simp\n  exact h"),
        ("```tactics\n    simp\n    ring\n```", "by\n  simp\n  ring"),
        ("```lean\nby\n  simp\n```", "by\n  simp"),
        ("```lean\n:= by simp\n```", "by simp"),
        # a block of another kind after it
        ("```lean\ntheorem t : P := by\n  simp\n```\nIt prints\n```\nGoals accomplished\n```", "by\n  simp"),
        # no fence
        ("theorem t : P := by\n  have h := by simp\n  exact h\n", "by\n  have h := by simp\n  exact h"),
        ("Here it is.\n\ntheorem t : P := by\n  rfl", "by\n  rfl"),
        ("simp [h]\nring", "by\n  simp [h]\n  ring"),
    ],
)
def test_proofs_in_every_form_are_found_whole(text: str, proof: str) -> None:
    assert lean.extract_proof(text) == proof


@pytest.mark.parametrize(
    "text",
    [
        "",
        "```python\nx := by y\n```",
        "```lean\ntheorem t : True\n```",
        "```lean\ntheorem t : P := by\n  -- nothing\n```",
    ],
)
def test_an_answer_without_a_proof(text: str) -> None:
    assert lean.extract_proof(text) is None


def test_comments_are_blanked_where_they_stand() -> None:
    code = "a /- b /- c -/ d\n-/ e -- f\ng"
    assert lean.without_comments(code) == "a               \n   e     \ng"
    assert lean.without_comments("a /- b") == "a     "


FAKE_LAKE = """#!/bin/sh
for last; do :; done
if grep -q 'loop' "$last"; then sleep 60; fi
if grep -q -e 'rfl' -e 'omega' "$last"; then exit 0; fi
echo 'Proof.lean:3:2: error: unsolved goals'
exit 1
"""


@pytest.fixture
def fake_lean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in compiler that accepts proofs by rfl or omega: the real one is gigabytes."""
    program = tmp_path / "toolchain" / "bin" / "lake"
    program.parent.mkdir(parents=True)
    program.write_text(FAKE_LAKE)
    for path in (program, program.parent, program.parent.parent):
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/local/bin:/usr/bin:/bin")


def block(proof: str) -> str:
    return f"```lean4\ntheorem t (a : ℕ) : a = a := by\n{proof}\n```"


@pytest.mark.sandbox
class TestWithACompiler:
    def run(self, *turns: str, **config: Any) -> tuple[list[str | None], Any]:
        environment = create("math_formal_lean", config)
        environment.check_row(ROW, "f:1")

        async def rollout() -> tuple[list[str | None], Any]:
            await environment.start()
            session = await environment.seed(ROW)
            messages = [await environment.follow_up(ROW, Response(turn), session) for turn in turns]
            (verdict,) = await environment.verify_group(ROW, [Response(turns[-1])], [session])
            return messages, verdict

        return asyncio.run(rollout())

    def test_accepted_and_refused_proofs(self, fake_lean: None) -> None:
        assert self.run(block("  rfl"))[1].reward == 1.0
        refused = self.run(block("  ring"))[1]
        assert refused.reward == 0.0 and "unsolved goals" in refused.details["compiler"]

    @pytest.mark.parametrize(
        "trick",
        [
            "sorry",
            "exact foo\naxiom foo : False -- rfl",
            "native_decide -- rfl",
            "admit",
            'have s := "/-"\n  native_decide\n  have t := "-/"',
            "have «/-» := 1\n  native_decide\n  have «-/» := 1",
            "/- /- -/ rfl -/ native_decide",
        ],
    )
    def test_ways_around_a_proof_are_refused(self, fake_lean: None, trick: str) -> None:
        assert self.run(block(f"  rfl\n  {trick}"))[1].reward == 0.0

    def test_a_comment_may_say_sorry(self, fake_lean: None) -> None:
        assert self.run(block("  -- no sorry here\n  rfl"))[1].reward == 1.0

    def test_corrections_show_the_message_and_are_counted(self, fake_lean: None) -> None:
        messages, verdict = self.run(block("  ring"), block("  omega"), max_corrections=2)
        assert messages[0] is not None and "unsolved goals" in messages[0]
        assert messages[1] is None
        assert (verdict.reward, verdict.components["corrections"]) == (1.0, 1.0)
        messages, verdict = self.run(*[block("  ring")] * 4, max_corrections=2)
        assert [message is None for message in messages] == [False, False, True, True]

    def test_a_compiler_that_does_not_finish_is_a_failure(self, fake_lean: None) -> None:
        verdict = self.run(block("  loop"), lean_timeout_s=2.0)[1]
        assert (verdict.reward, verdict.failure) == (None, "lean_timeout")


def test_without_lean_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match="Lean 4"):
        asyncio.run(create("math_formal_lean").start())


def test_a_statement_must_end_where_its_proof_begins() -> None:
    with pytest.raises(DataError, match="formal_statement"):
        create("math_formal_lean").check_row({**ROW, "formal_statement": "theorem t : True"}, "f:1")


@pytest.mark.sandbox
def test_sessions_are_optional_for_a_single_proof() -> None:
    environment = create("math_formal_lean")
    verdict = asyncio.run(environment.verify(ROW, Response("nothing"), Session()))
    assert verdict.reward == 0.0


class Compiler:
    """Accepts proofs with `rfl`; notes what it is given."""

    def __init__(self) -> None:
        self.given: list[str] = []

    async def __call__(self, source: str) -> tuple[bool, str]:
        self.given.append(source)
        return "rfl" in source, "unsolved goals"


def compiled(monkeypatch: pytest.MonkeyPatch, **config: Any) -> tuple[Any, Compiler]:
    environment, compiler = create("math_formal_lean", config), Compiler()
    monkeypatch.setattr(environment, "_compile", compiler)
    return environment, compiler


@pytest.mark.parametrize(("last", "reward", "times"), [("rfl", 1.0, 3), ("ring", 0.0, 2), ("simp", 0.0, 3)])
def test_the_last_proof_is_judged_and_none_is_compiled_twice(
    last: str, reward: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, compiler = compiled(monkeypatch, max_corrections=2)

    async def rollout() -> Any:
        session = await environment.seed(ROW)
        for turn in ("simp [x]", "ring", last):
            await environment.follow_up(ROW, Response(block(f"  {turn}")), session)
        return await environment.verify(ROW, Response(block(f"  {last}")), session)

    verdict = asyncio.run(rollout())
    assert (verdict.reward, verdict.components) == (reward, {"corrections": 2.0})
    assert len(compiler.given) == times


@pytest.mark.parametrize(
    "word",
    ["sorry", "admit", "axiom", "constant", "native_decide", "unsafe", "implemented_by", "extern", "#eval", "run_cmd"],
)
def test_what_proves_nothing_is_refused_uncompiled(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment, compiler = compiled(monkeypatch)
    refused = asyncio.run(environment.verify(ROW, Response(block(f"  {word} rfl")), Session()))
    assert refused.reward == 0.0 and word in refused.details["compiler"] and compiler.given == []
    for harmless in (f"  rfl -- {word}", f"  rfl {word}s"):
        whole = word == "#eval" and not harmless.endswith(word)
        assert asyncio.run(environment.verify(ROW, Response(block(harmless)), Session())).reward == float(not whole)


@pytest.mark.parametrize(
    ("exit_code", "output", "accepted"),
    [(0, "", True), (1, "", False), (0, "warning: declaration uses 'sorry'", False)],
)
def test_lean_accepts_a_proof_without_holes_in_the_project(
    exit_code: int, output: str, accepted: bool, tmp_path: Path
) -> None:
    environment: Any = create("math_formal_lean", {"lean_project": str(tmp_path), "lean_timeout_s": 3.0})
    asked: list[Any] = []

    class Sandbox:
        async def run(self, command: list[str], **given: Any) -> SandboxResult:
            asked.append((command[1:], given))
            return SandboxResult(Outcome.EXITED, exit_code, "", output, 0.0)

    environment.sandbox = Sandbox()
    assert asyncio.run(environment._compile("theorem")) == (accepted, output)
    ((command, given),) = asked
    assert command == ["--dir", str(tmp_path), "env", "lean", "/scratch/Proof.lean"]
    assert given["files"] == {"Proof.lean": "theorem"} and given["limits"].wall_s == 3.0


def test_the_last_block_and_the_last_by_of_a_statement_count() -> None:
    assert lean.extract_proof(f"{block('  simp')}\nor\n{block('  rfl')}") == "by\n  rfl"
    row = {**ROW, "formal_statement": "theorem t (h : P := by simp) : Q := by\n"}
    assert lean.assemble(row, "by rfl").endswith("theorem t (h : P := by simp) : Q := by rfl\n")


class Notebook:
    """A sandbox that notes the cells and ends as told."""

    def __init__(self, *ends: SandboxResult) -> None:
        self.ends, self.cells = list(ends), []
        self.closed = False

    async def run(self, *, files: dict[str, str], **_: Any) -> SandboxResult:
        self.cells.append(json.loads(files["cells.json"]))
        return self.ends.pop(0)

    async def close(self) -> None:
        self.closed = True


def test_cells_that_failed_are_not_replayed_and_what_they_print_to_stderr_is_shown() -> None:
    environment: Any = create("ns_tools", {"should_use_judge": False})
    ends = [("1", "", 0), ("", "boom", 1), ("", "killed", 137), ("x" * 10_001, "", 0)]
    told = [SandboxResult(Outcome.EXITED, code, out, err, 0.0) for out, err, code in ends]
    told.insert(3, SandboxResult(Outcome.MEMORY_LIMIT, None, "some", "", 0.0))
    environment.sandbox = Notebook(*told)

    async def run() -> list[str]:
        session = await environment.seed(MATH)
        return [await environment.call_tool(session, TOOL, {"code": each}) for each in "abcde"]

    outputs = asyncio.run(run())
    assert outputs[:4] == ["1", "boom", "killed", "some\nerror: stopped by memory limit"]
    assert outputs[4] == "x" * 10_000 + "\n[output cut]"
    assert [cell["before"] for cell in environment.sandbox.cells] == [[], *[["a"]] * 4]


def test_a_rows_own_tools_are_offered_and_a_recording_is_counted_by_its_calls() -> None:
    environment: Any = create("ns_tools", {"should_use_judge": False})
    environment.sandbox = Notebook()
    tools = [{"type": "function", "name": TOOL, "description": "mine"}]
    own = {**MATH, "responses_create_params": {"input": "How many?", "tools": tools}}

    async def run() -> Any:
        assert (await environment.seed(own)).tools == tools
        response = Response("no box", tool_calls=[ToolCall(TOOL, "{}"), ToolCall(TOOL, "{}")])
        verdict = await environment.verify(MATH, response, await environment.seed_recorded(MATH))
        closed: list[str] = []

        class Algebra:
            async def close(self) -> None:
                closed.append("helpers")

        environment._algebra = Algebra()
        await environment.close()
        assert environment.sandbox.closed and closed == ["helpers"]
        return verdict

    assert asyncio.run(run()).components["tool_calls"] == 2.0
