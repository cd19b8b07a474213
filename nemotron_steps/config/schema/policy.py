"""`policy.*`: the trained model, how it is parallelised and optimised, and how it generates."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from nemotron_steps.config.names import nearest
from nemotron_steps.config.schema import peft_rules, policy_rules
from nemotron_steps.config.schema.base import OPERATIONAL, Section, refuse
from nemotron_steps.config.schema.peft import AdapterConfig, LoraConfig, PeftConfig

ReasoningParserName = Literal["qwen3", "deepseek_r1", "nano_v3", "none"]
"""How reasoning is told from the answer: nemotron_steps/engine/rollouts/conversation.py."""
TorchSchedulerName = Literal[
    "torch.optim.lr_scheduler.LinearLR",
    "torch.optim.lr_scheduler.ConstantLR",
    "torch.optim.lr_scheduler.CosineAnnealingLR",
]
ToolParserName = Literal["hermes", "qwen3_coder", "llama3_json", "nemotron_json", "none"]
"""How tool calls are written: nemotron_steps/engine/rollouts/tool_calls.py."""


def _none_is_empty(value: Any) -> Any:
    return () if value is None else value


class OptimizerConfig(Section):
    """Adam, as Megatron names its settings."""

    lr: PositiveFloat = 3e-6
    min_lr: float = Field(0.0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_eps: PositiveFloat = 1e-8
    use_distributed_optimizer: Annotated[bool, OPERATIONAL] = False
    use_precision_aware_optimizer: bool = False
    """Megatron policy: masters of bfloat16 weights take 2 bytes instead of 4, to the same effect, and moments may be of
    the types below."""
    exp_avg_dtype: Literal["float32", "bfloat16"] = "float32"
    exp_avg_sq_dtype: Literal["float32", "bfloat16"] = "float32"
    optimizer_cpu_offload: Annotated[bool, OPERATIONAL] = False
    """Megatron policy: a share of Adam's moments stays in host memory; the GPU fetches it for the update."""
    optimizer_offload_fraction: Annotated[float, OPERATIONAL] = Field(1.0, ge=0, le=1)
    """That share; without optimizer_cpu_offload nothing is offloaded."""

    @model_validator(mode="after")
    def _narrow_moments_still_move(self) -> OptimizerConfig:
        refuse(policy_rules.optimizer_rules(self))
        return self


class SchedulerConfig(Section):
    """Learning rate over optimizer steps: linear warm-up, then a decay style."""

    lr_warmup_iters: int = Field(0, ge=0)
    lr_warmup_init: float = Field(0.0, ge=0)
    """Rate that the warm-up starts from; 0: the first step already moves, by lr / lr_warmup_iters."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_decay_iters: int | None = Field(None, ge=1)
    """Optimizer steps, warm-up included, after which a decaying rate stays at min_lr; None: those of the run."""

    @model_validator(mode="after")
    def _decay_has_a_length(self) -> SchedulerConfig:
        refuse(policy_rules.scheduler_rules(self))
        return self


class MegatronConfig(Section):
    """`policy.megatron_cfg`: megatron-core's layout and optimizer."""

    enabled: bool = True
    tensor_model_parallel_size: Annotated[PositiveInt, OPERATIONAL] = 1
    pipeline_model_parallel_size: Annotated[PositiveInt, OPERATIONAL] = 1
    context_parallel_size: Annotated[PositiveInt, OPERATIONAL] = 1
    expert_model_parallel_size: Annotated[PositiveInt, OPERATIONAL] = 1
    sequence_parallel: Annotated[bool, OPERATIONAL] = False
    activation_checkpointing: Annotated[bool, OPERATIONAL] = False
    freeze_moe_router: bool = False
    moe_router_bias_update_rate: float = Field(0.0, ge=0)
    mtp_num_layers: Annotated[int, BeforeValidator(lambda value: 0 if value is None else value)] = Field(0, ge=0)
    """Depths of multi-token prediction that are trained, as many as the checkpoint has blocks; 0, or null: none. See
    docs/decisions/multi-token-prediction.md."""
    mtp_loss_scaling_factor: float = Field(0.1, ge=0)
    """What the mean of the depths' losses counts beside the policy's own loss."""
    mtp_use_repeated_layer: bool = False
    """The checkpoint's one block is gone through mtp_num_layers times."""
    mtp_detach_heads: bool = False
    """Multi-token prediction trains its blocks alone: the model has no gradient from it, and each is clipped by
    max_grad_norm for itself."""
    peft: PeftConfig = PeftConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()


class AdamWKwargs(Section):
    """Arguments of torch.optim.AdamW."""

    lr: PositiveFloat = 3e-6
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8


class TorchOptimizerConfig(Section):
    """`policy.optimizer`: the dtensor policy's, named as torch names it."""

    name: Literal["torch.optim.AdamW"] = "torch.optim.AdamW"
    kwargs: AdamWKwargs = AdamWKwargs()


class TorchSchedulerConfig(Section):
    """An entry of `policy.scheduler`: a torch scheduler, or, last, the steps at which the next one takes over."""

    name: TorchSchedulerName | None = None
    kwargs: dict[str, float] = Field(default_factory=dict)
    milestones: tuple[PositiveInt, ...] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TorchSchedulerConfig:
        refuse(policy_rules.torch_scheduler_rules(self))
        return self


class DTensorConfig(Section):
    """`policy.dtensor_cfg`: a Hugging Face model under FSDP2 and tensor parallelism."""

    enabled: bool = False
    tensor_parallel_size: Annotated[PositiveInt, OPERATIONAL] = 1
    activation_checkpointing: Annotated[bool, OPERATIONAL] = False
    cpu_offload: Annotated[bool, OPERATIONAL] = False
    lora_cfg: LoraConfig = LoraConfig()


class SequencePackingConfig(Section):
    """Several sequences in one row, no padding between them. For the megatron policy."""

    enabled: bool = False
    train_mb_tokens: PositiveInt | None = None
    """None: of train_micro_batch_size sequences (pairs, for DPO) of max_total_sequence_length."""
    logprob_mb_tokens: PositiveInt | None = None
    """None: of logprob_batch_size such sequences."""
    algorithm: Literal["modified_first_fit_decreasing", "first_fit_decreasing", "concatenative"] = (
        "modified_first_fit_decreasing"
    )
    """Which sequences share a row; concatenative: neighbours, in the order they have."""
    sequence_length_round: PositiveInt = 64
    """A row's tokens are padded to a multiple of this, at its end."""


class DynamicBatchingConfig(Section):
    """Micro-batches cut by token budget instead of by sequence count, for either policy."""

    enabled: bool = False
    train_mb_tokens: PositiveInt | None = None
    """As for sequence_packing, and so is the next."""
    logprob_mb_tokens: PositiveInt | None = None
    sequence_length_round: PositiveInt = 64
    """Megatron: as for sequence_packing. Dtensor: sequences count as padded to a multiple of this."""


class VllmConfig(Section):
    """`policy.generation.vllm_cfg`."""

    tensor_parallel_size: Annotated[PositiveInt, OPERATIONAL] = 1
    """GPUs of one generator (processes on CPU)."""
    expert_parallel_size: Annotated[PositiveInt, OPERATIONAL] = 1
    """1, or tensor_parallel_size: a mixture's experts are then spread over those GPUs whole, not cut."""
    gpu_memory_utilization: Annotated[float, OPERATIONAL] = Field(0.8, gt=0, le=1)
    async_engine: Annotated[bool | None, OPERATIONAL] = None
    """vLLM's engine in a process of its own, which schedules while this one grades and trains. None: on CUDA, and not
    on CPU, where it starts much later and is no faster. Tensor-parallel workers have processes of their own anyway."""
    enforce_eager: Annotated[bool, OPERATIONAL] = False
    kv_cache_space_gib: Annotated[PositiveFloat, OPERATIONAL] = 1.0
    """CPU only: size of the KV cache."""
    max_num_seqs: Annotated[PositiveInt, OPERATIONAL] = 256
    seed_requests: bool | None = None
    """Sample every sequence from a random stream of its own, so that a resumed run samples what an unbroken one would.
    vLLM draws such streams one by one. None: on CPU, and not on CUDA, where that takes longer than the sampling."""
    expose_http_server: bool = False
    """Serve the policy's generator, of either backend, as an OpenAI-compatible endpoint on loopback for agents."""

    @model_validator(mode="after")
    def _experts_have_the_tensor_parallel_gpus(self) -> VllmConfig:
        refuse(policy_rules.vllm_rules(self))
        return self


class ColocatedConfig(Section):
    """Whether the generator shares the policy's devices."""

    enabled: bool = True
    generation_devices: PositiveInt | None = None
    """GPUs kept for generation when not colocated."""


class GenerationConfig(Section):
    """`policy.generation`: how rollouts are sampled."""

    backend: Literal["embedded", "vllm"] = "embedded"
    max_new_tokens: PositiveInt = 512
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Annotated[int, BeforeValidator(lambda value: 0 if value is None else value)] = Field(0, ge=0)
    """0, or null: the whole vocabulary."""
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(_none_is_empty)] = ()
    stop_strings: Annotated[tuple[str, ...], BeforeValidator(_none_is_empty)] = ()
    max_sequences: Annotated[PositiveInt, OPERATIONAL] = 256
    """Sequences decoded at once by the embedded generator."""
    reasoning_parser: ReasoningParserName = "qwen3"
    """How the model marks reasoning: qwen3 (think tags), deepseek_r1 and nano_v3 (the prompt opens the thinking), none.
    Which of these the prompt does is read from the chat template."""
    tool_parser: ToolParserName = "hermes"
    """How the model writes tool calls, in rollouts and behind the endpoint."""
    vllm_cfg: VllmConfig = VllmConfig()
    vllm_kwargs: Annotated[dict[str, Any], OPERATIONAL] = Field(default_factory=dict)
    """Further arguments of vLLM's EngineArgs, by their own names."""
    colocated: Annotated[ColocatedConfig, OPERATIONAL] = ColocatedConfig()

    @property
    def devices_per_generator(self) -> int:
        """Devices that one generator spreads over."""
        return self.vllm_cfg.tensor_parallel_size if self.backend == "vllm" else 1

    @field_validator("reasoning_parser", "tool_parser", mode="before")
    @classmethod
    def _known_parser(cls, value: Any, info: ValidationInfo) -> Any:
        known = get_args(ReasoningParserName if info.field_name == "reasoning_parser" else ToolParserName)
        if value not in known:
            close = nearest(str(value), known)
            guess = f"; did you mean {' or '.join(close)}?" if close else ""
            raise ValueError(f"no parser is named {value!r}{guess} (known: {', '.join(known)})")
        return value


class TokenizerConfig(Section):
    """`policy.tokenizer`: how chats are rendered. The tokenizer itself is the checkpoint's."""

    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template: enable_thinking, truncate_history_thinking, …"""


class PolicyConfig(Section):
    """`policy.*`."""

    checkpoint: str | None = None
    """Path of the starting checkpoint; the step's `policy` port is written here."""
    model_type: Annotated[str | None, OPERATIONAL] = None
    """Family of models (config.json's model_type) that the config was made for; another is refused. None: any that the
    layout fits."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    train_global_batch_size: PositiveInt = 64
    train_micro_batch_size: Annotated[PositiveInt, OPERATIONAL] = 4
    logprob_batch_size: Annotated[PositiveInt, OPERATIONAL] = 4
    logprob_chunk_size: Annotated[PositiveInt, OPERATIONAL] = 1024
    """Tokens whose vocabulary logits exist at once."""
    max_total_sequence_length: PositiveInt = 4096
    make_sequence_length_divisible_by: Annotated[PositiveInt, OPERATIONAL] = 1
    """The tokens of a micro-batch are padded to a multiple of this: of a packed row, or of each padded sequence."""
    max_grad_norm: PositiveFloat = 1.0
    optimizer: TorchOptimizerConfig | None = None
    """Of the dtensor policy; None: torch.optim.AdamW with its defaults above. The megatron policy has its own."""
    scheduler: tuple[TorchSchedulerConfig, ...] | None = None
    """Of the dtensor policy, as torch's SequentialLR takes them; None: a constant rate."""
    megatron_cfg: MegatronConfig = MegatronConfig()
    dtensor_cfg: DTensorConfig = DTensorConfig()
    sequence_packing: Annotated[SequencePackingConfig, OPERATIONAL] = SequencePackingConfig()
    dynamic_batching: Annotated[DynamicBatchingConfig, OPERATIONAL] = DynamicBatchingConfig()

    @property
    def adapters(self) -> AdapterConfig:
        """Of the policy that is trained."""
        return self.dtensor_cfg.lora_cfg if self.dtensor_cfg.enabled else self.megatron_cfg.peft

    @model_validator(mode="after")
    def _every_key_does_something(self) -> PolicyConfig:
        refuse([*policy_rules.policy_rules(self), *peft_rules.adapter_rules(self)])
        return self


class RouterReplayConfig(Section):
    """`policy.router_replay`: experts of generation in training (docs/decisions/router-replay.md)."""

    enabled: bool = False
    """A mixture's routers take for every token the experts that the generator chose, and weigh them themselves. For the
    megatron policy and the embedded generator."""


class GeneratingPolicyConfig(PolicyConfig):
    """`policy.*` of a step that samples from the policy it trains."""

    max_total_sequence_length_end: PositiveInt | None = None
    """Raised linearly to this over the run when set (RLVR: 49,152 to 65,536)."""
    generation: GenerationConfig = GenerationConfig()
    router_replay: RouterReplayConfig = RouterReplayConfig()

    @model_validator(mode="after")
    def _experts_can_be_replayed(self) -> GeneratingPolicyConfig:
        refuse([*policy_rules.router_replay_rules(self), *peft_rules.generating_adapter_rules(self)])
        return self
