"""From graded groups to a batch ready to train, in the fixed order of one GRPO step.

prepare_batch:  scale rewards -> shape rewards -> baseline and std per group -> epsilon filter -> overlong filter
(the loop):     prev and reference logprobs, where `needs_*` says so
finish_batch:   sequence logprob-error mask -> advantages -> message penalties -> advantage clip
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from nemotron_steps.engine.batching import pad_rows
from nemotron_steps.engine.grpo.advantages import ESTIMATORS, GradedRewards, group_statistics
from nemotron_steps.engine.grpo.filters import epsilon_filter
from nemotron_steps.engine.grpo.rewards import (
    LOW_EFFORT_KEY,
    REWARD_PENALTIES_KEY,
    RewardPenalty,
    low_effort_metrics,
    penalize_turns,
    scale_rewards,
    shape_rewards,
    treatments,
)
from nemotron_steps.engine.losses.loss import count_normalizers, loss_mask, reduce_over_batch
from nemotron_steps.engine.losses.policy_gradient import kl_divergence, sequence_logprob_error
from nemotron_steps.engine.rollouts.turns import failed_rollout
from nemotron_steps.engine.schedules import cosine, progress
from nemotron_steps.engine.types import Rollout, RolloutGroup, Teachers, TrainBatch
from nemotron_steps.environments.base import GRADER_FAILED, GradeResult

if TYPE_CHECKING:
    from nemotron_steps.config.schema.grpo import GrpoConfig, LossFnConfig
    from nemotron_steps.config.schema.rl import NemoGymConfig
    from nemotron_steps.engine.rollouts.data import PromptRow


MISSING_MEMBER = "missing_member"
"""Failure class of a placeholder that stands for a rollout a straggler deadline left out."""


@dataclass
class PreparedBatch:
    """A padded batch whose advantages are still zero, with what is needed to compute them."""

    batch: TrainBatch
    rollouts: list[Rollout]
    """N rollouts, rows of the batch."""
    graded: GradedRewards
    metrics: dict[str, float]


def needs_prev_logprobs(grpo: GrpoConfig, loss_fn: LossFnConfig) -> bool:
    """Whether the loop must compute logprobs under the policy that starts the step."""
    by_teachers = grpo.adv_estimator.name == "opd"
    return by_teachers or loss_fn.reads_prev_logprobs or grpo.seq_logprob_error_threshold is not None


def needs_reference_logprobs(loss_fn: LossFnConfig) -> bool:
    """Whether a reference model is kept and run at all."""
    return loss_fn.reference_policy_kl_penalty != 0


def prepare_batch(
    groups: Sequence[RolloutGroup],
    config: GrpoConfig,
    *,
    step: int,
    total_steps: int,
    max_response_length: int,
    length_multiple: int = 1,
) -> PreparedBatch:
    """Everything up to the logprobs, of step `step` (0-based), which trains the weights of that version. The batch has
    P x G rows: placeholders and failed rollouts have sample mask 0 and no part in any baseline."""
    rollouts, group_index = _flatten(groups, config.num_generations_per_prompt)
    valid = torch.tensor([r.failure is None for r in rollouts])
    truncated = torch.tensor([r.truncated for r in rollouts])
    # As in NeMo-RL, the length that shaping looks at is that of the first answer, also of several turns.
    lengths = torch.tensor([r.turns[0][1] - r.turns[0][0] if r.turns else 0 for r in rollouts])
    raw = torch.tensor([r.reward if r.failure is None else 0.0 for r in rollouts], dtype=torch.float64)

    def shaped(values: torch.Tensor) -> torch.Tensor:
        scaled = scale_rewards(values, config)
        return shape_rewards(scaled, lengths, truncated, config, max_response_length=max_response_length)

    rewards = shaped(raw)
    # What is *added* to a reward (overlong penalty, low effort) belongs to no component: its config refuses those.
    components = {name: shaped(each) for name, each in _components(rollouts, config.adv_estimator.components).items()}
    statistics = group_statistics(rewards, group_index, valid, leave_one_out=config.use_leave_one_out_baseline)

    of_group = slice(None, None, config.num_generations_per_prompt)
    metrics = {
        **rollout_metrics(rollouts, raw, step),
        "groups/count": float(len(groups)),
        "groups/zero_std_share": float((statistics.group_std[of_group] == 0).double().mean()),
        "groups/incomparable_share": float((statistics.valid_count[of_group] < 2).double().mean()),
        **(low_effort_metrics(rollouts) if config.low_effort.enabled else {}),
    }
    if rewards is not raw and bool(valid.any()):
        metrics["reward/shaped_mean"] = float(rewards[valid].mean())

    sample_mask = valid.float()
    if config.epsilon_filtering.enabled:
        epsilon = config.epsilon_filtering
        own = torch.tensor([r.metadata.get(LOW_EFFORT_KEY, {}).get("reward", r.reward) for r in rollouts]).double()
        unshaped = scale_rewards(own, config)
        # NaN, which no comparison calls trivial, where nothing is graded.
        means = torch.stack([unshaped[valid & (group_index == g)].mean() for g in range(len(groups))])
        limit = cosine(epsilon.limit_start, epsilon.limit_end, progress(step, total_steps))
        keep = epsilon_filter(means, epsilon=epsilon.epsilon, limit=limit)
        sample_mask = sample_mask * keep[group_index].float()
        metrics["epsilon_filtering/limit"] = limit
        metrics["epsilon_filtering/dropped_share"] = float((~keep).double().mean())
    if config.overlong_filtering:
        # The truncated samples still counted in the baseline above.
        metrics["overlong_filtered_share"] = float((truncated & (sample_mask > 0)).double().mean())
        sample_mask = sample_mask * (~truncated).float()

    batch = pad_rows(rollouts, sample_mask, length_multiple=length_multiple)
    graded = GradedRewards(rewards, components, group_index, valid, statistics)
    return PreparedBatch(batch, rollouts, graded, metrics)


def finish_batch(
    prepared: PreparedBatch,
    config: GrpoConfig,
    loss_fn: LossFnConfig,
    gym: NemoGymConfig,
    *,
    truncated: bool = False,
) -> tuple[TrainBatch, dict[str, float]]:
    """Everything after the logprobs: masks, advantages, penalties, clip; the batch to train on, and all metrics. Where
    rollouts are `truncated` (top_p, top_k), a token whose prev logprob is -inf says nothing of an error."""
    batch = replace(prepared.batch)
    metrics = dict(prepared.metrics)
    if config.seq_logprob_error_threshold is not None:
        prev = batch.prev_logprobs
        assert prev is not None
        compared = batch.token_mask * ~prev.isneginf() if truncated else batch.token_mask
        error = sequence_logprob_error(prev, batch.generation_logprobs, compared)
        dropped = (error > config.seq_logprob_error_threshold) & (batch.sample_mask > 0)
        trained = batch.sample_mask > 0
        if bool(trained.any()):
            metrics["seq_logprob_error/max"] = float(error[trained].max())
        metrics["seq_logprob_error/masked_share"] = float(dropped.double().mean())
        batch.sample_mask = batch.sample_mask * (~dropped).float()

    kl = None
    if loss_fn.use_kl_in_reward:  # per token; anything where nothing is trained
        assert batch.prev_logprobs is not None and batch.reference_logprobs is not None
        kl = kl_divergence(
            batch.prev_logprobs.double(),
            batch.reference_logprobs.double(),
            loss_fn.reference_policy_kl_type,
            input_clamp=loss_fn.kl_input_clamp_value,
            output_clamp=loss_fn.kl_output_clamp_value,
        )
        # Under the name and over the tokens that the loss would log it with: signals watch it there.
        mask = loss_mask(batch.token_mask, batch.sample_mask)
        level = loss_fn.token_level_loss
        metrics["kl_penalty"] = float(reduce_over_batch(kl, mask, count_normalizers(batch), token_level=level))
    graded = prepared.graded
    if batch.teacher_logprobs is not None and batch.prev_logprobs is not None:
        graded = replace(graded, teacher_gap=batch.teacher_logprobs - batch.prev_logprobs)
    advantages = ESTIMATORS[config.adv_estimator.name](
        config,
        graded,
        loss_mask(batch.token_mask, batch.sample_mask),
        None if kl is None else loss_fn.reference_policy_kl_penalty * kl,
    ).clone()
    batch.token_mask, treated = batch.token_mask.clone(), treatments(config)
    patterns, tags = gym.invalid_tool_call_patterns, gym.thinking_tags
    broken = penalize_turns(prepared.rollouts, treated, advantages, batch.token_mask, patterns=patterns, tags=tags)
    metrics |= {f"violations/{kind.value}": broken[kind] / len(batch) for kind in treated}

    low, high = config.advantage_clip_low, config.advantage_clip_high
    clipped = advantages if low is None and high is None else advantages.clamp(min=low, max=high)
    mask = loss_mask(batch.token_mask, batch.sample_mask)
    batch.advantages = torch.where(mask > 0, clipped, torch.zeros_like(clipped)).float()
    metrics.update(_advantage_metrics(advantages, clipped, mask))
    return batch, metrics


def _flatten(groups: Sequence[RolloutGroup], num_generations: int) -> tuple[list[Rollout], torch.Tensor]:
    """Rows of all groups and their group's position, every group filled up to `num_generations`."""
    assert groups and len({group.group_id for group in groups}) == len(groups)
    rollouts: list[Rollout] = []
    for group in groups:
        assert len(group.rollouts) <= num_generations
        environment = group.rollouts[0].environment if group.rollouts else "none"
        rollouts.extend(group.rollouts)
        for index in range(len(group.rollouts), num_generations):
            missing = GradeResult.failed(MISSING_MEMBER)
            rollouts.append(failed_rollout(group.group_id, index, environment, missing))
    return rollouts, torch.arange(len(groups)).repeat_interleave(num_generations)


def _components(rollouts: Sequence[Rollout], names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Components that every graded rollout carries, each float64 [N]; 0 for those that grading failed on."""
    graded = [r.components for r in rollouts if r.failure is None and GRADER_FAILED not in r.components]
    carried = [name for name in names if all(name in components for components in graded)]
    return {
        name: torch.tensor([r.components.get(name, 0.0) for r in rollouts], dtype=torch.float64) for name in carried
    }


def _advantage_metrics(before_clip: torch.Tensor, after_clip: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    trained = mask > 0
    if not bool(trained.any()):
        return {}
    values = after_clip[trained].double()
    return {
        "advantages/mean": float(values.mean()),
        "advantages/std": float(values.std(correction=0)),
        "advantages/min": float(values.min()),
        "advantages/max": float(values.max()),
        "advantages/clipped_share": float((before_clip != after_clip)[trained].double().mean()),
    }


TEACHER_KEY = "teacher"
"""Of a rollout's metadata: the name of its prompt's teacher."""


@dataclass(frozen=True)
class Distillation:
    """The teachers of a run and the rows that each of them has."""

    teacher_of: Callable[[Mapping[str, Any], str], str]
    """(row, where) → the name of its teacher."""
    teachers: Teachers
    gives_advantages: bool = False
    """Whether the policy learns from sampled tokens' logprobs (adv_estimator.name=opd), not from distributions."""

    def mark(self, prompts: Sequence[PromptRow], groups: Sequence[RolloutGroup]) -> None:
        """Note each prompt's teacher in its rollouts, where a checkpoint of the buffer keeps it."""
        for prompt, group in zip(prompts, groups, strict=True):
            teacher = self.teacher_of(prompt.row, prompt.where)
            for rollout in group.rollouts:
                rollout.metadata[TEACHER_KEY] = teacher

    def score(self, prepared: PreparedBatch) -> None:
        """Have the teachers score the batch."""
        rollouts = prepared.rollouts
        prepared.batch = batch = self.teachers.score(prepared.batch, [r.metadata.get(TEACHER_KEY) for r in rollouts])
        assert batch.teacher_logprobs is not None
        mask = loss_mask(batch.token_mask, batch.sample_mask)
        kl = kl_divergence(batch.generation_logprobs, batch.teacher_logprobs, "k1", input_clamp=None, output_clamp=None)
        kl = torch.where(mask > 0, kl, torch.zeros_like(kl))  # elsewhere it may be anything, NaN included
        totals = kl.sum(dim=1).tolist(), mask.sum(dim=1).tolist()
        sums: Mapping[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for rollout, nats, tokens in zip(rollouts, *totals, strict=True):
            if tokens:
                for key in ("mean", rollout.environment):
                    sums[key][0] += nats
                    sums[key][1] += tokens
        found: dict[str, Any] = {f"teacher_kl/{name}": nats / tokens for name, (nats, tokens) in sorted(sums.items())}
        if self.gives_advantages and "teacher_kl/mean" in found:  # else the loss computes it
            found["teacher_divergence"] = found["teacher_kl/mean"]
        prepared.metrics.update(found)

    def own_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """A step's metrics without those of rewards' advantages, which nothing is trained on."""
        left_out = ("groups/",) if self.gives_advantages else ("advantages/", "groups/")
        return {name: value for name, value in metrics.items() if not name.startswith(left_out)}


def rollout_metrics(rollouts: Sequence[Rollout], rewards: torch.Tensor, version: int) -> dict[str, float]:
    """What a step's rollouts say before training: rewards and their components per environment, truncation, lengths,
    penalties, and the lag behind `version` of sampled tokens. Failures: see FailureWatch."""
    metrics: dict[str, float] = {}
    of_environment: dict[str, list[Rollout]] = defaultdict(list)
    graded: dict[str, list[float]] = defaultdict(list)
    components: dict[str, list[float]] = defaultdict(list)
    for rollout, reward in zip(rollouts, rewards.tolist(), strict=True):
        of_environment[rollout.environment].append(rollout)
        if rollout.failure is None:
            graded[rollout.environment].append(reward)
            for name, value in ({GRADER_FAILED: 0.0} | rollout.components).items():
                components[f"reward/{rollout.environment}/{name}"].append(value)
    every = [reward for values in graded.values() for reward in values]
    if every:
        metrics |= {"reward/mean": fmean(every), "reward/std": _std(every)}
        metrics |= {"reward/min": min(every), "reward/max": max(every)}
    for name, values in sorted(graded.items()):
        metrics |= {f"reward/{name}/mean": fmean(values), f"reward/{name}/std": _std(values)}
    shown = sorted((k, v) for k, v in components.items() if any(v) or not k.endswith(f"/{GRADER_FAILED}"))
    metrics |= {name: fmean(values) for name, values in shown}

    sampled = [r for r in rollouts if r.weight_versions]
    metrics["truncation_rate"] = fmean([float(r.truncated) for r in sampled]) if sampled else 0.0
    if sampled:
        lengths = [float(sum(r.token_mask)) for r in sampled]
        metrics["response_length/mean"], metrics["response_length/max"] = fmean(lengths), max(lengths)
        metrics["turns/mean"] = fmean([float(len(r.turns)) for r in sampled])
    for name, own in sorted(of_environment.items()) if len(of_environment) > 1 else ():
        lengths = [float(sum(rollout.token_mask)) for rollout in own if rollout.weight_versions]
        if lengths:
            metrics[f"response_length/{name}/mean"] = fmean(lengths)
        metrics[f"failure_rate/{name}"] = fmean([float(rollout.failure is not None) for rollout in own])

    penalized = [r.metadata[REWARD_PENALTIES_KEY] for r in rollouts if REWARD_PENALTIES_KEY in r.metadata]
    for penalty in RewardPenalty if penalized else ():
        metrics[f"reward_penalties/{penalty}"] = sum(penalty in names for names in penalized) / len(penalized)

    lags: Counter[int] = Counter()
    for rollout in sampled:
        # Few distinct versions and very many tokens: count each instead of walking the list in Python.
        for each in set(rollout.weight_versions):
            lags[version - each] += rollout.weight_versions.count(each)
    if lags:
        metrics |= {f"policy_lag/share_{lag}": lags[lag] / lags.total() for lag in sorted(lags)}
        metrics["policy_lag/mean"] = sum(lag * n for lag, n in lags.items()) / lags.total()
        metrics["policy_lag/max"] = float(max(lags))
    return metrics


def _std(values: Sequence[float]) -> float:
    """Population standard deviation, two passes."""
    mean = fmean(values)
    return float(fmean([(value - mean) ** 2 for value in values]) ** 0.5)
