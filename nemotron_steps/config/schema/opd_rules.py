"""Combinations of distillation settings that have no meaning: what would shape rewards, which do not train here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from nemotron_steps.config.schema.base import Rule, Section

if TYPE_CHECKING:
    from nemotron_steps.config.schema.opd import OpdConfig

_OF_REWARDS = (
    "normalize_rewards",
    "use_leave_one_out_baseline",
    "advantage_clip_low",
    "advantage_clip_high",
    "use_dynamic_sampling",
    "reward_scaling",
    "reward_shaping",
    "adv_estimator",
    "penalize_invalid_tool_call",
    "invalid_tool_call_advantage",
    "penalize_malformed_thinking",
    "malformed_thinking_advantage",
    "low_effort",
    "epsilon_filtering",
)
"""Keys of `grpo` that say what an answer is worth."""
_OF_DISTILLATION = ("kl_type", "mixed_kl_weight", "zero_outside_topk")


def opd_rules(config: OpdConfig) -> list[Rule]:
    """Rules of the whole config."""
    loss, policy, generation = config.loss_fn, config.policy, config.policy.generation
    sampled = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    return [
        *_defaults("grpo", config.grpo, _OF_REWARDS, "rewards do not train in on-policy distillation"),
        *_defaults(
            "loss_fn",
            loss,
            tuple(name for name in type(loss).model_fields if name not in _OF_DISTILLATION),
            "on-policy distillation has no policy-gradient loss",
        ),
        Rule(
            loss.kl_type != "mixed" and loss.mixed_kl_weight != type(loss).model_fields["mixed_kl_weight"].default,
            "loss_fn.mixed_kl_weight",
            f"loss_fn.mixed_kl_weight is ignored under loss_fn.kl_type={loss.kl_type}",
            ("loss_fn.kl_type=mixed",),
        ),
        Rule(
            loss.zero_outside_topk and config.on_policy_distillation.topk_logits_k is None,
            "loss_fn.zero_outside_topk",
            "loss_fn.zero_outside_topk is ignored where on_policy_distillation.topk_logits_k=null compares every token",
            ("loss_fn.zero_outside_topk=false", "on_policy_distillation.topk_logits_k=64"),
        ),
        *_defaults(
            "reward_penalties",
            config.reward_penalties,
            type(config.reward_penalties).model_fields,
            "rewards do not train in on-policy distillation",
        ),
        Rule(
            policy.dtensor_cfg.enabled,
            "policy.dtensor_cfg.enabled",
            "on-policy distillation compares whole distributions, which the megatron policy does",
            ("policy.dtensor_cfg.enabled=false",),
        ),
        *(
            Rule(
                getattr(generation, name) != plain,
                f"policy.generation.{name}",
                f"policy.generation.{name}={getattr(generation, name):g} samples from another distribution than the "
                "one that is compared with the teacher's",
                (f"policy.generation.{name}={plain:g}",),
            )
            for name, plain in sampled.items()
        ),
    ]


def _defaults(section: str, values: Section, names: Iterable[str], why: str) -> Iterator[Rule]:
    """Keys that would be ignored keep their defaults."""
    for name in names:
        key, value = f"{section}.{name}", getattr(values, name)
        if isinstance(value, Section):
            yield from _defaults(key, value, type(value).model_fields, why)
            continue
        default = type(values).model_fields[name].default
        yield Rule(value != default, key, f"{why}: {key} would be ignored", (f"{key}={_written(default)}",))


def _written(value: Any) -> str:
    """A default as an override has it."""
    if isinstance(value, tuple):
        return f"[{','.join(map(_written, value))}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)
