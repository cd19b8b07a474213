"""`grpo`, `loss_fn` and `reward_penalties`: how rewards become advantages and the loss, under NeMo-RL's key names."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from nemotron_steps.config.schema.base import OnlyIf, Rule, Section, move_alias

EstimatorName = Literal["grpo", "reinforce_plus_plus", "gdpo", "opd"]
_PER_GROUP, _NOT_GDPO = (
    OnlyIf("adv_estimator.name", *(name for name in get_args(EstimatorName) if name != other))
    for other in ("reinforce_plus_plus", "gdpo")
)
"""reinforce_plus_plus normalises over the whole batch, and gdpo takes a reward's components."""
_NOT_ASYNC = OnlyIf("async_grpo.enabled", False)
_USUAL_BOUNDS = {"tis": (None, 5.0), "icepop": (0.5, 5.0), "seq-mask-tis": (0.999, 1.002)}
"""Truncation type → the recipes' lower and upper bound."""


class RewardScalingConfig(Section):
    """Clamp to [source_min, source_max], then map linearly onto [target_min, target_max]."""

    enabled: bool = False
    source_min: float = 0.0
    source_max: float = 1.0
    target_min: float = 0.0
    target_max: float = 1.0

    def _broken_rules(self) -> Iterator[Rule]:
        if self.enabled and self.source_min >= self.source_max:
            what = f"the source interval is empty: source_min {self.source_min:g} >= source_max {self.source_max:g}"
            yield Rule("source_min", f"grpo.reward_scaling: {what}", "source_min=0 source_max=1")


class RewardShapingConfig(Section):
    """DAPO's overlong penalty, and the factor on truncated samples' rewards, which takes its place."""

    enabled: bool = False
    overlong_buffer_length: Annotated[PositiveInt, OnlyIf("stop_properly_penalty_coef", None)] = 128
    overlong_buffer_penalty: Annotated[float, OnlyIf("stop_properly_penalty_coef", None)] = Field(1.0, ge=0)
    max_response_length: Annotated[PositiveInt | None, OnlyIf("stop_properly_penalty_coef", None)] = None
    """L_max; default: policy.generation.max_new_tokens."""
    stop_properly_penalty_coef: float | None = Field(None, ge=0, le=1)


class AdvantageEstimatorConfig(Section):
    """Which estimator turns rewards into advantages."""

    name: EstimatorName = "grpo"
    """opd: the step rl/nemo_rl/opd alone, which has teachers."""
    minus_baseline: Annotated[bool, OnlyIf("name", "reinforce_plus_plus")] = True
    """reinforce_plus_plus: subtract the group mean before normalising over the batch."""
    components: Annotated[tuple[str, ...], OnlyIf("name", "gdpo")] = ()
    """gdpo: the reward components, each scaled and shaped like the reward, normalised separately and summed."""
    reward_weights: tuple[float, ...] | None = None
    """gdpo: weight of each component in the sum, in the alphabetical order of their names; None: 1."""
    normalize_rewards: bool | None = None
    """grpo.normalize_rewards by its other name, which goes before it."""
    use_leave_one_out_baseline: bool | None = None
    """grpo.use_leave_one_out_baseline by its other name, which goes before it."""


class LowEffortConfig(Section):
    """NeMo-RL's `effort_levels`: the reward of prompts that ask for low effort depends on the answer's length too."""

    string: Annotated[str, OnlyIf("weight"), _NOT_GDPO] = ""
    """A prompt whose last user message contains this asks for low effort; data_prep/rl_prep can put it there."""
    weight: Annotated[float, OnlyIf("string")] = Field(0.0, ge=0)
    penalty: float = 1.0
    upper_bound_tokens: PositiveInt = 64000

    @property
    def enabled(self) -> bool:
        """Whether any prompt asks for low effort."""
        return bool(self.string)


class EpsilonFilteringConfig(Section):
    """Nano3: prompts whose group is almost solved or almost failed are kept only up to an annealed share."""

    enabled: bool = False
    epsilon: float = Field(0.05, ge=0, lt=0.5)
    """A group is trivial when its mean scaled reward is within this of 0 or 1."""
    limit_start: float = Field(1.0, gt=0, le=1)
    limit_end: float = Field(0.04, gt=0, le=1)


class AsyncGrpoConfig(Section):
    """`grpo.async_grpo`."""

    enabled: bool = False
    max_trajectory_age_steps: PositiveInt = 1
    in_flight_weight_updates: bool = True
    recompute_kv_cache_after_weight_updates: bool = False
    straggler_deadline_s: PositiveFloat | None = None
    """A rollout that is not over by then is left out; a group of such is resampled."""


class GrpoConfig(Section):
    """`grpo.*`."""

    num_prompts_per_step: PositiveInt = 32
    num_generations_per_prompt: PositiveInt = 8
    max_num_steps: PositiveInt = 1_000_000
    num_iterations: PositiveInt | None = None
    """max_num_steps by its other name, which goes before it."""
    max_num_epochs: PositiveInt = 1
    learning_rate: PositiveFloat | None = None
    """Another name, which goes first, of policy.megatron_cfg.optimizer.lr (dtensor: policy.optimizer.kwargs.lr)."""
    max_rollout_turns: PositiveInt = 1
    normalize_rewards: Annotated[bool, _PER_GROUP] = True
    use_leave_one_out_baseline: Annotated[bool, _PER_GROUP] = True
    advantage_clip_low: float | None = None
    advantage_clip_high: float | None = None
    overlong_filtering: bool = False
    use_dynamic_sampling: bool = False
    dynamic_sampling_max_gen_batches: PositiveInt = 10
    batch_multiplier: Annotated[float, OnlyIf("use_dynamic_sampling"), _NOT_ASYNC] = Field(1.0, ge=1)
    """Prompts of one generation batch of dynamic sampling, in num_prompts_per_step; rounded down."""
    seq_logprob_error_threshold: float | None = Field(None, gt=0)
    reward_scaling: RewardScalingConfig = RewardScalingConfig()
    reward_shaping: RewardShapingConfig = RewardShapingConfig()
    adv_estimator: AdvantageEstimatorConfig = AdvantageEstimatorConfig()
    penalize_invalid_tool_call: bool | None = None
    """Overwrite the advantages of a turn with an unreadable tool call; None: if invalid_tool_call_advantage is set."""
    invalid_tool_call_advantage: float | None = None
    invalid_tool_call_strategy: Literal["", "mask"] = ""
    """mask: such a turn's tokens are left out of the loss, and the advantage does not matter (SWE 1)."""
    penalize_malformed_thinking: bool | None = None
    """The same for a turn with malformed thinking tags; None: if malformed_thinking_advantage is set."""
    malformed_thinking_advantage: float | None = None
    low_effort: LowEffortConfig = LowEffortConfig()
    epsilon_filtering: EpsilonFilteringConfig = EpsilonFilteringConfig()
    async_grpo: AsyncGrpoConfig = AsyncGrpoConfig()
    val_period: int = -1
    """Validate every so many steps; -1 never."""
    val_start_at: int = -1
    """First step that val_period may validate after; -1: any."""
    val_at_start: bool = False
    val_at_end: bool = False
    max_val_samples: PositiveInt | None = None
    num_val_generations_per_prompt: PositiveInt | None = None
    """Rollouts of each prompt in a validation; None: num_generations_per_prompt."""
    seed: int = 42

    @model_validator(mode="before")
    @classmethod
    def _aliases(cls, values: Any) -> Any:
        values = move_alias(values, "num_iterations", "max_num_steps", PositiveInt)
        for key in ("normalize_rewards", "use_leave_one_out_baseline"):
            values = move_alias(values, f"adv_estimator.{key}", key, bool)
        return values

    def _broken_rules(self) -> Iterator[Rule]:
        low, high = self.advantage_clip_low, self.advantage_clip_high
        if low is not None and high is not None and low > high:
            what = f"grpo.advantage_clip_low={low} is above grpo.advantage_clip_high={high}"
            yield Rule("advantage_clip_low", what, "advantage_clip_low=null advantage_clip_high=null")
        scaling = self.reward_scaling
        scaled = scaling.enabled and (scaling.target_min, scaling.target_max) != (0, 1)
        if self.epsilon_filtering.enabled and scaled:
            what = "grpo.epsilon_filtering looks for groups near 0 or 1, and grpo.reward_scaling maps rewards elsewhere"
            fix = "reward_scaling.target_min=0 reward_scaling.target_max=1"
            yield Rule("epsilon_filtering.enabled", what, fix)
        if self.val_start_at > 0 and self.val_period <= 0:
            what = f"grpo.val_start_at={self.val_start_at} needs validations, and grpo.val_period={self.val_period}"
            yield Rule("val_start_at", what, "val_start_at=-1")
        centres = self.adv_estimator.name != "reinforce_plus_plus" or self.adv_estimator.minus_baseline
        if self.num_generations_per_prompt == 1 and centres:
            what = "grpo.num_generations_per_prompt=1: every advantage would be 0, with no other answer to compare with"
            yield Rule("num_generations_per_prompt", what, "num_generations_per_prompt=8")
        for fault in ("invalid_tool_call", "malformed_thinking"):
            masked = fault == "invalid_tool_call" and self.invalid_tool_call_strategy == "mask"
            if getattr(self, f"penalize_{fault}") and getattr(self, f"{fault}_advantage") is None and not masked:
                what = f"grpo.penalize_{fault} needs grpo.{fault}_advantage, the advantage that such a turn gets"
                yield Rule(f"penalize_{fault}", what, f"{fault}_advantage=-5")
        yield from self._broken_component_rules()

    def _broken_component_rules(self) -> Iterator[Rule]:
        estimator, shaping = self.adv_estimator, self.reward_shaping
        names = estimator.components
        if estimator.name == "gdpo" and len(names) < 2:
            key = "adv_estimator.components" if names else "adv_estimator.name"
            what = f"grpo.adv_estimator.name=gdpo needs at least two reward components, not {len(names)}"
            yield Rule(key, what, "adv_estimator.name=grpo adv_estimator.components=[]")
        if estimator.name == "gdpo" and shaping.enabled and shaping.stop_properly_penalty_coef is None:
            what = "the overlong penalty of grpo.reward_shaping belongs to no component of grpo.adv_estimator.name=gdpo"
            yield Rule("reward_shaping.enabled", what, "reward_shaping.enabled=false")
        if estimator.reward_weights is None:
            return
        if len(estimator.reward_weights) != len(names):
            what = f"grpo.adv_estimator.reward_weights must have one entry for each of the {len(names)} components"
            yield Rule("adv_estimator.reward_weights", what, "adv_estimator.reward_weights=null")
        if list(names) != sorted(names):
            what = "grpo.adv_estimator.reward_weights are in alphabetical order of the components, and these are not"
            yield Rule("adv_estimator.components", what, f"adv_estimator.components=[{','.join(sorted(names))}]")

    @property
    def prompts_per_generation_batch(self) -> int:
        """Prompts that are sampled together; more than a step trains on where dynamic sampling is to choose."""
        return int(self.num_prompts_per_step * self.batch_multiplier)


class RewardPenaltyTokenIdsConfig(Section):
    """`reward_penalties.token_ids`."""

    unwanted: Annotated[tuple[int, ...], OnlyIf("penalize_unwanted_tokens")] = ()
    think_open: Annotated[int | None, OnlyIf("penalize_malformed_think_tag")] = None
    think_close: Annotated[int | None, OnlyIf("penalize_malformed_think_tag")] = None
    """Tokens of the thinking tags; None: the tokenizer's, where it writes each tag as one."""


class RewardPenaltiesConfig(Section):
    """`reward_penalties.*`: rollouts that lose their reward for how they were written (engine/grpo/rewards.py)."""

    penalize_duplicated_reasoning: bool = False
    penalize_empty_final_answer: bool = False
    penalize_unwanted_tokens: Annotated[bool, OnlyIf("token_ids.unwanted")] = False
    penalize_malformed_think_tag: bool = False
    token_ids: RewardPenaltyTokenIdsConfig = RewardPenaltyTokenIdsConfig()

    @property
    def any_enabled(self) -> bool:
        """Whether rollouts are looked at at all."""
        return any(getattr(self, name) for name in type(self).model_fields if name.startswith("penalize_"))


_HAS_RATIO, _OFF_POLICY = OnlyIf("disable_ppo_ratio", False), OnlyIf("force_on_policy_ratio", False)
_CORRECTS = OnlyIf("use_importance_sampling_correction")
_NOT_GSPO = OnlyIf("sequence_level_importance_ratios", False)
_TRUNCATED = OnlyIf("truncated_importance_sampling_type", *_USUAL_BOUNDS)
_OF_TOKENS = OnlyIf("truncated_importance_sampling_type", None, "tis", "icepop")
TruncationType = Literal["tis", "icepop", "seq-mask-tis"]


class LossFnConfig(Section):
    """`loss_fn.*`. Formulas: `nemotron_steps/engine/losses/policy_gradient.py`."""

    reference_policy_kl_penalty: float = Field(0.0, ge=0)
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    kl_input_clamp_value: PositiveFloat | None = 20.0
    kl_output_clamp_value: PositiveFloat | None = 10.0
    use_on_policy_kl_approximation: Annotated[bool, OnlyIf("use_kl_in_reward", False)] = False
    use_kl_in_reward: Annotated[bool, OnlyIf("reference_policy_kl_penalty")] = False
    ratio_clip_min: float = Field(0.2, ge=0)
    ratio_clip_max: float = Field(0.28, ge=0)
    ratio_clip_c: Annotated[float | None, _HAS_RATIO, OnlyIf("use_cispo", False), _OFF_POLICY] = Field(None, gt=1)
    force_on_policy_ratio: bool = False
    disable_ppo_ratio: Annotated[bool, _OFF_POLICY, _NOT_GSPO] = False
    use_cispo: Annotated[bool, _HAS_RATIO, _OFF_POLICY, _NOT_GSPO, OnlyIf("token_level_loss")] = False
    """A token-level loss on the clipped ratio lp - lp_prev."""
    sequence_level_importance_ratios: Annotated[bool, OnlyIf("token_level_loss", False), _OF_TOKENS] = False
    """GSPO."""
    use_importance_sampling_correction: bool = False
    truncated_importance_sampling_type: Annotated[TruncationType | None, _CORRECTS] = None
    truncated_importance_sampling_ratio: Annotated[float | None, _TRUNCATED] = Field(None, gt=0)
    truncated_importance_sampling_ratio_min: Annotated[float | None, _TRUNCATED] = Field(None, ge=0)
    token_level_loss: bool = True

    def _broken_rules(self) -> Iterator[Rule]:
        kind, key = self.truncated_importance_sampling_type, "truncated_importance_sampling"
        upper, lower = self.truncated_importance_sampling_ratio, self.truncated_importance_sampling_ratio_min
        if kind is None:
            return
        for name, bound, usual in zip(("ratio_min", "ratio"), (lower, upper), _USUAL_BOUNDS[kind], strict=True):
            if usual is not None and bound is None:
                what = f"loss_fn.{key}_type={kind} needs a bound, {key}_{name}"
                yield Rule(f"{key}_type", what, f"{key}_{name}={usual:g}")
        if upper is not None and lower is not None and lower > upper:
            what = f"loss_fn.{key}_ratio_min={lower} is above {key}_ratio={upper}"
            yield Rule(f"{key}_ratio_min", what, f"{key}_ratio_min=null")

    @property
    def reads_prev_logprobs(self) -> bool:
        """Whether the loss, or the reward, is told of logprobs under the policy that starts a step."""
        return not self.force_on_policy_ratio or self.use_kl_in_reward
