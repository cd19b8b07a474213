import math
from dataclasses import replace

import pytest
import torch

from nemotron_steps.config.schema.grpo import GrpoConfig, LossFnConfig
from nemotron_steps.config.schema.rl import NemoGymConfig
from nemotron_steps.engine.grpo.step import (
    PreparedBatch,
    finish_batch,
    prepare_batch,
)
from nemotron_steps.engine.types import RolloutGroup, TrainBatch
from tests.engine.engine_samples import group

ON_POLICY = LossFnConfig(force_on_policy_ratio=True)
GYM = NemoGymConfig()


def grpo(**changes: object) -> GrpoConfig:
    return GrpoConfig.model_validate({"num_prompts_per_step": 2, "num_generations_per_prompt": 4, **changes})


def prepare(groups: list[RolloutGroup], config: GrpoConfig, step: int = 0, total_steps: int = 11) -> PreparedBatch:
    return prepare_batch(groups, config, step=step, total_steps=total_steps, max_response_length=6)


def finish(
    groups: list[RolloutGroup], config: GrpoConfig, loss_fn: LossFnConfig = ON_POLICY, step: int = 0
) -> tuple[TrainBatch, dict[str, float]]:
    prepared = prepare(groups, config, step)
    prepared.batch.prev_logprobs = prepared.batch.generation_logprobs.clone()
    prepared.batch.reference_logprobs = prepared.batch.generation_logprobs - prepared.batch.token_mask * 0.5
    return finish_batch(prepared, config, loss_fn, GYM)


TWO = [group("a", [1, 0, 0, 0], version=2), group("b", [1, 1, 1, 1], version=3)]


def row_advantages(batch: TrainBatch) -> list[float]:
    """The one advantage of each row's trained tokens; 0 where nothing is trained."""
    values = []
    for n in range(len(batch)):
        trained = batch.advantages[n][(batch.token_mask[n] * batch.sample_mask[n]) > 0]
        assert len(trained.unique()) <= 1
        values.append(trained[0].item() if len(trained) else 0.0)
    return values


def test_failed_rollouts_and_missing_rollouts_are_masked_and_not_in_the_baseline() -> None:
    short = group("a", [1, 0, 0])
    short.rollouts[2] = replace(short.rollouts[2], reward=math.nan, failure="judge_unavailable")
    batch, metrics = finish([short, group("b", [1, 0, 0, 0])], grpo())
    assert len(batch) == 8  # the global batch size holds
    assert batch.sample_mask.tolist() == [1, 1, 0, 0, 1, 1, 1, 1]
    assert row_advantages(batch)[:4] == [1.0, -1.0, 0.0, 0.0]
    assert metrics["reward/mean"] == 2 / 6
    assert torch.isfinite(batch.advantages).all()


def test_overlong_filtering_masks_truncated_samples_that_still_count_in_the_baseline() -> None:
    cut = group("a", [1, 0, 0, 0])
    cut.rollouts[0] = replace(cut.rollouts[0], truncated=True)
    batch, metrics = finish([cut, TWO[1]], grpo(overlong_filtering=True))
    assert batch.sample_mask.tolist() == [0, 1, 1, 1, 1, 1, 1, 1]
    assert row_advantages(batch)[1] < 0  # 1 is still in the others' baseline
    assert metrics["overlong_filtered_share"] == metrics["truncation_rate"] == 1 / 8


def test_scaling_and_shaping_come_before_the_baseline() -> None:
    config = grpo(
        normalize_rewards=False,
        reward_scaling={"enabled": True, "source_min": 0, "source_max": 1, "target_min": -1, "target_max": 1},
        reward_shaping={"enabled": True, "overlong_buffer_length": 4, "overlong_buffer_penalty": 1.0},
    )
    groups = [group("a", [1, 0, 0, 0]), TWO[1]]
    batch, metrics = finish(groups, config)
    # 4 of 6 tokens, buffer from 2: penalty -.5 for all, so only the scaling shows in the difference.
    assert row_advantages(batch)[0] == pytest.approx(2.0)
    assert metrics["reward/mean"] == 5 / 8  # what the environment said
    assert metrics["reward/shaped_mean"] == pytest.approx(5 / 8 * 2 - 1 - 0.5)


def test_epsilon_filtering_judges_a_group_by_its_scaled_reward_and_not_by_what_shaping_and_low_effort_make_of_it() -> (
    None
):
    scaling = {"enabled": True, "source_min": 0.0, "source_max": 4.0}
    shaping = {"enabled": True, "overlong_buffer_length": 2, "overlong_buffer_penalty": 0.5, "max_response_length": 4}
    low = {"string": "brief", "weight": 1.0, "upper_bound_tokens": 8}
    config = grpo(
        num_prompts_per_step=3,
        epsilon_filtering={"enabled": True, "limit_start": 0.01},
        reward_scaling=scaling,
        reward_shaping=shaping,
        low_effort=low,
    )
    asked = {"low_effort": {"reward": 2, "length_reward": 0.5}, "turn_texts": ["x"]}
    groups = [
        group("solved", [4, 4, 4, 4]),  # shaped: .5, far from both ends
        group("half", [4, 4, 4, 4], metadata=asked),  # of these, 2 for brevity
        group("raw_one", [1, 1, 1, 1]),  # scaled: .25; shaped: below 0
    ]
    batch, metrics = finish(groups, config)
    assert batch.sample_mask.tolist() == [0] * 4 + [1] * 8
    assert metrics["epsilon_filtering/dropped_share"] == pytest.approx(1 / 3)


def test_message_penalties_overwrite_the_turn_whatever_the_reward_and_the_clip_comes_last() -> None:
    bad = group("a", [1, 0, 0, 0])
    bad.rollouts[0] = replace(bad.rollouts[0], metadata={"turn_texts": ["<tool_call>oops"]})
    config = grpo(invalid_tool_call_advantage=-5, malformed_thinking_advantage=-7)
    batch, metrics = finish([bad, TWO[1]], config)
    assert row_advantages(batch)[0] == -5.0
    assert metrics["violations/invalid_tool_call"] == 1 / 8 and metrics["violations/malformed_thinking"] == 0.0
    clipped, metrics = finish([bad, TWO[1]], config.model_copy(update={"advantage_clip_low": -2.0}))
    assert row_advantages(clipped)[0] == -2.0 and metrics["advantages/clipped_share"] == 1 / 8
    masked, _ = finish([bad, TWO[1]], grpo(invalid_tool_call_strategy="mask", malformed_thinking_advantage=-7))
    assert not masked.token_mask[0].any() and row_advantages(masked)[1] < 0
    plain, metrics = finish([bad, TWO[1]], grpo())
    assert row_advantages(plain)[0] == 1.0 and not any(name.startswith("violations/") for name in metrics)


def test_sequences_beyond_the_logprob_error_threshold_are_masked_but_stay_in_the_baseline() -> None:
    config = grpo(seq_logprob_error_threshold=2.0)
    prepared = prepare(TWO, config)
    prepared.batch.prev_logprobs = prepared.batch.generation_logprobs.clone()
    prepared.batch.prev_logprobs[0, 2:] -= 1.0  # e > 2
    batch, metrics = finish_batch(prepared, config, ON_POLICY, GYM)
    assert batch.sample_mask.tolist() == [0] + [1] * 7
    assert row_advantages(batch)[1] < 0
    assert metrics["seq_logprob_error/masked_share"] == 1 / 8
    assert metrics["seq_logprob_error/max"] == pytest.approx(math.e, rel=1e-5)
    assert prepared.batch.sample_mask.tolist() == [1] * 8  # the prepared batch is left alone


def test_reinforce_plus_plus_and_kl_in_the_reward() -> None:
    config = grpo(adv_estimator={"name": "reinforce_plus_plus"})
    batch, _ = finish(TWO, config)
    trained = batch.advantages[batch.token_mask > 0]
    assert trained.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert trained.std(correction=0).item() == pytest.approx(1.0, rel=1e-5)
    in_reward = LossFnConfig(
        reference_policy_kl_penalty=0.1, use_kl_in_reward=True, reference_policy_kl_type="k1",
        force_on_policy_ratio=True,
    )  # fmt: skip
    plain, _ = finish(TWO, grpo())
    penalised, _ = finish(TWO, grpo(), in_reward)
    difference = (penalised.advantages - plain.advantages)[batch.token_mask > 0]
    assert difference.tolist() == pytest.approx([-0.05] * len(difference), rel=1e-4)  # k1 = .5 nats everywhere


def test_gdpo_scales_and_shapes_every_component_like_the_reward() -> None:
    estimator = {"name": "gdpo", "components": ["right", "format"]}
    plain = grpo(adv_estimator=estimator, normalize_rewards=False, num_prompts_per_step=1)
    right, form = [1.0, 0.0, 3.0, 0.0], [1.0, 1.0, 0.0, 0.0]

    def advantages(config: GrpoConfig, right: list[float], form: list[float]) -> list[float]:
        made = group("a", [0] * 4)
        parts = [{"right": a, "format": b} for a, b in zip(right, form, strict=True)]
        made.rollouts = [replace(r, components=p) for r, p in zip(made.rollouts, parts, strict=True)]
        made.rollouts[0] = replace(made.rollouts[0], truncated=True)
        return row_advantages(finish([made], config)[0])

    scaling = {"enabled": True, "source_min": 0, "source_max": 2, "target_min": 0, "target_max": 8}
    scaled = advantages(plain.model_validate({**plain.model_dump(), "reward_scaling": scaling}), right, form)
    assert scaled == pytest.approx(advantages(plain, [4.0, 0.0, 8.0, 0.0], [4.0, 4.0, 0.0, 0.0]))
    assert scaled != pytest.approx(advantages(plain, right, form))
    shaping = {"enabled": True, "stop_properly_penalty_coef": 0.5}
    shaped = advantages(plain.model_validate({**plain.model_dump(), "reward_shaping": shaping}), right, form)
    assert shaped == pytest.approx(advantages(plain, [0.5, 0.0, 3.0, 0.0], [0.5, 1.0, 0.0, 0.0]))
