"""What to paste where a GPU has too little memory: fixed measures in a fixed order, those that cost nothing first, then
those that cost time, a wider cut, host memory and more GPUs. The first that does alone, else as many as it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from nemotron_steps.config.layout.constraints import pasted, violations
from nemotron_steps.config.layout.memory.devices import GENERATOR, StepMemory, step_memory
from nemotron_steps.config.layout.memory.generation import GIB
from nemotron_steps.config.layout.memory.settings import UTILIZATION, MemorySettings
from nemotron_steps.config.layout.memory.shape import ModelShape
from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.config.layout.other_models import teachers_fit
from nemotron_steps.config.layout.parallel_config import DTENSOR, MEGATRON, VLLM, ParallelConfig

_OPTIMIZER = f"{MEGATRON}.optimizer"
_RAY: dict[str, Any] = {"cluster.backend": "ray", "cluster.gpus_per_node": 8}
_WIDTHS = (2, 4, 8, 16, 32, 64)
_OF_A_NODE = _WIDTHS[:3]

Measure = list[dict[str, Any]]
"""Overrides that take ever less memory."""


def memory_suggestion(
    get: Callable[[str], Any],
    model_of: Callable[[str], ModelShape | None],
    facts: ModelSpec | None = None,
    *,
    teachers: Mapping[str, ModelSpec] | None = None,
    within: Mapping[str, int] | None = None,
) -> list[str]:
    """A hint after which everything fits; none where no measure does.

    Args:
        get: dotted key → value of the config.
        model_of: as for step_memory.
        facts: of the model that is trained, which a changed layout has to come out even over.
        teachers: the same of each teacher, as far as they are known.
        within: config key → the most that an override may make of it.
    """

    def comes_out_even(changed: Mapping[str, Any]) -> bool:
        if any(changed.get(key, 0) > most for key, most in (within or {}).items()):
            return False
        sizes = ParallelConfig.read(_under(changed, get))
        return not violations(sizes, facts) and teachers_fit(sizes, teachers or {})

    def fits(changed: Mapping[str, Any]) -> bool:
        return (
            comes_out_even(changed) and not step_memory(MemorySettings.read(_under(changed, get)), model_of).shortages
        )

    taken: list[tuple[Measure, dict[str, Any]]] = []

    def now() -> MemorySettings:
        return MemorySettings.read(_under(_joined(step for _, step in taken), get))

    alone = next((step for measure in _measures(now, model_of) for step in measure if fits(step)), None)
    if alone is not None:
        return pasted(alone)
    for measure in _measures(now, model_of):
        before = _joined(step for _, step in taken)
        most = next((step for step in reversed(measure) if comes_out_even(before | step)), None)
        if most is not None:
            taken.append((measure, most))
            if fits(before | most):
                return pasted(_least(taken, fits))
    if now().sizes.backend == "ray" or any(_RAY.get(key, 0) > most for key, most in (within or {}).items()):
        return []
    more = memory_suggestion(_under(_RAY, get), model_of, facts, teachers=teachers, within=within)
    return [f"{start} {hint}" for start in pasted(_RAY) for hint in more]


def _least(taken: list[tuple[Measure, dict[str, Any]]], fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """What of measures it takes, the dearest first to be done without."""
    steps = [step for _, step in taken]
    for number, (measure, _) in reversed([*enumerate(taken)]):
        trials = ([*steps[:number], step, *steps[number + 1 :]] for step in ({}, *measure))
        steps = next(trial for trial in trials if fits(_joined(trial)))
    return _joined(steps)


def least_share(needed: float, capacity: float) -> float | None:
    """The share of a GPU that holds so many bytes, in twentieths; None where none does."""
    twentieths = next((count for count in range(1, 20) if count / 20 * capacity >= needed), None)
    return None if twentieths is None else twentieths / 20


def _joined(steps: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {key: value for step in steps for key, value in step.items()}


def _under(changed: Mapping[str, Any], get: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda key: changed[key] if key in changed else get(key)


def _measures(now: Callable[[], MemorySettings], model_of: Callable[[str], ModelShape | None]) -> Iterator[Measure]:
    """One after another; `now` says what those before have made of the settings."""
    settings = now()
    sizes = settings.sizes
    if not sizes.dtensor:
        yield [{f"{_OPTIMIZER}.use_distributed_optimizer": True}]
        yield [{f"{_OPTIMIZER}.use_precision_aware_optimizer": True}]
        yield [{f"{MEGATRON}.expert_model_parallel_size": width} for width in _WIDTHS if width > sizes.expert]
    if sizes.uses_vllm:
        keys = [f"{VLLM}.tensor_parallel_size", *([f"{VLLM}.expert_parallel_size"] * (sizes.generator_experts > 1))]
        yield [dict.fromkeys(keys, width) for width in _OF_A_NODE if width > sizes.generator_width]
    yield from _generation(now(), step_memory(now(), model_of))
    yield from _micro_batches(settings)
    yield [{f"{DTENSOR if sizes.dtensor else MEGATRON}.activation_checkpointing": True}]
    yield [{"policy.logprob_chunk_size": chunk} for chunk in _halves(settings.chunk, 512)]
    if settings.teachers:
        yield [{"on_policy_distillation.offload": True}]
    for teacher in {each.section: each for each in sizes.teachers}.values():
        rows = _halves(teacher.micro_batch or settings.logprob_batch, 1)
        yield [{teacher.key("micro_batch"): fewer} for fewer in rows]
        cut = _cuts(teacher.tensor, teacher.gpus_per_node or sizes.gpus_per_node)
        yield [{teacher.key("tensor"): width, teacher.key("sequence_parallel"): True} for width in cut]
    cut = _cuts(sizes.tensor, sizes.gpus_per_node)
    if sizes.dtensor:
        yield [{f"{DTENSOR}.tensor_parallel_size": width} for width in cut]
        yield [{f"{DTENSOR}.cpu_offload": True}]
    else:
        parallel = {} if sizes.sequence_parallel else {f"{MEGATRON}.sequence_parallel": True}
        yield [{f"{MEGATRON}.tensor_model_parallel_size": width, **parallel} for width in cut]
        yield [{f"{MEGATRON}.context_parallel_size": size} for size in _OF_A_NODE if size > sizes.context]
        yield [{f"{MEGATRON}.pipeline_model_parallel_size": size} for size in _OF_A_NODE if size > sizes.pipeline]
        offload = f"{_OPTIMIZER}.optimizer_cpu_offload", f"{_OPTIMIZER}.optimizer_offload_fraction"
        yield [dict(zip(offload, (True, share), strict=True)) for share in (0.5, 0.75, 1.0)]
    if sizes.backend == "ray":
        yield [{"cluster.num_nodes": sizes.nodes * times} for times in _OF_A_NODE]


def _cuts(tensor: int, node: int) -> list[int]:
    """Wider tensor parallelism, within a node."""
    return [width for width in _OF_A_NODE if width > tensor and node % width == 0]


def _generation(settings: MemorySettings, memory: StepMemory) -> Iterator[Measure]:
    sizes = settings.sizes
    for judge in settings.judges:
        if judge.vllm:
            yield _shares(settings, memory, judge.role, f"{judge.key}.gpu_memory_utilization", judge.utilization)
        else:
            yield [{f"{judge.key}.max_sequences": rows} for rows in _halves(judge.max_sequences, 8)]
            yield [{f"{judge.key}.max_total_sequence_length": each} for each in _halves(judge.length, 8192)]
    if sizes.uses_vllm:
        yield _shares(settings, memory, GENERATOR, UTILIZATION, settings.utilization)
    elif sizes.samples:
        yield [{"policy.generation.max_sequences": rows} for rows in _halves(settings.max_sequences, 8)]


def _micro_batches(settings: MemorySettings) -> Iterator[Measure]:
    section = "sequence_packing" if settings.packs else "dynamic_batching"
    rows = {"train_micro_batch_size": settings.micro_batch, "logprob_batch_size": settings.logprob_batch}
    tokens = {"train_mb_tokens": settings.budget, "logprob_mb_tokens": settings.logprob_budget}
    by_tokens = settings.packs or settings.balances
    least = settings.longest * settings.rows_per_unit if by_tokens else 1
    for name, count in (tokens if by_tokens else rows).items():
        if count is not None and (name.startswith("train") or settings.has_reference or settings.teachers):
            key = f"policy.{section}.{name}" if by_tokens else f"policy.{name}"
            yield [{key: fewer} for fewer in _halves(count, least)]


def _halves(value: int, least: int) -> list[int]:
    """Ever smaller, down to the least."""
    found = []
    while value > least:
        value = max(least, value // 2)
        found.append(value)
    return found


def _shares(settings: MemorySettings, memory: StepMemory, role: str, key: str, now: float) -> Measure:
    """Shares of a GPU that hold what vLLM needs: a larger one where its own does not, else ever smaller ones."""
    needed = memory.generators[role][1].least if role in memory.generators else 0
    least = least_share(needed, settings.gpu_memory_gib * GIB)
    if least is None or least > now:
        return [] if least is None else [{key: least}]
    return [{key: count / 20} for count in range(19, 0, -1) if least <= count / 20 < now]
