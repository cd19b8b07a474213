"""What of a config memory depends on, beside the sizes of its layout, as plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nemotron_steps.config.layout.parallel_config import (
    DTENSOR,
    MEGATRON,
    TEACHERS,
    VLLM,
    ParallelConfig,
    at,
    values_at,
)

GENERATION = "policy.generation"
UTILIZATION = f"{VLLM}.gpu_memory_utilization"


@dataclass(frozen=True)
class MemorySettings:
    """Values of a config, and the layout that they are for."""

    sizes: ParallelConfig
    gpu_memory_gib: float = at("cluster.gpu_memory_gib", 80.0)
    precision: str = at("policy.precision", "bfloat16")
    micro_batch: int = at("policy.train_micro_batch_size", 4)
    logprob_batch: int = at("policy.logprob_batch_size", 4)
    chunk: int = at("policy.logprob_chunk_size", 1024)
    packs: bool = at("policy.sequence_packing.enabled", False)
    packed_tokens: int | None = at("policy.sequence_packing.train_mb_tokens", None)
    packed_logprob_tokens: int | None = at("policy.sequence_packing.logprob_mb_tokens", None)
    balances: bool = at("policy.dynamic_batching.enabled", False)
    balanced_tokens: int | None = at("policy.dynamic_batching.train_mb_tokens", None)
    balanced_logprob_tokens: int | None = at("policy.dynamic_batching.logprob_mb_tokens", None)
    checkpoints: bool = at(f"{MEGATRON}.activation_checkpointing", False)
    dtensor_checkpoints: bool = at(f"{DTENSOR}.activation_checkpointing", False)
    cpu_offload: bool = at(f"{DTENSOR}.cpu_offload", False)
    freezes_router: bool = at(f"{MEGATRON}.freeze_moe_router", False)
    detaches_mtp: bool = at(f"{MEGATRON}.mtp_detach_heads", False)
    adapts: bool = at(f"{MEGATRON}.peft.enabled", False)
    adapter_dim: int = at(f"{MEGATRON}.peft.dim", 32)
    lora: bool = at(f"{DTENSOR}.lora_cfg.enabled", False)
    lora_dim: int = at(f"{DTENSOR}.lora_cfg.dim", 8)
    adapter_targets: tuple[str, ...] = at(f"{MEGATRON}.peft.target_modules", ())
    adapter_excluded: tuple[str, ...] = at(f"{MEGATRON}.peft.exclude_modules", ())
    distributed: bool = at(f"{MEGATRON}.optimizer.use_distributed_optimizer", False)
    precision_aware: bool = at(f"{MEGATRON}.optimizer.use_precision_aware_optimizer", False)
    exp_avg: str = at(f"{MEGATRON}.optimizer.exp_avg_dtype", "float32")
    exp_avg_sq: str = at(f"{MEGATRON}.optimizer.exp_avg_sq_dtype", "float32")
    offloads: bool = at(f"{MEGATRON}.optimizer.optimizer_cpu_offload", False)
    offload_fraction: float = at(f"{MEGATRON}.optimizer.optimizer_offload_fraction", 1.0)
    max_new_tokens: int = at(f"{GENERATION}.max_new_tokens", 512)
    max_sequences: int = at(f"{GENERATION}.max_sequences", 256)
    utilization: float = at(UTILIZATION, 0.8)
    max_num_seqs: int = at(f"{GENERATION}.vllm_cfg.max_num_seqs", 256)
    own_process: bool | None = at(f"{GENERATION}.vllm_cfg.async_engine", None)
    asynchronous: bool = at("grpo.async_grpo.enabled", False)
    kl_penalty: float = at("loss_fn.reference_policy_kl_penalty", 0.0)
    dpo: float | None = at("dpo.reference_policy_kl_penalty", None)
    estimator: str = at("grpo.adv_estimator.name", "grpo")
    topk: int | None = at("on_policy_distillation.topk_logits_k", None)
    zero_outside: bool = at("loss_fn.zero_outside_topk", False)
    offloads_teachers: bool = at("on_policy_distillation.offload", True)
    teachers: tuple[str, ...] = ()

    @classmethod
    def read(cls, get: Callable[[str], Any], sizes: ParallelConfig | None = None) -> MemorySettings:
        """From a config; `get` as for ParallelConfig.read, `sizes` where they have been read from it already."""
        teachers = get(TEACHERS)
        named = tuple(teachers) if isinstance(teachers, Mapping) else ()
        return cls(sizes or ParallelConfig.read(get), teachers=named, **values_at(cls, get))

    @property
    def element(self) -> int:
        """Bytes of a weight and of an activation."""
        return 2 if self.precision == "bfloat16" else 4

    @property
    def on_gpu(self) -> bool:
        """Whether there are GPUs at all."""
        return self.sizes.gpus_per_node > 0

    @property
    def one_function(self) -> bool:
        """Whether halves of layers are functions of their own: in float32 on CPU (engine/kernels/cpu_layers.py)."""
        return not self.on_gpu and self.element == 4 and self.sizes.tensor == 1

    @property
    def share(self) -> float:
        """The part of a rank's tokens whose norms and residual stream it has."""
        return 1 / self.sizes.tensor if self.sizes.sequence_parallel else 1.0

    @property
    def rows_per_unit(self) -> int:
        """Sequences that the loss reads together: the two of a preference pair."""
        return 1 if self.dpo is None else 2

    @property
    def compares(self) -> bool:
        """Whether the loss compares distributions with teachers', and not sampled tokens alone."""
        return bool(self.teachers) and self.estimator != "opd"

    @property
    def recomputes(self) -> bool:
        """Whether layers are computed again in the backward pass."""
        return self.dtensor_checkpoints if self.sizes.dtensor else self.checkpoints

    @property
    def has_reference(self) -> bool:
        """Whether logprobs of the starting weights are computed."""
        return self.kl_penalty > 0 or self.dpo is not None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that is trained on."""
        return max(self.sizes.length or 4096, self.sizes.length_end or 0)

    def budget(self, *, logprobs: bool = False) -> int | None:
        """Most tokens of a micro-batch, for training or for logprobs alone; None where rows cut micro-batches."""
        if not self.packs and not self.balances:
            return None
        packed, balanced, rows = self.packed_tokens, self.balanced_tokens, self.micro_batch
        if logprobs:
            packed, balanced, rows = self.packed_logprob_tokens, self.balanced_logprob_tokens, self.logprob_batch
        return (packed if self.packs else balanced) or rows * self.rows_per_unit * self.longest


@dataclass(frozen=True)
class BatchArithmetic:
    """How the work of a step is cut into `batch` sequences (pairs, for DPO) of an optimizer step, `rows` of these on a
    data-parallel rank, and at most `micro_rows` sequences and `tokens` of a micro-batch, `trained` of which have a
    gradient. A prompt that rows share is counted once. `budget`: whether a number of tokens cuts the micro-batches."""

    prompts: int | None
    group: int | None
    rollouts: int | None
    batch: int
    updates: int | None
    data_parallel: int
    rows: int
    micro_batches: int
    micro_rows: int
    tokens: int
    trained: int
    budget: bool

    @classmethod
    def of(cls, settings: MemorySettings, *, logprobs: bool = False) -> BatchArithmetic | None:
        """Of a config, for training or for logprobs alone; None where its batch does not split over the ranks."""
        sizes = settings.sizes
        if sizes.batch is None or sizes.batch < 1 or not sizes.data_parallel:
            return None
        unit = settings.rows_per_unit
        rows = -(-sizes.batch // sizes.data_parallel) * unit
        budget = settings.budget(logprobs=logprobs)
        if budget is None:
            micro_rows = min((settings.logprob_batch if logprobs else settings.micro_batch) * unit, rows)
            tokens, trained = _tokens(settings, micro_rows)
            count = -(-rows // micro_rows)
        else:
            all_tokens, all_trained = _tokens(settings, rows)
            tokens = min(budget, all_tokens)
            trained, count = min(tokens, all_trained), -(-all_tokens // budget)
            micro_rows = min(rows, max(1, tokens * rows // all_tokens))
        samples = (sizes.prompts, sizes.group, sizes.rollouts) if sizes.samples else (None, None, None)
        updates = sizes.rollouts // sizes.batch if sizes.rollouts else None
        cut = (rows, count, micro_rows, tokens, trained)
        return cls(*samples, sizes.batch, updates, sizes.data_parallel, *cut, budget=budget is not None)


def prompt_and_answer(settings: MemorySettings) -> tuple[int, int]:
    """Tokens of the prompts and answers of which a micro-batch has most: answers of full length."""
    if not settings.sizes.samples:
        return 0, settings.longest
    answer = min(settings.max_new_tokens, settings.longest)
    return settings.longest - answer, answer


def _tokens(settings: MemorySettings, rows: int) -> tuple[int, int]:
    """Tokens of so many rows as they are computed, and how many of them are trained on."""
    prompt, answer = prompt_and_answer(settings)
    # Only the flat policy computes a shared prompt once.
    group = 1 if settings.sizes.dtensor else settings.sizes.group or 1
    prompts = -(-rows // group) if settings.sizes.samples else 0
    return prompts * prompt + rows * answer, rows * answer
