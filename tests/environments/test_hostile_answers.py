"""No answer makes a verifier slow, or raise: it is graded or refused at once, or cut off in a helper process.

Time is the CPU time of this process, which other programs on the machine do not change much. A verifier that takes
quadratic time needs several times the bounds at these sizes.
"""

import asyncio
import time
from typing import Any

import pytest

from nemotron_steps.environments.base import VERIFIER_TIMEOUT, CannotJudgeError, Environment, GradeResult, Response
from nemotron_steps.environments.code.math_formal_lean import MathFormalLean
from nemotron_steps.environments.code.swerl_gen import SwerlGen
from nemotron_steps.environments.grading_pool import GradingPool
from nemotron_steps.sandbox import Outcome, SandboxResult
from tests.environments.cases import CASES, Case, build
from tests.environments.hostile import UNITS, hostile

SMALL, LARGE = 64 * 1024, 1024 * 1024
BOUNDS = {SMALL: 0.25, LARGE: 1.0}
"""Seconds of CPU time for an answer of that size; most take a hundredth of it."""


class Nowhere:
    """Stands for a sandbox in which every program ends at once: what an answer's program does is not tested here."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def run(self, *arguments: Any, **options: Any) -> SandboxResult:
        return SandboxResult(Outcome.EXITED, 1, "", "", 0.0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Helper processes are cut off after a second; what is cut off is not tested for how long that takes."""
    start = GradingPool.__init__
    monkeypatch.setattr(GradingPool, "__init__", lambda pool, grade, **_: start(pool, grade, size=1, cpu_s=1.0))


def prepared(case: Case, monkeypatch: pytest.MonkeyPatch) -> Environment:
    environment = build(case)
    environment.check_row(case.row, "f:1")
    if hasattr(environment, "sandbox"):
        environment.sandbox = Nowhere()
    if isinstance(environment, MathFormalLean):
        monkeypatch.setattr(environment, "_found", True)
    if isinstance(environment, SwerlGen):

        class Container:
            def __init__(self, *arguments: Any) -> None: ...

            async def __aenter__(self) -> None:
                raise CannotJudgeError("no_container")

            async def __aexit__(self, *arguments: Any) -> None: ...

        monkeypatch.setattr(environment, "_container", Container)
    return environment


async def grade(environment: Environment, case: Case, response: Response) -> GradeResult:
    responses = [response, Response.from_text("fine")] if environment.judges_groups else [response]
    sessions = [await environment.seed(case.row) for _ in responses]
    return (await environment.judge_group(case.row, responses, sessions))[0]


async def grade_timed(environment: Environment, case: Case, response: Response) -> tuple[GradeResult, float]:
    begin = time.process_time()
    verdict = await grade(environment, case, response)
    return verdict, time.process_time() - begin


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_answer_is_slow_or_raises(case: Case, impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = prepared(case, monkeypatch)
    some = CASES.index(case) % len(UNITS)
    answers = [(SMALL, name, text) for name, text in hostile(SMALL).items()]
    answers += [(LARGE, name, text) for name, text in hostile(LARGE, slice(some, None, len(UNITS) // 3)).items()]

    async def run() -> None:
        for size, name, text in answers:
            for response in case.answers(text):
                verdict, seconds = await grade_timed(environment, case, response)
                for _ in range(3):  # what else the machine did meanwhile is not the grader's
                    if seconds < BOUNDS[size]:
                        break
                    verdict, seconds = await grade_timed(environment, case, response)
                assert seconds < BOUNDS[size], f"{name}: {seconds:.1f} s for {size} characters"
                assert (verdict.reward is None) == (verdict.failure is not None)
        await environment.close()

    asyncio.run(run())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_answer_is_no_reward(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing, white space, reasoning alone, reasoning that never ends."""
    environment = prepared(case, monkeypatch)
    texts = ["", " \n", "<think>a,n\nx,1</think>", "<think>It is [] and", "</think>", "<think></think> "]

    async def run() -> list[GradeResult]:
        verdicts = [await grade(environment, case, Response.from_text(text)) for text in texts]
        await environment.close()
        return verdicts

    worst = 3.0 if environment.judges_groups else 0.0
    for text, verdict in zip(texts, asyncio.run(run()), strict=True):
        assert verdict.reward is not None and verdict.reward <= worst, repr(text)


def test_a_grader_that_does_not_end_is_cut_off_and_the_next_one_is_served(impatient: None) -> None:
    case = next(case for case in CASES if case.name == "mcqa/regex")
    environment = build(case)

    async def run() -> list[GradeResult]:
        texts = ["Option " * 10_000, "Option: A"]
        verdicts = [await grade(environment, case, Response(text)) for text in texts]
        await environment.close()
        return verdicts

    slow, quick = asyncio.run(run())
    assert (slow.reward, slow.details["failure"]) == (0.0, VERIFIER_TIMEOUT)
    assert quick.reward == 1.0
