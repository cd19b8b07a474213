"""When groups without verdicts are tried again, and when a run gives up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemotron_steps.engine.grpo.buffer import MAX_FAILURES
from nemotron_steps.engine.grpo.filters import (
    FailureWatch,
    has_no_verdict,
    is_ungraded,
    refuse_ungraded,
)
from nemotron_steps.engine.rollouts.data import PromptRow
from nemotron_steps.engine.types import RolloutGroup
from nemotron_steps.errors import EngineError, JudgeUnavailableError, WorkerLostError
from tests.engine.engine_samples import group


def judged(*failures: str | None, environment: str = "math") -> RolloutGroup:
    made = group("g", [float(i) for i in range(len(failures))])
    said = {"message": "bad row", "traceback": "Traceback: bad row"}
    made.rollouts = [
        replace(r, failure=failure, environment=environment, metadata=said if failure else {})
        for r, failure in zip(made.rollouts, failures, strict=True)
    ]
    return made


def row(index: int) -> PromptRow:
    return PromptRow(index, {}, f"rows.jsonl:{index + 1}")


FINE = judged(None, None)
BROKEN = judged("verify_failed", "verify_failed")
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
        ([None, "verify_failed", "environment_lost"], True),
        ([None, None, "seed_failed"], False),
    ],
)
def test_a_group_is_ungraded_when_fewer_than_two_members_have_a_verdict_and_another_attempt_may_have_more(
    failures: list[str | None], ungraded: bool
) -> None:
    assert is_ungraded(judged(*failures)) is ungraded
    assert has_no_verdict(judged(*failures)) is (None not in failures)


def test_a_step_without_any_verdict_names_the_reason() -> None:
    with pytest.raises(JudgeUnavailableError, match="no rollout of this step") as judge:
        refuse_ungraded([judged("scorer_failed"), SILENT])
    assert judge.value.found == "Traceback: bad row"
    with pytest.raises(EngineError, match="no rollout of this step") as caught:
        refuse_ungraded([judged("prompt_too_long", "environment_unavailable")])
    assert "1 x math: prompt_too_long, 1 x math: environment_unavailable" in str(caught.value.found)
    refuse_ungraded([SILENT, judged("judge_unavailable", None)])


@pytest.mark.parametrize("steps_of", [1, 2, 8])
def test_one_bad_row_never_ends_a_run(steps_of: int) -> None:
    watch = FailureWatch(steps_of, 2, 16)
    for index in range(16):
        for _ in range(MAX_FAILURES if index == 5 else 1):
            watch.saw(watch.began(row(index)), row(index), BROKEN if index == 5 else FINE)


def test_more_than_half_broken_ends_a_run_with_the_environment_its_row_and_the_first_traceback() -> None:
    watch = FailureWatch(4, 2, 100)
    numbers = [watch.began(row(index)) for index in range(8)]
    watch.saw(numbers[0], row(0), judged("seed_failed", "seed_failed", environment="other"))
    watch.saw(numbers[1], row(1), judged("verify_failed", None))
    watch.saw(numbers[2], row(2), judged("verify_failed", None))  # half
    watch.saw(numbers[4], row(4), BROKEN)  # begun with others
    with pytest.raises(EngineError, match="6 of 8 rollouts failed in their environments") as caught:
        watch.saw(numbers[3], row(3), BROKEN)
    error = caught.value
    assert error.where == "environment `math`, row rows.jsonl:2"  # which broke most
    assert "2 x math: verify_failed" not in str(error.found) and "4 x math: verify_failed" in str(error.found)
    assert "Traceback: bad row" in str(error.found) and error.hints[0].startswith("sed -n 2p rows.jsonl")
    assert (
        error.hints[1].partition("   #")[0] == "steps run --resume latest"
    )  # as pasted, where no runner names the run


def test_what_succeeds_at_another_attempt_is_no_longer_counted() -> None:
    watch = FailureWatch(4, 2, 100)
    for index in range(2):
        watch.saw(watch.began(row(index)), row(index), BROKEN)
    for index in range(2):
        watch.saw(watch.began(row(index)), row(index), FINE)
    for index in range(2, 4):
        watch.saw(watch.began(row(index)), row(index), BROKEN)
    assert watch.metrics() == {"failures/math/verify_failed": 8 / 12} and watch.metrics() == {}


def test_dead_workers_alone_are_a_lost_worker_and_a_run_may_be_resumed() -> None:
    watch = FailureWatch(4, 2, 100)
    lost = judged("environment_lost", "environment_lost")
    with pytest.raises(WorkerLostError) as caught:
        for index in range(4):
            watch.saw(watch.began(row(index)), row(index), lost)
    assert caught.value.exit_code == 3
    mixed = judged("environment_lost", "verify_failed")
    watch = FailureWatch(4, 2, 100)
    with pytest.raises(EngineError) as another:
        for index in range(4):
            watch.saw(watch.began(row(index)), row(index), mixed)
    assert not isinstance(another.value, WorkerLostError)  # starting it again would not mend it


def test_a_judge_that_answers_none_of_the_prompts_begun_together_ends_a_run() -> None:
    watch = FailureWatch(4, 2, 100)
    for index in range(3):
        watch.saw(watch.began(row(index)), row(index), SILENT)
    watch.saw(watch.began(row(3)), row(3), judged("judge_unavailable", None))  # it does answer
    for index in range(4, 7):
        watch.saw(watch.began(row(index)), row(index), SILENT)
    with pytest.raises(JudgeUnavailableError, match="does not answer: no rollout of 4 prompts in a row"):
        watch.saw(watch.began(row(7)), row(7), SILENT)
