"""What to paste where a GPU has too little memory: what an expert would try, of what takes most first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from nemotron_steps.config.layout.constraints import violations
from nemotron_steps.config.layout.memory.devices import CAPACITY, GENERATOR, Shortage, StepMemory, step_memory
from nemotron_steps.config.layout.memory.generation import GIB
from nemotron_steps.config.layout.memory.settings import UTILIZATION, MemorySettings
from nemotron_steps.config.layout.memory.shape import ModelShape
from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.config.layout.parallel_config import DTENSOR, KEYS, MEGATRON, VLLM

_OPTIMIZER = f"{MEGATRON}.optimizer"
_OF_A_NODE = (2, 4, 8)


def memory_measures(
    get: Callable[[str], Any],
    model_of: Callable[[str], ModelShape | None],
    model: ModelSpec | None = None,
    most_nodes: int | None = None,
) -> dict[str, Any]:
    """Config key → value, after which everything fits: measures one after another, each if it helps; none where all of
    them are not enough.

    Args:
        get: dotted key → value of the config.
        model_of: as for step_memory.
        model: that is trained, which a changed layout has to divide.
        most_nodes: that there are; None where that is not known.
    """
    taken: dict[str, Any] = {}

    def under(measure: dict[str, Any]) -> MemorySettings:
        changed = taken | measure
        return MemorySettings.read(lambda key: changed[key] if key in changed else get(key))

    memory = step_memory(under({}), model_of)
    while memory.shortages:
        settings = under({})
        for measure in _measures(settings, memory, memory.shortages[0], most_nodes):
            changed = under(measure)
            if violations(changed.sizes, model):
                continue
            after = step_memory(changed, model_of)
            if _short(after) < _short(memory):
                break
        else:
            return {}
        taken |= measure
        memory = after
    return taken


def least_share(needed: float, capacity: float) -> float | None:
    """The share of a GPU that holds so many bytes, in twentieths; None where none does."""
    twentieths = max(1, math.ceil(20 * needed / capacity))
    return twentieths / 20 if twentieths < 20 else None


def _short(memory: StepMemory) -> int:
    return sum(shortage.needed - shortage.there for shortage in memory.shortages)


def _measures(
    settings: MemorySettings, memory: StepMemory, shortage: Shortage, most_nodes: int | None
) -> Iterator[dict[str, Any]]:
    """Of one shortage: those of parts that are as large as what lacks, the cheapest first; then of all others, then
    more nodes."""
    sizes, lacking, parts = settings.sizes, shortage.needed - shortage.there, Counter[str]()
    for (role, line), count in shortage.lines.items():
        own = "weights" if line in ("optimizer", "weights", "gradients") else "activations"
        parts[role if role in memory.generators or role == "teacher" else own] += count
    if shortage.key != CAPACITY:
        share = least_share(shortage.needed, settings.gpu_memory_gib * GIB)
        yield from [] if share is None else [{shortage.key: share}]
    cheapest = [*memory.generators, "teacher", "activations", "weights"]
    for part in sorted((part for part in cheapest if part in parts), key=lambda part: parts[part] < lacking):
        if part in memory.generators:
            yield from _of_generator(settings, memory, part, shortage)
        else:
            yield from {"teacher": _of_teachers, "activations": _of_activations, "weights": _of_weights}[part](settings)
    if sizes.backend == "ray" and sizes.nodes * 2 <= (most_nodes or math.inf):
        yield {KEYS["nodes"]: sizes.nodes * 2}


def _of_weights(settings: MemorySettings) -> Iterator[dict[str, Any]]:
    """Weights, gradients and the optimizer's states."""
    sizes = settings.sizes
    if sizes.dtensor:
        yield from _wider(f"{DTENSOR}.tensor_parallel_size", sizes.tensor, sizes.gpus_per_node)
        yield {f"{DTENSOR}.cpu_offload": True}
        return
    yield {f"{_OPTIMIZER}.use_distributed_optimizer": True}
    yield {f"{_OPTIMIZER}.use_precision_aware_optimizer": True}
    yield {KEYS["expert"]: sizes.expert * 2}
    yield from _wider(KEYS["tensor"], sizes.tensor, sizes.gpus_per_node, KEYS["sequence_parallel"])
    yield {KEYS["pipeline"]: sizes.pipeline * 2}
    yield {f"{_OPTIMIZER}.optimizer_cpu_offload": True, f"{_OPTIMIZER}.optimizer_offload_fraction": 1.0}


def _of_activations(settings: MemorySettings) -> Iterator[dict[str, Any]]:
    """Micro-batches, what their layers keep, and their logits."""
    sizes = settings.sizes
    section = "sequence_packing" if settings.packs else "dynamic_batching"
    if settings.packs or settings.balances:
        least = settings.longest * settings.rows_per_unit
        budgets = {"train_mb_tokens": settings.budget, "logprob_mb_tokens": settings.logprob_budget}
        counts = {f"policy.{section}.{name}": count or 0 for name, count in budgets.items()}
    else:
        least = 1
        rows = {"train_micro_batch_size": settings.micro_batch, "logprob_batch_size": settings.logprob_batch}
        counts = {f"policy.{name}": count for name, count in rows.items()}
    for key, count in counts.items():
        if count > least:
            yield {key: max(least, count // 2)}
    yield {f"{DTENSOR if sizes.dtensor else MEGATRON}.activation_checkpointing": True}
    if settings.chunk > 512:
        yield {"policy.logprob_chunk_size": max(512, settings.chunk // 2)}
    if not sizes.dtensor:
        yield from _wider(KEYS["tensor"], sizes.tensor, sizes.gpus_per_node, KEYS["sequence_parallel"])
        yield {KEYS["context"]: sizes.context * 2}


def _of_generator(
    settings: MemorySettings, memory: StepMemory, role: str, shortage: Shortage
) -> Iterator[dict[str, Any]]:
    """The policy's generator, or a judge."""
    key, needs = memory.generators[role]
    capacity = settings.gpu_memory_gib * GIB
    if needs.share is not None:
        least, left = least_share(needs.least, capacity), needs.share - (shortage.needed - shortage.there)
        if least is not None and shortage.key == CAPACITY:
            yield {key: max(least, math.floor(20 * left / capacity) / 20)}
        if role == GENERATOR and key == UTILIZATION:
            sizes = settings.sizes
            along = f"{VLLM}.expert_parallel_size" if sizes.generator_experts > 1 else None
            yield from _wider(KEYS["generator_width"], sizes.generator_width, sizes.gpus_per_node, along)
        return
    judge = next((each for each in settings.judges if each.role == role), None)
    rows, section = (settings.max_sequences, "policy.generation") if judge is None else (judge.max_sequences, judge.key)
    if rows > 8:
        yield {f"{section}.max_sequences": max(8, rows // 2)}
    if judge is not None and judge.length > 8192:
        yield {f"{section}.max_total_sequence_length": max(8192, judge.length // 2)}


def _of_teachers(settings: MemorySettings) -> Iterator[dict[str, Any]]:
    yield {"on_policy_distillation.offload": True}
    for teacher in {each.section: each for each in settings.sizes.teachers}.values():
        rows = teacher.micro_batch or settings.logprob_batch
        if rows > 1:
            yield {teacher.key("micro_batch"): rows // 2}
        node = teacher.gpus_per_node or settings.sizes.gpus_per_node
        yield from _wider(teacher.key("tensor"), teacher.tensor, node, teacher.key("sequence_parallel"))


def _wider(key: str, tensor: int, node: int, along: str | None = None) -> Iterator[dict[str, Any]]:
    """The next wider tensor parallelism within a node, with sequence parallelism or as many experts beside it."""
    width = next((width for width in _OF_A_NODE if width > tensor and node % width == 0), None)
    if width is not None:
        value: Any = width if along is not None and along.endswith("_size") else True
        yield {key: width} if along is None else {key: width, along: value}
