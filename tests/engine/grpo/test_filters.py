"""When groups without verdicts are tried again, and when a run gives up."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemotron_steps.config.schema.grpo import GrpoConfig
from nemotron_steps.engine.grpo.filters import (
    DynamicSampler,
    FailureWatch,
    epsilon_filter,
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
LATE = judged("straggler", "straggler")
SILENT = judged("judge_unavailable", "judge_unavailable")


@pytest.mark.parametrize(
    ("failures", "ungraded"),
    [
        ([None, "judge_unavailable", "environment_unavailable"], True),
        ([None, None, "judge_unavailable"], False),  # two can be compared
        ([None, "scorer_failed", "scorer_failed"], False),
        ([None, "verify_failed", "environment_lost"], True),
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
    with pytest.raises(EngineError, match="no rollout of this step") as late:
        refuse_ungraded([LATE])
    assert late.value.hints[-1] == "grpo.async_grpo.straggler_deadline_s=null"


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
    shares = {"failure_rate": 8 / 12, "failures/verify_failed": 8 / 12, "failures/math/verify_failed": 8 / 12}
    assert watch.metrics() == shares and watch.metrics() == {}


def test_of_what_failed_no_tokens_are_kept() -> None:
    watch = FailureWatch(4, 2, 100)
    watch.saw(watch.began(row(0)), row(0), BROKEN)
    assert "bad row" in repr(vars(watch)) and "token_ids=[1" not in repr(vars(watch))


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


def test_groups_that_were_late_as_a_whole_are_tried_again_and_do_not_end_a_run() -> None:
    watch = FailureWatch(4, 2, 100)
    for index in range(8):
        watch.saw(watch.began(row(index)), row(index), LATE)
    assert is_ungraded(LATE)


def sampler_of(num_prompts: int, max_batches: int, batch_size: int | None = None, **grpo: object) -> DynamicSampler:
    sizes = {"num_prompts_per_step": num_prompts, "num_generations_per_prompt": 2}
    config = {**sizes, "dynamic_sampling_max_gen_batches": max_batches, "use_dynamic_sampling": True, **grpo}
    return DynamicSampler(GrpoConfig.model_validate(config), batch_size or num_prompts)


def test_only_groups_whose_rewards_differ_are_kept_in_order() -> None:
    sampler = sampler_of(2, 10)
    sampler.offer([group("a", [1, 1]), group("b", [0, 1]), group("c", [0, 0])])
    assert not sampler.complete
    sampler.offer([group("d", [1, 0]), group("e", [0.5, 0])])
    assert sampler.complete
    assert [g.group_id for g in sampler.take()] == ["b", "d"]
    assert [g.group_id for g in sampler.kept] == ["e"]
    assert sampler.metrics(sampler.batches, len(sampler.kept)) == {
        "dynamic_sampling/batches": 2.0,
        "dynamic_sampling/discarded_share": 0.4,
        "dynamic_sampling/surplus_groups": 1.0,
        "dynamic_sampling/ungraded_groups": 0.0,
    }


def test_the_signal_is_looked_for_after_scaling() -> None:
    sampler = sampler_of(1, 10, reward_scaling={"enabled": True, "source_min": 0.0, "source_max": 1.0})
    sampler.offer([group("a", [2.0, 7.0])])  # both clamp to 1
    assert not sampler.complete


def test_groups_that_nobody_graded_are_tried_again_and_are_no_groups_without_a_signal() -> None:
    silent = group("a", [0, 1, 1], failure="judge_unavailable")
    sampler = sampler_of(1, 2)
    assert sampler.offer([group("b", [1, 1, 1]), silent]) == [1]
    assert sampler.offer([silent]) == [0]  # the limit counts what was graded: one group of two so far
    assert sampler.offer([group("c", [0, 1, 1]), group("d", [1, 0, 0])]) == []
    sampler.take()
    metrics = sampler.metrics(sampler.batches, len(sampler.kept))
    assert metrics["dynamic_sampling/ungraded_groups"] == 2.0
    assert metrics["dynamic_sampling/discarded_share"] == pytest.approx(1 / 3)


def test_it_gives_up_with_numbers_and_advice() -> None:
    sampler = sampler_of(1, 3)
    for i in range(2):
        sampler.offer([group(f"g{i}", [1, 1])])
    with pytest.raises(EngineError, match="found 0 groups with differing rewards in 3 batches") as caught:
        sampler.offer([group("last", [0, 0])])
    assert caught.value.hints[0].startswith("grpo.num_generations_per_prompt=4 ")


@given(means=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=40), limit=st.floats(0.01, 1.0))
def test_at_most_the_limit_of_trivial_groups_stays_and_no_other_is_dropped(means: list[float], limit: float) -> None:
    keep = epsilon_filter(torch.tensor(means, dtype=torch.float64), epsilon=0.05, limit=limit).tolist()
    trivial = [m != 0.5 for m in means]
    kept = sum(k and t for k, t in zip(keep, trivial, strict=True))
    assert kept == min(sum(trivial), int(limit * len(means) + 1e-9))
    assert all(k for k, t in zip(keep, trivial, strict=True) if not t)
