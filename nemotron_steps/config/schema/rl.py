"""Config of the GRPO steps (rlvr, rlhf, swe), under NeMo-RL's key names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from nemotron_steps.config.schema import other_names, rl_rules
from nemotron_steps.config.schema import reward as own_reward
from nemotron_steps.config.schema.base import OPERATIONAL, Section, refuse
from nemotron_steps.config.schema.policy import GeneratingPolicyConfig


class RewardScalingConfig(Section):
    """Clamp to [source_min, source_max], then map linearly onto [target_min, target_max]."""

    enabled: bool = False
    source_min: float = 0.0
    source_max: float = 1.0
    target_min: float = 0.0
    target_max: float = 1.0

    @model_validator(mode="after")
    def _has_a_meaning(self) -> RewardScalingConfig:
        refuse(rl_rules.reward_scaling_rules(self))
        return self


class RewardShapingConfig(Section):
    """DAPO's overlong penalty, and the factor on truncated samples' rewards."""

    enabled: bool = False
    overlong_buffer_length: PositiveInt = 128
    overlong_buffer_penalty: float = Field(1.0, ge=0)
    max_response_length: PositiveInt | None = None
    """L_max; default: policy.generation.max_new_tokens."""
    stop_properly_penalty_coef: float | None = Field(None, ge=0, le=1)

    @model_validator(mode="after")
    def _has_a_meaning(self) -> RewardShapingConfig:
        refuse(rl_rules.reward_shaping_rules(self))
        return self


class AdvantageEstimatorConfig(Section):
    """Which estimator turns rewards into advantages."""

    name: Literal["grpo", "reinforce_plus_plus", "gdpo", "opd"] = "grpo"
    """opd: the step rl/nemo_rl/opd alone, which has teachers."""
    minus_baseline: bool = True
    """reinforce_plus_plus: subtract the group mean before normalising over the batch."""
    components: tuple[str, ...] = ()
    """gdpo: the reward components, each scaled and shaped like the reward, normalised separately and summed."""
    reward_weights: tuple[float, ...] | None = None
    """gdpo: weight of each component in the sum, in the alphabetical order of their names; None: 1."""
    normalize_rewards: bool | None = None
    """grpo.normalize_rewards by its other name, which goes before it."""
    use_leave_one_out_baseline: bool | None = None
    """grpo.use_leave_one_out_baseline by its other name, which goes before it."""


class LowEffortConfig(Section):
    """NeMo-RL's `effort_levels`: the reward of prompts that ask for low effort depends on the answer's length too."""

    string: str = ""
    """A prompt asks for low effort if its last user message contains this. data_prep/rl_prep can put it into a share of
    the prompts. Empty: none does."""
    weight: float = Field(0.0, ge=0)
    penalty: float = 1.0
    upper_bound_tokens: PositiveInt = 64000

    @model_validator(mode="after")
    def _has_a_meaning(self) -> LowEffortConfig:
        refuse(rl_rules.low_effort_rules(self))
        return self

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
    """A group older than this is finished with the members it has, or resampled."""


class GrpoConfig(Section):
    """`grpo.*`."""

    num_prompts_per_step: PositiveInt = 32
    num_generations_per_prompt: PositiveInt = 8
    max_num_steps: PositiveInt = 1_000_000
    num_iterations: PositiveInt | None = None
    """max_num_steps by its other name, which goes before it."""
    max_num_epochs: PositiveInt = 1
    learning_rate: PositiveFloat | None = None
    """policy.megatron_cfg.optimizer.lr (policy.optimizer.kwargs.lr under dtensor) by its other name, which goes before
    it."""
    max_rollout_turns: PositiveInt = 1
    normalize_rewards: bool = True
    use_leave_one_out_baseline: bool = True
    advantage_clip_low: float | None = None
    advantage_clip_high: float | None = None
    overlong_filtering: bool = False
    use_dynamic_sampling: bool = False
    dynamic_sampling_max_gen_batches: PositiveInt = 10
    batch_multiplier: float = Field(1.0, ge=1)
    """Prompts of one generation batch of dynamic sampling, in num_prompts_per_step; rounded down."""
    seq_logprob_error_threshold: float | None = Field(None, gt=0)
    reward_scaling: RewardScalingConfig = RewardScalingConfig()
    reward_shaping: RewardShapingConfig = RewardShapingConfig()
    adv_estimator: AdvantageEstimatorConfig = AdvantageEstimatorConfig()
    penalize_invalid_tool_call: bool | None = None
    """Overwrite the advantages of a turn with a tool call that cannot be read; None: if invalid_tool_call_advantage is
    set."""
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
    def _other_names(cls, values: Any) -> Any:
        values = other_names.move(values, "num_iterations", "max_num_steps", PositiveInt)
        for key in ("normalize_rewards", "use_leave_one_out_baseline"):
            values = other_names.move(values, f"adv_estimator.{key}", key, bool)
        return values

    @model_validator(mode="after")
    def _has_a_meaning(self) -> GrpoConfig:
        refuse(rl_rules.grpo_rules(self))
        return self

    @property
    def prompts_per_generation_batch(self) -> int:
        """Prompts that are sampled together; more than a step trains on where dynamic sampling is to choose."""
        return int(self.num_prompts_per_step * self.batch_multiplier)


class RewardPenaltyTokenIdsConfig(Section):
    """`reward_penalties.token_ids`."""

    unwanted: tuple[int, ...] = ()
    think_open: int | None = None
    think_close: int | None = None
    """Tokens of the thinking tags; None: the tokenizer's, where it writes each tag as one."""


class RewardPenaltiesConfig(Section):
    """`reward_penalties.*`: rollouts that lose their reward for how they were written. What each means:
    `nemotron_steps/engine/grpo/rewards.py`."""

    penalize_duplicated_reasoning: bool = False
    penalize_empty_final_answer: bool = False
    penalize_unwanted_tokens: bool = False
    penalize_malformed_think_tag: bool = False
    token_ids: RewardPenaltyTokenIdsConfig = RewardPenaltyTokenIdsConfig()

    @model_validator(mode="after")
    def _has_a_meaning(self) -> RewardPenaltiesConfig:
        refuse(rl_rules.reward_penalty_rules(self))
        return self

    @property
    def any_enabled(self) -> bool:
        """Whether rollouts are looked at at all."""
        return any(getattr(self, name) for name in type(self).model_fields if name.startswith("penalize_"))


class LossFnConfig(Section):
    """`loss_fn.*`. Formulas: `nemotron_steps/engine/losses/policy_gradient.py`."""

    reference_policy_kl_penalty: float = Field(0.0, ge=0)
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    kl_input_clamp_value: PositiveFloat | None = 20.0
    kl_output_clamp_value: PositiveFloat | None = 10.0
    use_on_policy_kl_approximation: bool = False
    use_kl_in_reward: bool = False
    ratio_clip_min: float = Field(0.2, ge=0)
    ratio_clip_max: float = Field(0.28, ge=0)
    ratio_clip_c: float | None = Field(None, gt=1)
    force_on_policy_ratio: bool = False
    disable_ppo_ratio: bool = False
    use_cispo: bool = False
    sequence_level_importance_ratios: bool = False
    use_importance_sampling_correction: bool = False
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    truncated_importance_sampling_ratio: float | None = Field(None, gt=0)
    truncated_importance_sampling_ratio_min: float | None = Field(None, ge=0)
    token_level_loss: bool = True

    @model_validator(mode="after")
    def _has_a_meaning(self) -> LossFnConfig:
        refuse(rl_rules.loss_rules(self))
        return self

    @property
    def reads_prev_logprobs(self) -> bool:
        """Whether the loss, or the reward, is told of logprobs under the policy that starts a step."""
        return not self.force_on_policy_ratio or self.use_kl_in_reward


class VllmModelConfig(Section):
    """A judge model: local weights run in this process or by vLLM, or an OpenAI-compatible server."""

    model: str | None = None
    """Hugging Face folder or model name; backend http: what its server calls it, None: the first that it lists."""
    backend: Literal["embedded", "vllm", "http"] = "embedded"
    base_url: str | tuple[str, ...] | None = None
    """backend http: the server's URL, up to `/v1`, or a list of servers of one model: each question goes to the least
    loaded, and one that gives no answer is routed around."""
    api_key_env: Annotated[str | None, OPERATIONAL] = None
    """backend http: environment variable that holds the key."""
    replicas: Annotated[PositiveInt | None, OPERATIONAL] = None
    """Copies of a local judge, under cluster.backend=ray; each question goes to one. None: as many as fill the GPUs of
    env.nemo_gym.num_gpu_nodes, which the judges share equally; 1 where judges have no nodes of their own."""
    tensor_parallel_size: Annotated[PositiveInt, OPERATIONAL] = 1
    """backend vllm: GPUs of one copy."""
    gpu_memory_utilization: Annotated[float, OPERATIONAL] = Field(0.8, gt=0, le=1)
    """backend vllm on CUDA: share of a GPU's memory; less where a judge shares it with a generator."""
    max_sequences: Annotated[PositiveInt, OPERATIONAL] = 256
    max_total_sequence_length: PositiveInt = 32_768
    readiness_timeout_s: Annotated[PositiveFloat, OPERATIONAL] = 600.0
    max_retries: Annotated[int, OPERATIONAL] = Field(3, ge=0)

    @model_validator(mode="after")
    def _http_needs_url(self) -> VllmModelConfig:
        refuse(rl_rules.judge_rules(self))
        return self


class ResponsesApiModelsConfig(Section):
    """The judge's model server, under NeMo-Gym's name."""

    vllm_model: VllmModelConfig = VllmModelConfig()


class JudgeModelConfig(Section):
    """One judge."""

    responses_api_models: ResponsesApiModelsConfig = ResponsesApiModelsConfig()


JUDGE_ROLES = ("genrm_model", "judge_model", "safety_model")


class NemoGymConfig(Section):
    """`env.nemo_gym`: judges, and options of each environment by its name."""

    genrm_model: JudgeModelConfig = JudgeModelConfig()
    judge_model: JudgeModelConfig | None = None
    """Equivalence, rubric and math judge; None: environments that need one refuse to start."""
    safety_model: JudgeModelConfig | None = None
    invalid_tool_call_patterns: tuple[str, ...] | None = None
    """What an answer must not have left in its text once its tool calls are taken out; None: what
    policy.generation.tool_parser writes calls with."""
    thinking_tags: tuple[str, str] = ("<think>", "</think>")
    """Opening and closing tag that malformed thinking is told by."""
    environments: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of an environment; each environment refuses options it does not know."""
    num_gpu_nodes: Annotated[int, OPERATIONAL] = Field(0, ge=0)
    """Nodes of the cluster kept for judges; the policy and its generators get the others."""

    def judge(self, role: str) -> VllmModelConfig | None:
        """The model that plays one of JUDGE_ROLES; None when not configured."""
        chosen: JudgeModelConfig | None = getattr(self, role)
        return chosen.responses_api_models.vllm_model if chosen is not None else None


class EnvConfig(Section):
    """`env.*`."""

    should_use_nemo_gym: bool = True
    """True: each row's agent_ref names its environment. False: every row goes to `environment`."""
    environment: str | None = None
    nemo_gym: NemoGymConfig = NemoGymConfig()

    @model_validator(mode="after")
    def _one_route(self) -> EnvConfig:
        refuse(rl_rules.env_rules(self))
        return self

    @property
    def only_environment(self) -> str | None:
        """The one environment that every row goes to; None where each row names its own."""
        return None if self.should_use_nemo_gym else self.environment


class DataFileConfig(Section):
    """One JSON Lines file of prompts."""

    data_path: str | None = None


class DataConfig(Section):
    """`data.*`."""

    train: DataFileConfig = DataFileConfig()
    validation: DataFileConfig = DataFileConfig()
    heldout: DataFileConfig = DataFileConfig()
    """Prompts neither trained on nor used to choose anything; the final figures come from them."""
    shuffle: bool = True
    max_input_seq_length: PositiveInt | None = None
    """Prompts of more tokens, the chat template's not counted, are left out; None: a prompt that leaves no room for an
    answer is refused."""


class ClusterConfig(Section):
    """`cluster.*`: where the workers run."""

    backend: Literal["process", "ray"] = "process"
    """process: everything in this process. ray: actors for policy workers and, in GRPO, generators, environments and
    judges."""
    num_nodes: PositiveInt = 1
    gpus_per_node: int = Field(0, ge=0)
    """0: CPU workers."""
    gpu_memory_gib: PositiveFloat = 80.0
    """Of one GPU, for what a plan predicts and refuses: 80 for an H100, 141 for an H200."""
    ray_address: str | None = None
    """An existing Ray cluster; None: the one RAY_ADDRESS names, as in a job that an executor started, else one that is
    started on this machine."""
    policy_workers: PositiveInt | None = None
    """Policy ranks on CPU (gloo); on GPUs it follows from the devices."""


class CheckpointingConfig(Section):
    """`checkpointing.*`: training checkpoints inside the run."""

    enabled: bool = True
    save_period: PositiveInt = 10
    keep_top_k: PositiveInt | None = 3
    metric_name: str | None = None
    """Metric by which the keep_top_k best checkpoints are kept, besides the newest; None: the keep_top_k newest."""
    higher_is_better: bool = True
    checkpoint_must_save_by: str | None = None
    """Wall time (DD:HH:MM:SS or HH:MM) since the run began by which a checkpoint is committed and the run stops, to be
    resumed: it saves when another step and its save might not be over in time."""
    save_async: bool = False

    @model_validator(mode="after")
    def _has_a_meaning(self) -> CheckpointingConfig:
        refuse(rl_rules.checkpointing_rules(self))
        return self


class HeldoutConfig(Section):
    """`heldout.*`: grading before and after training on prompts that training never sees."""

    environment: str | None = None
    """Grades every held-out row; None: each row's own environment. A rule here checks what a judge claims."""
    max_prompts: PositiveInt | None = None
    samples_per_prompt: PositiveInt = 4
    temperature: float = Field(1.0, ge=0)


class SignalsConfig(Section):
    """`signals.*`."""

    stop_on: tuple[str, ...] = ()
    """Signals that end the run, once the step that raised them is saved. Resumed, it goes on."""

    @model_validator(mode="after")
    def _has_a_meaning(self) -> SignalsConfig:
        refuse(rl_rules.signals_rules(self))
        return self


class RlConfig(Section):
    """The whole config of a GRPO step."""

    reward: own_reward.Reward = None
    """Functions of the user's own that grade every row: `FILE.py:NAME`, or a list of {function, weight}. Stands for
    `env.environment=reward_function` with its settings, and is null afterwards."""
    grpo: GrpoConfig = GrpoConfig()
    loss_fn: LossFnConfig = LossFnConfig()
    reward_penalties: RewardPenaltiesConfig = RewardPenaltiesConfig()
    policy: GeneratingPolicyConfig = GeneratingPolicyConfig()
    env: EnvConfig = EnvConfig()
    data: DataConfig = DataConfig()
    heldout: HeldoutConfig = HeldoutConfig()
    cluster: Annotated[ClusterConfig, OPERATIONAL] = ClusterConfig()
    checkpointing: Annotated[CheckpointingConfig, OPERATIONAL] = CheckpointingConfig()
    signals: Annotated[SignalsConfig, OPERATIONAL] = SignalsConfig()

    @model_validator(mode="before")
    @classmethod
    def _other_names(cls, values: Any) -> Any:
        dtensor = other_names.get(values, "policy.dtensor_cfg.enabled") is True
        target = "policy.optimizer.kwargs.lr" if dtensor else "policy.megatron_cfg.optimizer.lr"
        return other_names.move(values, "grpo.learning_rate", target, PositiveFloat)

    @model_validator(mode="before")
    @classmethod
    def _own_reward(cls, values: Any) -> Any:
        return own_reward.move(values)

    @model_validator(mode="before")
    @classmethod
    def _one_update_a_step(cls, values: Any) -> Any:
        """Without a train_global_batch_size, all rollouts of a step make one update."""
        if not isinstance(values, dict):
            return values
        policy, grpo = values.get("policy", {}), values.get("grpo", {})
        if isinstance(policy, dict) and isinstance(grpo, dict) and policy.get("train_global_batch_size") is None:
            prompts = grpo.get("num_prompts_per_step", GrpoConfig.model_fields["num_prompts_per_step"].default)
            members = grpo.get(
                "num_generations_per_prompt", GrpoConfig.model_fields["num_generations_per_prompt"].default
            )
            if isinstance(prompts, int) and isinstance(members, int):
                return {**values, "policy": {**policy, "train_global_batch_size": prompts * members}}
        return values

    @model_validator(mode="after")
    def _has_a_meaning(self) -> RlConfig:
        refuse(rl_rules.run_rules(self))
        return self
