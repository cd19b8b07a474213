"""When groups without verdicts are tried again, and when a run gives up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemotron_steps.engine.grpo.buffer import MAX_FAILURES
from nemotron_steps.engine.grpo.filters import (
    FailureWatch,
    has_no_verdict,
    is_ungraded,
    refuse_failures,
    refuse_ungraded,
)
from nemotron_steps.engine.rollouts.data import PromptRow
from nemotron_steps.engine.rollouts.failures import Failure
from nemotron_steps.engine.types import RolloutGroup
from nemotron_steps.environments.base import GradeResult
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


def test_a_judge_that_cannot_answer_is_told_with_what_mends_it() -> None:
    hint = "env.nemo_gym.genrm_model.responses_api_models.vllm_model.max_total_sequence_length=65536"
    verdict = GradeResult.of_error(
        JudgeUnavailableError("a question of 327 tokens does not fit the judge", hints=[hint])
    )
    silent = judged("judge_unavailable", "judge_unavailable")
    for rollout in silent.rollouts:
        rollout.metadata = Failure.of(verdict).metadata
    with pytest.raises(JudgeUnavailableError) as caught:
        refuse_ungraded([silent])
    assert caught.value.found == "a question of 327 tokens does not fit the judge"
    assert list(caught.value.hints) == [hint, "steps doctor"]


def test_the_hint_is_the_environments_own_or_shows_what_it_needs() -> None:
    crashed = judged("verifier_crashed", "verifier_crashed", environment="mine")
    for hint, told in (("python -c ...", "python -c ..."), ("", "steps env show mine   # its settings")):
        said = {"message": "division by zero", "hint": hint}
        crashed.rollouts = [replace(rollout, metadata=said) for rollout in crashed.rollouts]
        with pytest.raises(EngineError, match="no rollout of this step") as caught:
            refuse_ungraded([crashed])
        assert any(each.startswith(told) for each in caught.value.hints)


@pytest.mark.parametrize("steps_of", [1, 2, 8])
def test_one_bad_row_never_ends_a_run(steps_of: int) -> None:
    watch = FailureWatch(steps_of, 2, 16)
    for index in range(16):
        for _ in range(MAX_FAILURES if index == 5 else 1):
            watch.saw(watch.began(row(index)), row(index), BROKEN if index == 5 else FINE)


def test_a_dead_environment_among_others_never_ends_a_run_however_soon_it_fails() -> None:
    """What fails at once comes back before what is sampled for minutes."""
    watch = FailureWatch(8, 2, 800)
    begun = [(watch.began(row(index)), row(index)) for index in range(800)]
    for number, prompt in [b for b in begun if b[1].index % 5 < 2]:
        watch.saw(number, prompt, judged("environment_lost", "environment_lost", environment="dead"))
    for number, prompt in [b for b in begun if b[1].index % 5 >= 2]:
        watch.saw(number, prompt, FINE)
    assert watch.metrics() == {"failures/dead/environment_lost": 1.0}


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


def test_the_shares_of_failures_are_of_the_rollouts_since_they_were_last_told() -> None:
    watch = FailureWatch(4, 2, 100)
    half = judged("verify_failed", None)
    for index, (came, shares) in enumerate([(FINE, {}), (half, {"failures/math/verify_failed": 0.5}), (FINE, {})]):
        watch.saw(watch.began(row(index)), row(index), came)
        assert watch.metrics() == shares


def test_a_judge_that_answers_none_of_the_prompts_begun_together_ends_a_run() -> None:
    watch = FailureWatch(4, 2, 100)
    for index in range(3):
        watch.saw(watch.began(row(index)), row(index), SILENT)
    watch.saw(watch.began(row(3)), row(3), judged("judge_unavailable", None))  # it does answer
    for index in range(4, 7):
        watch.saw(watch.began(row(index)), row(index), SILENT)
    with pytest.raises(JudgeUnavailableError, match="does not answer: no rollout of 4 prompts in a row"):
        watch.saw(watch.began(row(7)), row(7), SILENT)


def test_fewer_rows_than_are_judged_together_are_judged_all() -> None:
    with pytest.raises(EngineError, match="2 of 2 rollouts"):
        FailureWatch(8, 2, 1).saw(0, row(0), BROKEN)
    refuse_failures([row(0), row(1)], [BROKEN, FINE], 2)
    with pytest.raises(EngineError, match="3 of 4 rollouts"):
        refuse_failures([row(0), row(1)], [BROKEN, judged("verify_failed", None)], 2)


def test_a_long_run_remembers_nothing_of_what_is_over() -> None:
    watch = FailureWatch(8, 2, 10_000)
    for index in range(4000):
        watch.saw(watch.began(row(index)), row(index), judged("verify_failed", None, None) if index % 9 else FINE)
    assert not watch._together and not watch._retried
