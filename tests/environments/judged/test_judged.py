"""Environments that ask a judge: equivalence, rubrics, safety, terminal steps; and lc_niah's rule."""

import asyncio
import json
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemotron_steps.environments.base import GradeResult, Response, Session
from nemotron_steps.environments.judged.terminus_judge import matching_ratio
from nemotron_steps.environments.registry import create
from nemotron_steps.environments.text import lc_niah
from nemotron_steps.errors import JudgeUnavailableError

PROMPT = {"responses_create_params": {"input": [{"role": "user", "content": "Who?"}]}}
ROLE = {"jailbreak_detection": "safety_model", "over_refusal_detection": "safety_model"}


def grade(name: str, row: dict[str, Any], text: str, judge: Any, reasoning: str = "", **config: Any) -> GradeResult:
    environment = create(name, config, {ROLE.get(name, "judge_model"): judge} if judge else {})
    full = {**PROMPT, **row}
    environment.check_row(full, "f:1")

    async def run() -> GradeResult:
        (verdict,) = await environment.judge_group(full, [Response(text, reasoning=reasoning)], [Session()])
        await environment.close()
        return verdict

    verdict = asyncio.run(run())
    low, high = environment.reward_range
    assert verdict.reward is None or low <= verdict.reward <= high
    return verdict


def replies(scripted: Any, *texts: str) -> Any:
    left = list(texts)
    return scripted(lambda _: left.pop(0))


EQ, NE = "[[A=B]]", "[[A!=B]]"


class TestEquivalence:
    row: ClassVar[Any] = {"question": "Who?", "expected_answer": "Darwin"}

    @pytest.mark.parametrize(("second", "reward"), [(EQ, 1.0), (NE, -1.0)])
    def test_asked_twice_with_the_order_swapped(self, scripted: Any, second: str, reward: float) -> None:
        judge = replies(scripted, EQ, second)
        verdict = grade(
            "equivalence_llm_judge", self.row, "ls -l", judge, check_twice_swap=True, reward_if_swap_fails=-1
        )
        assert verdict.reward == reward
        first, swapped = (call[1]["content"] for call in judge.calls)
        assert "<reference>\nDarwin\n" in first and "<candidate>\nDarwin\n" in swapped


def test_a_judge_without_a_verdict_is_a_failure_everywhere(scripted: Any) -> None:
    rows: dict[str, dict[str, Any]] = {
        "equivalence_llm_judge": TestEquivalence.row,
        "multichallenge": {"rubric": [{"question": "Ok?", "pass_criteria": "YES"}]},
        "inverse_if": {"rubric": [{"criteria": "Ok?"}]},
        "over_refusal_detection": {},
        "jailbreak_detection": {},
    }
    for name, row in rows.items():
        silent = scripted(lambda _: "I would rather not say.")
        assert grade(name, row, "text", silent).failure == "judge_unparseable"
        assert len(silent.calls) == 3

        class Gone:
            async def complete(self, messages: Sequence[dict[str, str]], **_: Any) -> str:
                raise JudgeUnavailableError("gone")

        assert grade(name, row, "text", Gone()).failure == "judge_unavailable"


class TestRubrics:
    items: ClassVar[Any] = [
        {"question": "one?", "pass_criteria": "YES", "weight": 3},
        {"question": "two?", "pass_criteria": "NO", "weight": 1},
        {"question": "three?", "pass_criteria": "YES", "weight": 0},
    ]

    def test_inverse_if_uses_the_rows_own_prompt(self, scripted: Any) -> None:
        row = {
            "rubric": [{"id": "C1", "criteria": "is it red?"}, {"id": "C2", "criteria": "is it big?"}],
            "reference_response": "red",
            "prompt": "Paint.",
            "judge_prompt_template": "Q {prompt} A {model_response} R {standard_response} C {criteria} {other}",
            "judge_system_prompt": "Be strict.",
        }
        judge = scripted(
            lambda m: 'x ```json\n{"result": "%s"}\n```' % ("PASS" if "red?" in m[1]["content"] else "fail")
        )
        assert grade("inverse_if", row, "see {criteria}", judge).reward == 0.5
        assert judge.calls[0] == [
            {"role": "system", "content": "Be strict."},
            {"role": "user", "content": "Q Paint. A see {criteria} R red C is it red? {other}"},
        ]


def step(keys: str, complete: bool = False, **extra: Any) -> str:
    commands = [{"keystrokes": keys, "is_blocking": True, "timeout_sec": 5}]
    base = {"state_analysis": "a", "explanation": "b", "commands": commands, "is_task_complete": complete}
    return json.dumps({**base, **extra})


class TestTerminus:
    row: ClassVar[Any] = {"expected_answer": step("pip list | grep oauth\n"), "metadata": {"harness": "terminus_1"}}

    @pytest.mark.parametrize(
        ("answer", "labels", "gate"),
        [
            (step("pip list | grep oauth\n"), [], "none"),
            (step("pip list|grep oauth\n"), [], "none"),
            (step("pip freeze\n"), [EQ], "none"),
            (step("rm -rf /\n"), [NE], "judge"),
            (step("pip list | grep oauth\n", complete=True), [], "task_complete"),
            (step("pip list | grep oauth\n", extra=1), [], "schema"),
            ("pip list", [], "not_json"),
        ],
    )
    def test_gates(self, scripted: Any, answer: str, labels: list[str], gate: str) -> None:
        judge = replies(scripted, *labels)
        verdict = grade("terminus_judge", self.row, answer, judge)
        assert verdict.details["gate"] == gate
        assert verdict.reward == float(gate == "none")
        assert len(judge.calls) == len(labels)

    def test_commands_are_compared_with_nothing_between_them(self, scripted: Any) -> None:
        def split(*keys: str) -> str:
            commands = [{"keystrokes": key, "is_blocking": True, "timeout_sec": 5} for key in keys]
            return json.dumps({**json.loads(step("")), "commands": commands})

        row = {**self.row, "expected_answer": split("ls\n", "pwd\n", "id\n", "df\n"), "threshold": 1.0}
        assert grade("terminus_judge", row, split("ls\npwd\n", "id\ndf\n"), replies(scripted)).reward == 1.0

    def test_long_keystrokes_are_compared_as_short_ones(self, scripted: Any) -> None:
        long = "echo " + "abcdefgh" * 400
        row = {**self.row, "expected_answer": step(long), "threshold": 0.9}
        assert grade("terminus_judge", row, step(long + "x"), replies(scripted)).details["gate"] == "none"
        assert grade("terminus_judge", row, step(long[::-1]), replies(scripted, NE)).details["gate"] == "judge"
        assert grade("terminus_judge", row, step("z" * 200_000), replies(scripted)).details["gate"] == "too_long"

    def test_the_rows_threshold_and_the_second_look(self, scripted: Any) -> None:
        for threshold, answer in ((0.1, "pip freeze\n"), (0.0, "ls\n")):
            low = {**self.row, "threshold": threshold}
            assert grade("terminus_judge", low, step(answer), replies(scripted)).reward == 1.0
        twice = replies(scripted, EQ, NE)
        assert grade("terminus_judge", self.row, step("ls\n"), twice, check_twice_swap=True).reward == 0.0


class TestLcNiah:
    row: ClassVar[Any] = {
        "expected_answer": '["a", "b"]',
        "responses_create_params": {"input": " ".join(f"w{n}" for n in range(40))},
    }

    @pytest.mark.parametrize(
        ("answer", "score"),
        [
            ("x\nFinal Answer: [a, b]\n\n", 1.0),
            ('Final Answer: ["b", "a"]', 1.0),
            ("Final Answer: [a]", 2 / 3),
            ("Final Answer: [a, a, b, c]", 0.8),
            ("Final Answer: [a, b]\nDone.", 0.0),
        ],
    )
    def test_f1(self, answer: str, score: float) -> None:
        assert grade("lc_niah", self.row, answer, None).reward == pytest.approx(score)

    def test_copied_reasoning_costs(self) -> None:
        copied = " ".join(f"W{n}" for n in range(20))  # 5 sequences of 16 words, all copied
        mixed = copied + " " + " ".join(f"own{n}" for n in range(5))  # 10 sequences, 5 of them copied
        answer = "Final Answer: [a, b]"
        ngram = {"overlap_metric_rule": "ngram16"}
        assert grade("lc_niah", self.row, answer, None, reasoning=copied, **ngram).reward == 0.0
        half = grade("lc_niah", self.row, answer, None, reasoning=mixed, **ngram)
        assert half.reward == 0.5 and half.components == {"answer_score": 1.0, "reasoning_overlap": 0.5}
        assert lc_niah.overlap("", "prompt", "lcs") == 0.0
        assert lc_niah.overlap("xx abcdef", "abcdef", "lcs") == pytest.approx(6 / 9)

    @pytest.mark.parametrize(("rule", "copied"), [({}, 6 / 9), ({"overlap_metric_rule": "seq_match"}, 12 / 15)])
    def test_the_other_measures_of_copying(self, rule: dict[str, Any], copied: float) -> None:
        row = {**self.row, "responses_create_params": {"input": "abcdef"}}
        verdict = grade("lc_niah", row, "Final Answer: [a, b]", None, reasoning="xx abcdef", **rule)
        assert verdict.reward == pytest.approx(1.0 - copied)

    @pytest.mark.parametrize(
        ("answer", "score"), [("Final Answer: []", 1.0), ("Final Answer: [a]", 0.0), ("none", 0.0)]
    )
    def test_where_there_is_no_node_an_empty_list_is_right(self, answer: str, score: float) -> None:
        assert grade("lc_niah", {**self.row, "expected_answer": "[]"}, answer, None).reward == score


class TestTerminus2:
    row: ClassVar[Any] = {
        "expected_answer": json.dumps({"analysis": "a", "plan": "b", "commands": [{"keystrokes": "ls\n"}]}),
        "metadata": {"harness": "terminus_2"},
    }

    @pytest.mark.parametrize(
        ("change", "gate"),
        [
            ({}, "none"),
            ({"commands": [{"keystrokes": "ls\n", "duration": 0.5}]}, "none"),
            ({"task_complete": True}, "task_complete"),
            ({"is_task_complete": False}, "schema"),
            ({"commands": [{"keystrokes": "ls\n", "is_blocking": True}]}, "schema"),
        ],
    )
    def test_gates(self, scripted: Any, change: dict[str, Any], gate: str) -> None:
        answer = json.dumps({**json.loads(self.row["expected_answer"]), **change})
        assert grade("terminus_judge", self.row, answer, replies(scripted)).details["gate"] == gate


TEXT = st.text(alphabet="abc", max_size=12)


@given(first=TEXT, second=TEXT, floor=st.floats(0.05, 1.0))
def test_the_ratio_is_exact_from_the_floor_on_and_some_bound_below_it(first: str, second: str, floor: float) -> None:
    exact = SequenceMatcher(None, first, second).ratio()
    got = matching_ratio(first, second, floor)
    assert got == pytest.approx(exact) if exact >= floor else exact <= got
    if got < floor:
        assert exact < floor
