"""Config of on-policy distillation (`rl/nemo_rl/opd`): a GRPO run whose policy learns from teachers, not rewards.

Keys have NeMo-RL's names: the loss's are its DistillationLossFn's, `on_policy_distillation` is its multi-teacher
section.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from nemotron_steps.config.schema import opd_rules, rl_rules
from nemotron_steps.config.schema.base import OPERATIONAL, Section, refuse
from nemotron_steps.config.schema.rl import GrpoConfig, LossFnConfig, RlConfig


class DistillationLossFnConfig(LossFnConfig):
    """`loss_fn.*` of distillation. Formulas: `nemotron_steps/engine/losses/teacher_kl.py`. The keys of the
    policy-gradient loss have no part in it, and keep their defaults."""

    kl_type: Literal["forward", "reverse", "mixed"] = "mixed"
    mixed_kl_weight: float = Field(0.5, ge=0, le=1)
    """Of the forward KL, under kl_type=mixed."""
    zero_outside_topk: bool = False
    """The teacher gives nothing to tokens that its k heaviest are not; false: both are renormalised over these."""

    @property
    def reads_prev_logprobs(self) -> bool:
        """See LossFnConfig."""
        return False


class DistillationGrpoConfig(GrpoConfig):
    """`grpo.*` of distillation: the loop's keys; those of rewards keep their defaults."""

    @model_validator(mode="after")
    def _has_a_meaning(self) -> DistillationGrpoConfig:
        # One answer a prompt is enough: nothing is compared with the others of its group.
        refuse([rule for rule in rl_rules.grpo_rules(self) if rule.key != "num_generations_per_prompt"])
        return self


class OnPolicyDistillationConfig(Section):
    """`on_policy_distillation.*`: the teachers, and which rows are whose."""

    teachers: dict[str, str] = Field(default_factory=dict)
    """Name → checkpoint folder; the `teachers` port is written here."""
    teacher_model_by_agent_name: dict[str, str] = Field(default_factory=dict)
    """Agent (`agent_ref.name` of a row; the environment under env.should_use_nemo_gym=false) → name of a teacher."""
    teacher_field: str | None = None
    """Field of a row that names its teacher, which goes before its agent."""
    default_teacher_alias: str | None = None
    """Teacher of all other rows. None: a row without a teacher is refused, unless there is only one teacher."""
    topk_logits_k: PositiveInt | None = 64
    """Tokens of each of the teacher's distributions that are compared. None: all, the full KL; of each token
    then the teacher's hidden state is kept, and the teachers' output layers stay on the devices."""
    offload: Annotated[bool, OPERATIONAL] = True
    """On GPUs, teachers are in host memory until it is their turn."""


class OpdConfig(RlConfig):
    """The whole config of on-policy distillation."""

    grpo: DistillationGrpoConfig = DistillationGrpoConfig()
    loss_fn: DistillationLossFnConfig = DistillationLossFnConfig()
    on_policy_distillation: OnPolicyDistillationConfig = OnPolicyDistillationConfig()

    @model_validator(mode="after")
    def _rewards_do_not_train(self) -> OpdConfig:
        refuse(opd_rules.opd_rules(self))
        return self
