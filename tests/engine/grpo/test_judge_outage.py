"""When groups without verdicts are tried again, and when a run gives up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemotron_steps.engine.grpo.buffer import MAX_FAILURES
from nemotron_steps.engine.grpo.judge_outage import AnswerWatch, is_ungraded, refuse_ungraded
from nemotron_steps.engine.types import RolloutGroup
from nemotron_steps.errors import EngineError, JudgeUnavailableError
from tests.engine.engine_samples import group


def judged(*failures: str | None) -> RolloutGroup:
    made = group("g", [float(i) for i in range(len(failures))])
    made.rollouts = [replace(r, failure=failure) for r, failure in zip(made.rollouts, failures, strict=True)]
    return made


SILENT = judged("judge_unavailable", "judge_unavailable")


@pytest.mark.parametrize(
    ("failures", "ungraded"),
    [
        (["judge_unavailable"] * 3, True),
        ([None, "judge_unavailable", "environment_unavailable"], True),
        ([None, None, "judge_unavailable"], False),  # two can be compared
        (["prompt_too_long"] * 3, False),  # asking again would change nothing
        ([None, "scorer_failed", "scorer_failed"], False),
        ([None, None, None], False),
    ],
)
def test_a_group_is_ungraded_when_nobody_answered_and_fewer_than_two_members_have_a_verdict(
    failures: list[str | None], ungraded: bool
) -> None:
    assert is_ungraded(judged(*failures)) is ungraded


def test_a_step_without_any_verdict_names_the_judge_only_if_the_judge_is_the_reason() -> None:
    with pytest.raises(JudgeUnavailableError, match="none of this step's questions"):
        refuse_ungraded([SILENT, judged("scorer_failed")])
    with pytest.raises(EngineError, match="no rollout of this step") as caught:
        refuse_ungraded([judged("environment_unavailable")])
    assert caught.value.found == "environment_unavailable" and caught.value.hints
    refuse_ungraded([SILENT, judged("judge_unavailable", None)])


def test_a_step_in_which_nothing_is_answered_ends_after_as_many_groups_as_it_trains_on() -> None:
    watch = AnswerWatch(3)
    watch.saw([SILENT, SILENT, judged("prompt_too_long")])
    with pytest.raises(JudgeUnavailableError, match="none of this step's questions"):
        watch.saw([SILENT])


def test_after_an_answer_it_takes_longer_and_is_not_said_to_be_none() -> None:
    watch = AnswerWatch(3)
    watch.saw([judged("judge_unavailable", None), *[SILENT] * (3 * MAX_FAILURES - 1)])
    watch.saw([judged(None, None), *[SILENT] * (3 * MAX_FAILURES - 1)])  # in a row: an answer begins anew
    with pytest.raises(JudgeUnavailableError, match="stopped answering: no verdict on any of the last 9 groups"):
        watch.saw([SILENT])
