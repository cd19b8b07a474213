import asyncio
import errno
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from nemotron_steps.environments.base import (
    ENVIRONMENT_LOST,
    GRADER_FAILED,
    REWARD_OUT_OF_RANGE,
    VERDICT_INVALID,
    VERIFIER_CRASHED,
    VERIFIER_TIMEOUT,
    VERIFY_FAILED,
    CannotJudgeError,
    Environment,
    EnvironmentConfig,
    GradeResult,
    GraderFailedError,
    InvalidVerdictError,
    Response,
    RowError,
    Session,
)
from nemotron_steps.environments.judged.judges import JudgeLostError
from nemotron_steps.errors import ConfigError, JudgeUnavailableError, WorkerLostError

ROW = {"responses_create_params": {"input": "Say."}}


class Given(Environment):
    """Returns, or raises, what it was told to."""

    name: ClassVar[str] = "given"

    def __init__(self, outcome: Any) -> None:
        super().__init__(EnvironmentConfig(), {})
        self.outcome = outcome

    async def verify(self, row: Any, response: Response, session: Session) -> GradeResult:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class GivenGroup(Given):
    async def verify_group(
        self, row: Any, responses: Sequence[Response], sessions: Sequence[Session]
    ) -> list[GradeResult]:
        return self.outcome


def judge(environment: Environment, n: int = 2) -> list[GradeResult]:
    return asyncio.run(environment.judge_group(ROW, [Response("x")] * n, [Session()] * n))


@pytest.mark.parametrize("wrong", [1.0, True, None, {"reward": 1.0}, (1.0, {})])
def test_a_verify_that_returns_no_verdict_is_told_what_to_return(wrong: Any) -> None:
    for verdict in judge(Given(wrong)):
        assert verdict.reward is None and verdict.failure == VERDICT_INVALID
        said = verdict.details["message"]
        assert "`verify` of environment `given`" in said and repr(wrong) in said and "hint: return GradeResult(" in said


@pytest.mark.parametrize(
    "wrong", [[GradeResult(1.0)], [GradeResult(1.0), 1.0], None, (GradeResult(1.0), GradeResult(1.0))]
)
def test_a_verify_group_must_give_one_verdict_a_response(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="`verify_group` of environment `given`"):
        judge(GivenGroup(wrong))


@pytest.mark.parametrize("kind", [Given, GivenGroup])
@pytest.mark.parametrize("reward", [1.5, -0.1])
def test_a_reward_outside_the_declared_range_is_a_failure(kind: type[Given], reward: float) -> None:
    outcome: Any = GradeResult(reward) if kind is Given else [GradeResult(reward)] * 2
    verdicts = judge(kind(outcome))
    assert [(v.reward, v.failure) for v in verdicts] == [(None, REWARD_OUT_OF_RANGE)] * 2
    assert str(reward) in verdicts[0].details["message"]


CRASHED = GraderFailedError(VERIFIER_CRASHED, "KeyError")
SLOW = GraderFailedError(VERIFIER_TIMEOUT, "too long")
FULL = OSError(errno.ENOSPC, "No space left on device")


class Raises(Given):
    """Raises what its table has for a text."""

    def __init__(self, raised: dict[str, Exception], low: float = 0.0) -> None:
        super().__init__(None)
        self.raised, self.reward_range = raised, (low, 1.0)

    async def verify(self, row: Any, response: Response, session: Session) -> GradeResult:
        if response.text in self.raised:
            raise self.raised[response.text]
        return GradeResult(1.0)


@pytest.mark.parametrize(
    ("texts", "environment", "reward", "failure"),
    [
        # What other answers of the group do not bring about is the answer's.
        ("x bad bad", Raises({"bad": KeyError("answer")}), 0.0, VERIFY_FAILED),
        ("x bad", Raises({"bad": FileNotFoundError(errno.ENOENT, "bad")}), 0.0, VERIFY_FAILED),
        ("x bad", Raises({"bad": CRASHED}), 0.0, VERIFIER_CRASHED),
        ("x bad", Raises({"bad": InvalidVerdictError("reward is nan")}), 0.0, VERDICT_INVALID),
        ("x bad", Raises({"bad": SLOW}, low=-1.0), -1.0, VERIFIER_TIMEOUT),
        ("x bad", Raises({"bad": SLOW}, low=-math.inf), 0.0, VERIFIER_TIMEOUT),
        ("bad", Raises({"bad": SLOW}), 0.0, VERIFIER_TIMEOUT),
        # What they all do is the row's or the environment's.
        ("bad bad", Raises({"bad": KeyError("answer")}), None, VERIFY_FAILED),
        ("bad", Raises({"bad": KeyError("answer")}), None, VERIFY_FAILED),
        ("bad bad", Raises({"bad": SLOW}), None, VERIFIER_TIMEOUT),
        # What no answer can bring about, or verify has said itself.
        ("x bad", Raises({"bad": WorkerLostError("helper died")}), None, ENVIRONMENT_LOST),
        ("x bad", Raises({"bad": JudgeUnavailableError("gone")}), None, "judge_unavailable"),
        ("x bad", Raises({"bad": FULL}), None, VERIFY_FAILED),
        ("x bad", Raises({"bad": TimeoutError()}), None, VERIFY_FAILED),
        ("x bad", Raises({"bad": CannotJudgeError("lean_timeout")}), None, "lean_timeout"),
        ("x bad", Raises({"bad": RowError("answer", "a number", "x")}), None, VERIFY_FAILED),
    ],
)
def test_an_answer_to_blame_for_an_error_earns_the_least_and_any_other_error_is_a_failure(
    texts: str, environment: Raises, reward: float | None, failure: str
) -> None:
    responses = [Response(text) for text in texts.split()]
    verdicts = asyncio.run(environment.judge_group(ROW, responses, [Session() for _ in responses]))
    for response, verdict in zip(responses, verdicts, strict=True):
        if response.text == "x":
            assert verdict == GradeResult(1.0)
            continue
        assert (verdict.reward, verdict.failure) == (reward, failure if reward is None else None)
        said = verdict.details
        blamed = reward is not None
        assert verdict.components == ({GRADER_FAILED: 1.0} if blamed else {})
        assert not blamed or said["failure"] == failure
        assert "message" in said and (failure != VERIFY_FAILED or "in verify" in said["traceback"])


def test_the_loss_of_a_judge_that_runs_beside_the_policy_is_no_failure_of_a_rollout() -> None:
    with pytest.raises(JudgeLostError):
        judge(Given(JudgeLostError("the judge is dead")))


@pytest.mark.parametrize(
    "fields",
    [
        {"reward": None},
        {"reward": 1.0, "failure": "x"},
        {"reward": float("nan")},
        {"reward": 1e39},
        {"reward": 1.0, "components": {"a": float("nan")}},
        {"reward": 1.0, "components": {"a": 10**5000}},
        {"reward": None, "failure": "x", "components": {"a": float("inf")}},
    ],
)
def test_a_verdict_is_a_finite_reward_or_a_failure(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"reward|components"):
        GradeResult(**fields)
