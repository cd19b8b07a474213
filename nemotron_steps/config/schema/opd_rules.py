"""Combinations of distillation settings that have no meaning: what would shape rewards, which do not train here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from nemotron_steps.config.schema.base import Rule, Section

if TYPE_CHECKING:
    from nemotron_steps.config.schema.opd import OnPolicyDistillationConfig, OpdConfig

_OF_REWARDS = (
    "normalize_rewards",
    "use_leave_one_out_baseline",
    "use_dynamic_sampling",
    "reward_scaling",
    "reward_shaping",
    "penalize_invalid_tool_call",
    "invalid_tool_call_advantage",
    "penalize_malformed_thinking",
    "malformed_thinking_advantage",
    "low_effort",
    "epsilon_filtering",
)
"""Keys of `grpo` that say what an answer is worth."""
_OF_ADVANTAGES = ("advantage_clip_low", "advantage_clip_high")
_OF_DISTILLATION = ("kl_type", "mixed_kl_weight", "zero_outside_topk")


def opd_rules(config: OpdConfig) -> list[Rule]:
    """Rules of the whole config."""
    loss, policy, generation = config.loss_fn, config.policy, config.policy.generation
    sampled = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    return [
        *_defaults("grpo", config.grpo, _OF_REWARDS, "rewards do not train in on-policy distillation"),
        *(_advantage_rules(config) if config.grpo.adv_estimator.name == "opd" else _divergence_rules(config)),
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
        *_placement_rules(config.on_policy_distillation),
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


def _divergence_rules(config: OpdConfig) -> Iterator[Rule]:
    """Where the loss is a divergence from the teachers' distributions, which has no advantages."""
    loss, estimator = config.loss_fn, config.grpo.adv_estimator
    yield Rule(
        estimator.name != "grpo",
        "grpo.adv_estimator.name",
        f"rewards do not train in on-policy distillation: grpo.adv_estimator.name={estimator.name} would be ignored",
        ("grpo.adv_estimator.name=grpo", "grpo.adv_estimator.name=opd"),
    )
    others = [name for name in type(estimator).model_fields if name != "name"]
    yield from _defaults("grpo.adv_estimator", estimator, others, "rewards do not train in on-policy distillation")
    of_gradient = [name for name in type(loss).model_fields if name not in _OF_DISTILLATION]
    why = "on-policy distillation has no policy-gradient loss, but under grpo.adv_estimator.name=opd"
    yield from _defaults("loss_fn", loss, of_gradient, why)
    yield from _defaults("grpo", config.grpo, _OF_ADVANTAGES, why)


def _advantage_rules(config: OpdConfig) -> Iterator[Rule]:
    """Where teachers give advantages, of the sampled tokens alone."""
    loss, settings = config.loss_fn, config.on_policy_distillation
    why = "grpo.adv_estimator.name=opd reads teachers' logprobs of sampled tokens alone"
    yield from _defaults("loss_fn", loss, _OF_DISTILLATION, why)
    yield from _defaults("on_policy_distillation", settings, ("topk_logits_k",), why)
    estimator = config.grpo.adv_estimator
    yield from _defaults(
        "grpo.adv_estimator", estimator, [name for name in type(estimator).model_fields if name != "name"], why
    )
    yield from _defaults("loss_fn", loss, ("use_kl_in_reward",), "rewards do not train in on-policy distillation")


def _placement_rules(settings: OnPolicyDistillationConfig) -> Iterator[Rule]:
    apart, section = settings.non_colocated_teachers, "on_policy_distillation"
    key = f"{section}.non_colocated_teachers"
    together = f"{key}.enabled=false"
    yield Rule(
        apart.enabled and settings.topk_logits_k is None,
        f"{section}.topk_logits_k",
        "the full KL needs the teachers' output layers on the policy's ranks; teachers on devices of their own send "
        "their heaviest tokens",
        (f"{section}.topk_logits_k=64", together),
    )
    yield Rule(
        apart.enabled and not settings.offload,
        f"{section}.offload",
        f"{section}.offload is ignored where teachers have devices of their own",
        (f"{section}.offload=true", together),
    )
    if not apart.enabled:
        yield from _defaults(
            f"{key}.default_teacher_cfg",
            apart.default_teacher_cfg,
            type(apart.default_teacher_cfg).model_fields,
            f"{key}.enabled=false",
        )
        yield Rule(
            bool(apart.teacher_overrides),
            f"{key}.teacher_overrides",
            f"{key}.enabled=false: {key}.teacher_overrides would be ignored",
            (f"{key}.enabled=true",),
        )


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
