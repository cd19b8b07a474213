"""`policy.*`: the trained model, how it is parallelised and optimised, and how it generates."""

import shlex
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

from nemotron_steps.config.schema.base import OPERATIONAL, OnlyIf, Rule, Section, written

ReasoningParserName = Literal["qwen3", "deepseek_r1", "nano_v3", "none"]
"""How reasoning is told from the answer: nemotron_steps/engine/rollouts/conversation.py."""
TorchSchedulerName = Literal[
    "torch.optim.lr_scheduler.LinearLR",
    "torch.optim.lr_scheduler.ConstantLR",
    "torch.optim.lr_scheduler.CosineAnnealingLR",
]
ToolParserName = Literal["hermes", "qwen3_coder", "llama3_json", "nemotron_json", "none"]
"""How tool calls are written: nemotron_steps/engine/rollouts/conversation.py."""
PackingAlgorithm = Literal["modified_first_fit_decreasing", "first_fit_decreasing", "concatenative"]


MomentType = Literal["float32", "bfloat16"]
_SCHEDULER_KWARGS = {
    "LinearLR": ("start_factor", "end_factor", "total_iters"),
    "ConstantLR": ("factor", "total_iters"),
    "CosineAnnealingLR": ("T_max", "eta_min"),
}
OF_MEGATRON, OF_DTENSOR = OnlyIf("dtensor_cfg.enabled", False), OnlyIf("dtensor_cfg.enabled")
"""Marks of keys that one of the two policies reads."""


_OR_EMPTY = BeforeValidator(lambda value: () if value is None else value)
_OR_ZERO = BeforeValidator(lambda value: 0 if value is None else value)
Modules = Annotated[tuple[str, ...], _OR_EMPTY]
"""Names of linear layers, or patterns of their whole names (`*.layers.0.*.linear_qkv`)."""


_ON = OnlyIf("enabled")


class AdapterConfig(Section):
    """What both policies' adapters have: y = W x + alpha / dim · B A x, with W frozen and B starting at 0."""

    enabled: bool = False
    target_modules: Annotated[Modules, _ON] = ()
    """Linear layers that get an adapter; empty: all, of attention, of dense MLPs and, under the megatron policy, of
    Mamba-2."""
    exclude_modules: Annotated[Modules, _ON, OnlyIf("target_modules", ())] = ()
    """Without target_modules: linear layers that get none."""
    dim: Annotated[PositiveInt, _ON] = 32
    """The rank r of A [r, in] and B [out, r]."""
    alpha: Annotated[PositiveFloat, _ON] = 32.0
    dropout: Annotated[float, _ON, OnlyIf("activation_checkpointing", False)] = Field(0.0, ge=0, lt=1)
    """Share of the adapter's input ("pre") or output ("post") that a training pass leaves out. SFT and DPO. It would be
    another one for what is recomputed of a layer, and on each tensor-parallel rank."""
    dropout_position: Annotated[Literal["pre", "post"], _ON, OnlyIf("dropout")] = "pre"


class PeftConfig(AdapterConfig):
    """`policy.megatron_cfg.peft`. Module names are Megatron's: linear_qkv, linear_proj, linear_fc1, linear_fc2,
    in_proj and out_proj of Mamba-2."""

    dropout: Annotated[
        float, _ON, OnlyIf("activation_checkpointing", False), OnlyIf("tensor_model_parallel_size", 1)
    ] = Field(0.0, ge=0, lt=1)
    lora_A_init_method: Annotated[Literal["uniform", "xavier"], _ON] = "uniform"
    """uniform: Kaiming's, as PEFT starts A; xavier: Glorot's normal."""


class LoraConfig(AdapterConfig):
    """`policy.dtensor_cfg.lora_cfg`. Module names are the transformers model's: q_proj, gate_proj, …"""

    target_modules: Annotated[Modules, _ON, OnlyIf("match_all_linear", False)] = ()
    match_all_linear: Annotated[bool, _ON, OnlyIf("target_modules")] = True
    """Every linear layer of the decoder, but those of `exclude_modules`; false: those of `target_modules`."""
    dim: Annotated[PositiveInt, _ON] = 8
    lora_A_init: Annotated[Literal["uniform", "xavier"], _ON] = "uniform"
    """As lora_A_init_method of the megatron policy."""


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
    """Megatron policy: masters of bfloat16 weights take 2 bytes instead of 4; moments may be of the types below."""
    exp_avg_dtype: Annotated[MomentType, OnlyIf("use_precision_aware_optimizer")] = "float32"
    exp_avg_sq_dtype: Annotated[MomentType, OnlyIf("use_precision_aware_optimizer")] = "float32"
    optimizer_cpu_offload: Annotated[bool, OPERATIONAL] = False
    """Megatron policy: a share of Adam's moments stays in host memory; the GPU fetches it for the update."""
    optimizer_offload_fraction: Annotated[float, OPERATIONAL] = Field(1.0, ge=0, le=1)
    """That share; without optimizer_cpu_offload nothing is offloaded."""

    def _broken_rules(self) -> Iterator[Rule]:
        if self.lr * self.weight_decay > 0.01:
            what = f"lr x weight_decay = {self.lr * self.weight_decay:g} of every weight is lost in every step"
            yield Rule("weight_decay", what, "weight_decay=0.01")
        # Half of bfloat16's spacing is up to 2^-8 of a number: a smaller decay would be rounded away at every step.
        if self.exp_avg_sq_dtype != "float32" and self.adam_beta2 > 1 - 2**-8:
            what = f"exp_avg_sq_dtype=bfloat16 needs adam_beta2 <= 0.996, not {self.adam_beta2}: less decay rounds to 0"
            yield Rule("exp_avg_sq_dtype", what, "exp_avg_sq_dtype=float32")


class SchedulerConfig(Section):
    """Learning rate over optimizer steps: linear warm-up, then a decay style."""

    lr_warmup_iters: int = Field(0, ge=0)
    lr_warmup_init: Annotated[float, OnlyIf("lr_warmup_iters")] = Field(0.0, ge=0)
    """Rate that the warm-up starts from; 0: the first step already moves, by lr / lr_warmup_iters."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_decay_iters: Annotated[int | None, OnlyIf("lr_decay_style", "linear", "cosine")] = Field(None, ge=1)
    """Optimizer steps, warm-up included, after which a decaying rate stays at min_lr; None: those of the run."""

    def _broken_rules(self) -> Iterator[Rule]:
        decays, iters, warmup = self.lr_decay_style != "constant", self.lr_decay_iters, self.lr_warmup_iters
        if decays and iters is not None and iters <= warmup:
            what = f"lr_decay_iters={iters} ends before the warm-up of lr_warmup_iters={warmup} does"
            yield Rule("lr_decay_iters", what, f"lr_decay_iters={warmup + 1}")


_TRAINS_ALL = OnlyIf("peft.enabled", False)  # adapters leave the weights as they are


class MegatronConfig(Section):
    """`policy.megatron_cfg`: megatron-core's layout and optimizer."""

    enabled: Annotated[bool, OF_DTENSOR] = True
    tensor_model_parallel_size: Annotated[PositiveInt, OPERATIONAL, OF_MEGATRON] = 1
    pipeline_model_parallel_size: Annotated[PositiveInt, OPERATIONAL, OF_MEGATRON] = 1
    context_parallel_size: Annotated[PositiveInt, OPERATIONAL, OF_MEGATRON] = 1
    expert_model_parallel_size: Annotated[PositiveInt, OPERATIONAL, OF_MEGATRON] = 1
    sequence_parallel: Annotated[bool, OPERATIONAL, OF_MEGATRON] = False
    activation_checkpointing: Annotated[bool, OPERATIONAL, OF_MEGATRON] = False
    freeze_moe_router: Annotated[bool, OF_MEGATRON] = False
    moe_router_bias_update_rate: Annotated[float, OF_MEGATRON, _TRAINS_ALL] = Field(0.0, ge=0)
    mtp_num_layers: Annotated[NonNegativeInt, _OR_ZERO, OF_MEGATRON, _TRAINS_ALL, OnlyIf("mtp_loss_scaling_factor")] = 0
    """Depths of multi-token prediction that are trained, as many as the checkpoint has blocks; 0, or null: none."""
    mtp_loss_scaling_factor: float = Field(0.1, ge=0)
    """What the mean of the depths' losses counts beside the policy's own loss."""
    mtp_use_repeated_layer: bool = False
    """The checkpoint's one block is gone through mtp_num_layers times."""
    mtp_detach_heads: bool = False
    """Multi-token prediction trains its blocks alone: the model has no gradient from it, and each is clipped by
    max_grad_norm for itself."""
    peft: Annotated[PeftConfig, OF_MEGATRON] = PeftConfig()
    optimizer: Annotated[OptimizerConfig, OF_MEGATRON] = OptimizerConfig()
    scheduler: Annotated[SchedulerConfig, OF_MEGATRON] = SchedulerConfig()


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

    def _broken_rules(self) -> Iterator[Rule]:
        if (self.name is None) == (self.milestones is None) or (self.name is None and self.kwargs):
            what = "an entry of policy.scheduler is a scheduler (name, kwargs) or milestones"
            yield Rule("name", what, "name=torch.optim.lr_scheduler.ConstantLR milestones=null")
        known = _SCHEDULER_KWARGS.get((self.name or "").rpartition(".")[2], ())
        unknown = sorted(set(self.kwargs) - set(known))
        if self.name is not None and unknown:
            yield Rule("kwargs", f"{self.name} takes {', '.join(known)}, not {', '.join(unknown)}", "kwargs={}")


class DTensorConfig(Section):
    """`policy.dtensor_cfg`: a Hugging Face model under FSDP2 and tensor parallelism."""

    enabled: bool = False
    tensor_parallel_size: Annotated[PositiveInt, OPERATIONAL, OnlyIf("enabled"), OnlyIf("lora_cfg.enabled", False)] = 1
    """Adapters are not cut over ranks; those of the megatron policy are."""
    activation_checkpointing: Annotated[bool, OPERATIONAL, OnlyIf("enabled")] = False
    cpu_offload: Annotated[bool, OPERATIONAL, OnlyIf("enabled")] = False
    lora_cfg: Annotated[LoraConfig, OnlyIf("enabled")] = LoraConfig()


class SequencePackingConfig(Section):
    """Several sequences in one row, no padding between them."""

    enabled: Annotated[bool, OF_MEGATRON] = False
    train_mb_tokens: PositiveInt | None = None
    """None: of train_micro_batch_size sequences (pairs, for DPO) of max_total_sequence_length."""
    logprob_mb_tokens: PositiveInt | None = None
    """None: of logprob_batch_size such sequences."""
    algorithm: PackingAlgorithm = "modified_first_fit_decreasing"
    """Which sequences share a row; concatenative: neighbours, in the order they have."""
    sequence_length_round: PositiveInt = 64
    """A row's tokens are padded to a multiple of this, at its end."""


class DynamicBatchingConfig(Section):
    """Micro-batches cut by token budget instead of by sequence count, for either policy."""

    enabled: Annotated[bool, OnlyIf("sequence_packing.enabled", False)] = False
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

    def _broken_rules(self) -> Iterator[Rule]:
        experts, width = self.expert_parallel_size, self.tensor_parallel_size
        if experts not in (1, width):
            what = f"expert_parallel_size must be 1 or tensor_parallel_size ({width}), not {experts}"
            yield Rule("expert_parallel_size", what, f"expert_parallel_size={width}")


class ColocatedConfig(Section):
    """Whether the generator shares the policy's devices."""

    enabled: bool = True
    generation_devices: PositiveInt | None = None
    """GPUs kept for generation when not colocated."""


_NO_REFERENCE = OnlyIf("loss_fn.reference_policy_kl_penalty", 0)
"""Under top_p or top_k the policy's logprobs are of the tokens that it keeps, which are others than the reference's."""


class GenerationConfig(Section):
    """`policy.generation`: how rollouts are sampled."""

    backend: Literal["embedded", "vllm"] = "embedded"
    max_new_tokens: PositiveInt = 512
    temperature: float = Field(1.0, ge=0)
    top_p: Annotated[float, _NO_REFERENCE] = Field(1.0, gt=0, le=1)
    top_k: Annotated[int, _OR_ZERO, _NO_REFERENCE] = Field(0, ge=0)
    """0, or null: the whole vocabulary."""
    stop_token_ids: Annotated[tuple[int, ...], _OR_EMPTY] = ()
    stop_strings: Annotated[tuple[str, ...], _OR_EMPTY] = ()
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


RECORDING = "enable_return_routed_experts"
"""vLLM's argument for returning the experts that tokens went through."""
FIXED = frozenset(
    {"distributed_executor_backend", "worker_extension_cls", "logprobs_mode", "load_format", "weight_transfer_config",
     "enable_sleep_mode", "skip_tokenizer_init"}
)  # fmt: skip
"""vLLM's arguments that training and evaluations depend on."""


def own_keys(section: str, seed: str, model: str, generation: str = "generation") -> dict[str, str]:
    """vLLM's argument → the config key that is for it, of a step whose lengths and precision are in `section`."""
    cfg = f"{generation}.vllm_cfg"
    same = ("max_num_seqs", "gpu_memory_utilization", "tensor_parallel_size", "enforce_eager")
    return {
        "model": model,
        "dtype": f"{section}.precision",
        "seed": f"{seed}.seed",
        "max_model_len": f"{section}.max_total_sequence_length",
        "enable_expert_parallel": f"{cfg}.expert_parallel_size",
        **{name: f"{cfg}.{name}" for name in same},
    }


OF_POLICY = {
    **own_keys("policy", "grpo", "policy.checkpoint", "policy.generation"),
    RECORDING: "policy.router_replay.enabled",
}


def option_rules(config: GenerationConfig, section: str, own: Mapping[str, str]) -> Iterator[Rule]:
    """Broken rules of a whole config about its `vllm_kwargs`, at the key `section`; `own` as OF_POLICY. The recording
    of experts where nothing has a key for it is left to vLLM's default."""
    for name, value in config.vllm_kwargs.items() if config.backend == "vllm" else ():
        key, there = f"{section}.vllm_kwargs.{name}", own.get(name)
        if there is not None:
            # Which of several models, and over how many GPUs, is not known.
            plain = isinstance(value, int | float | str) and name not in ("model", "enable_expert_parallel")
            moved = f" {there}={shlex.quote(written(value))}" if plain else ""
            yield Rule(key, f"vLLM's {name} has a key of its own: {there}", f"~{key}{moved}")
        elif name in FIXED or name == RECORDING:
            yield Rule(key, f"vLLM's {name} cannot be changed: the step depends on it", f"~{key}")


class TokenizerConfig(Section):
    """`policy.tokenizer`: how chats are rendered. The tokenizer itself is the checkpoint's."""

    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template: enable_thinking, truncate_history_thinking, …"""


class PolicyConfig(Section):
    """`policy.*`."""

    checkpoint: str | None = None
    """Path of the starting checkpoint; the step's `policy` port is written here."""
    model_type: Annotated[str | None, OPERATIONAL] = None
    """config.json's model_type that the config was made for; another is refused. None: any that the layout fits."""
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
    optimizer: Annotated[TorchOptimizerConfig | None, OF_DTENSOR] = None
    """Of the dtensor policy; None: torch.optim.AdamW with its defaults above. The megatron policy has its own."""
    scheduler: Annotated[tuple[TorchSchedulerConfig, ...] | None, OF_DTENSOR] = None
    """Of the dtensor policy, as torch's SequentialLR takes them; None: a constant rate."""
    megatron_cfg: MegatronConfig = MegatronConfig()
    dtensor_cfg: DTensorConfig = DTensorConfig()
    sequence_packing: Annotated[SequencePackingConfig, OPERATIONAL] = SequencePackingConfig()
    dynamic_batching: Annotated[DynamicBatchingConfig, OPERATIONAL] = DynamicBatchingConfig()

    @property
    def adapters(self) -> AdapterConfig:
        """Of the policy that is trained."""
        return self.dtensor_cfg.lora_cfg if self.dtensor_cfg.enabled else self.megatron_cfg.peft

    def _broken_rules(self) -> Iterator[Rule]:
        if self.scheduler is None:
            return
        schedulers = sum(entry.name is not None for entry in self.scheduler)
        steps = [step for entry in self.scheduler for step in entry.milestones or ()]
        at_end = all(entry.name is not None for entry in self.scheduler[:-1])
        if schedulers == 0 or len(steps) != schedulers - 1 or not at_end or steps != sorted(steps):
            what = (
                f"policy.scheduler has {schedulers} schedulers and {len(steps)} milestones: its last entry must have "
                "the step between each two schedulers, in rising order"
            )
            yield Rule("scheduler", what, "scheduler=null")


class RouterReplayConfig(Section):
    """`policy.router_replay`: experts of generation in training (docs/internals/router_replay.md)."""

    enabled: Annotated[bool, OF_MEGATRON, OnlyIf("generation.vllm_cfg.expose_http_server", False)] = False
    """A mixture's routers take for every token the experts that the generator chose, and weigh them themselves. For the
    megatron policy; answers over HTTP come without experts."""


class GeneratingPolicyConfig(PolicyConfig):
    """`policy.*` of a step that samples from the policy it trains."""

    max_total_sequence_length_end: PositiveInt | None = None
    """Raised linearly to this over the run when set (RLVR: 49,152 to 65,536)."""
    generation: GenerationConfig = GenerationConfig()
    router_replay: RouterReplayConfig = RouterReplayConfig()

    def _broken_rules(self) -> Iterator[Rule]:
        yield from super()._broken_rules()
        if self.adapters.dropout > 0:
            key = f"{'dtensor_cfg.lora_cfg' if self.dtensor_cfg.enabled else 'megatron_cfg.peft'}.dropout"
            what = "a policy with dropout has no well-defined logprobs: it cannot be trained on its own samples"
            yield Rule(key, what, f"{key}=0")
