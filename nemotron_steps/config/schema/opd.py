"""Config of on-policy distillation (`rl/nemo_rl/opd`): a GRPO run whose policy learns from teachers, not rewards.

Keys have NeMo-RL's names: the loss's are its DistillationLossFn's, `on_policy_distillation` is its multi-teacher
section.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, ValidationInfo, field_validator

from nemotron_steps.config.schema.base import OPERATIONAL, OnlyIf, Rule, Section, changed_keys, to_default
from nemotron_steps.config.schema.grpo import AdvantageEstimatorConfig, GrpoConfig, LossFnConfig
from nemotron_steps.config.schema.rl import RlConfig

_NOT_OPD = OnlyIf("grpo.adv_estimator.name", "grpo")
_NEVER = (
    *(f"grpo.{key}" for key in GrpoConfig.model_fields if key.startswith(("reward_", "penalize_", "low_effort"))),
    "grpo.normalize_rewards",
    "grpo.use_leave_one_out_baseline",
    "grpo.use_dynamic_sampling",
    "grpo.invalid_tool_call_advantage",
    "grpo.malformed_thinking_advantage",
    "grpo.epsilon_filtering",
    *(f"grpo.adv_estimator.{key}" for key in AdvantageEstimatorConfig.model_fields if key != "name"),
    "loss_fn.use_kl_in_reward",
    "reward_penalties",
)
"""Keys of what an answer is worth: rewards do not train here."""
_OF_OPD = (
    *(f"loss_fn.{key}" for key in LossFnConfig.model_fields if key != "use_kl_in_reward"),
    "grpo.advantage_clip_low",
    "grpo.advantage_clip_high",
)
"""Keys of the policy-gradient loss."""
_SAMPLED = ("policy.generation.temperature", "policy.generation.top_p", "policy.generation.top_k")


class DistillationLossFnConfig(LossFnConfig):
    """`loss_fn.*` of distillation. Formulas: `nemotron_steps/engine/losses/distillation.py`. The keys of the
    policy-gradient loss have a part in it under grpo.adv_estimator.name=opd, and else keep their defaults."""

    kl_type: Annotated[Literal["forward", "reverse", "mixed"], _NOT_OPD] = "mixed"
    mixed_kl_weight: Annotated[float, OnlyIf("kl_type", "mixed"), _NOT_OPD] = Field(0.5, ge=0, le=1)
    """Of the forward KL, under kl_type=mixed."""
    zero_outside_topk: Annotated[bool, OnlyIf("on_policy_distillation.topk_logits_k"), _NOT_OPD] = False
    """The teacher gives nothing to tokens outside its top k; false: both are renormalised over these."""

    @property
    def reads_prev_logprobs(self) -> bool:
        """See LossFnConfig; adv_estimator.name=opd reads them whatever the loss does."""
        return False


class DistillationGrpoConfig(GrpoConfig):
    """`grpo.*` of distillation: the loop's keys; those of rewards keep their defaults. Under adv_estimator.name=opd the
    loss is the policy gradient of other steps, with teachers' logprobs less the policy's as advantages."""

    def _broken_rules(self) -> Iterator[Rule]:
        # One answer a prompt is enough: nothing is compared with the others of its group.
        return (rule for rule in super()._broken_rules() if rule.key != "num_generations_per_prompt")


class TeacherResourceConfig(Section):
    """Devices and layout of a teacher that has its own; what teacher_overrides leaves out is default_teacher_cfg's."""

    tensor_model_parallel_size: Annotated[PositiveInt, OPERATIONAL] = 1
    pipeline_model_parallel_size: Annotated[PositiveInt, OPERATIONAL] = 1
    context_parallel_size: Annotated[PositiveInt, OPERATIONAL] = 1
    expert_model_parallel_size: Annotated[PositiveInt, OPERATIONAL] = 1
    sequence_parallel: Annotated[bool, OPERATIONAL] = False
    num_nodes: Annotated[PositiveInt, OPERATIONAL] = 1
    gpus_per_node: Annotated[PositiveInt | None, OPERATIONAL] = None
    """GPUs of each of its nodes; None: all, cluster.gpus_per_node. On CPU a teacher has the processes of one copy."""
    precision: Literal["float32", "bfloat16"] | None = None
    """None: policy.precision."""
    micro_batch_size: Annotated[PositiveInt | None, OPERATIONAL] = None
    """Rows scored at a time; None: as policy.logprob_batch_size, sequence_packing and dynamic_batching say."""


class NonColocatedTeachersConfig(Section):
    """`on_policy_distillation.non_colocated_teachers`: teachers on devices of their own, taken off the cluster's."""

    enabled: Annotated[bool, OnlyIf("topk_logits_k")] = False
    """They send their top-k tokens: the full KL needs the teachers' output layers on the policy's ranks."""
    default_teacher_cfg: Annotated[TeacherResourceConfig, OnlyIf("enabled")] = TeacherResourceConfig()
    teacher_overrides: Annotated[dict[str, TeacherResourceConfig], OnlyIf("enabled")] = Field(default_factory=dict)
    """Name of a teacher → what is different for it; validated, everything of it."""

    @field_validator("teacher_overrides", mode="after")
    @classmethod
    def _whole(
        cls, overrides: dict[str, TeacherResourceConfig], info: ValidationInfo
    ) -> dict[str, TeacherResourceConfig]:
        # At once: a config that was written and read again names every key, and tells no more which were left out.
        default: TeacherResourceConfig | None = info.data.get("default_teacher_cfg")
        if default is None:  # reported by itself
            return overrides
        return {
            name: default.model_copy(update={key: getattr(own, key) for key in own.model_fields_set})
            for name, own in overrides.items()
        }

    def of(self, name: str) -> TeacherResourceConfig:
        """A teacher's."""
        return self.teacher_overrides.get(name, self.default_teacher_cfg)


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
    topk_logits_k: Annotated[PositiveInt | None, _NOT_OPD] = 64
    """Tokens of each of the teacher's distributions that are compared. None: all, the full KL; of each token
    then the teacher's hidden state is kept, and the teachers' output layers stay on the devices. Not read under
    grpo.adv_estimator.name=opd."""
    offload: Annotated[bool, OPERATIONAL, OnlyIf("non_colocated_teachers.enabled", False)] = True
    """On GPUs, teachers are in host memory until it is their turn; those with devices of their own stay there."""
    non_colocated_teachers: NonColocatedTeachersConfig = NonColocatedTeachersConfig()


class OpdConfig(RlConfig):
    """The whole config of on-policy distillation."""

    grpo: DistillationGrpoConfig = DistillationGrpoConfig()
    loss_fn: DistillationLossFnConfig = DistillationLossFnConfig()
    on_policy_distillation: OnPolicyDistillationConfig = OnPolicyDistillationConfig()

    def _broken_rules(self) -> Iterator[Rule]:
        yield from super()._broken_rules()
        key, name = "grpo.adv_estimator.name", self.grpo.adv_estimator.name
        if name not in ("grpo", "opd"):
            yield Rule(key, f"rewards do not train in on-policy distillation: {key}={name}", f"{key}=grpo")
        key = "policy.dtensor_cfg.enabled"
        if self.policy.dtensor_cfg.enabled:
            what = "on-policy distillation compares whole distributions, which the megatron policy does"
            yield Rule(key, what, f"{key}=false")
        for keys, why in (
            (() if name == "opd" else _OF_OPD, "it is of grpo.adv_estimator.name=opd alone"),
            (_NEVER, "rewards do not train in on-policy distillation"),
            (_SAMPLED, "the teacher's distribution is compared with the one that is sampled from"),
        ):
            for section in keys:
                for key, default in changed_keys(self, section):
                    yield Rule(key, f"{why}: {key} must keep its default", to_default(key, default))
