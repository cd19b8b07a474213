"""Overrides under which what does not fit a GPU would, found by trying them through the same arithmetic.

Those that cost nothing first, then those that cost time, then those that take more GPUs; as few together as it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any

from nemotron_steps.config.layout.facts import ModelFacts
from nemotron_steps.config.layout.memory.devices import GENERATOR, POLICY, StepMemory, step_memory
from nemotron_steps.config.layout.memory.generation import GIB
from nemotron_steps.config.layout.memory.settings import UTILIZATION, MemorySettings
from nemotron_steps.config.layout.memory.shape import ModelShape
from nemotron_steps.config.layout.misfits import misfits
from nemotron_steps.config.layout.sizes import DTENSOR, MEGATRON, VLLM, LayoutSizes
from nemotron_steps.config.layout.teacher_fit import teachers_fit

_MOST_TOGETHER = 4
_OPTIMIZER = f"{MEGATRON}.optimizer"

Overrides = tuple[tuple[str, Any], ...]


def memory_mends(
    get: Callable[[str], Any],
    model_of: Callable[[str], ModelShape | None],
    facts: ModelFacts | None = None,
    *,
    teachers: Mapping[str, ModelFacts] | None = None,
    within: Mapping[str, int] | None = None,
    most: int = 2,
) -> list[str]:
    """Overrides after which everything fits, best first; several of one mend in one string.

    Args:
        get: dotted key → value of the config.
        model_of: as for step_memory.
        facts: of the model that is trained, which a changed layout has to come out even over.
        teachers: the same of each teacher, as far as they are known.
        within: config key → the most that an override may make of it.
    """

    def comes_out_even(overrides: Overrides) -> bool:
        if any(value > (within or {}).get(key, value) for key, value in overrides):
            return False
        return _comes_out_even(_under(overrides, get), facts, teachers)

    def fits(overrides: Overrides) -> bool:
        if not comes_out_even(overrides):
            return False
        return not step_memory(MemorySettings.read(_under(overrides, get)), model_of).shortages

    found: list[Overrides] = []
    settings = MemorySettings.read(get)
    offered = _ladders(settings, step_memory(settings, model_of), model_of(POLICY))
    ladders = [even for ladder in offered if (even := list(filter(comes_out_even, ladder)))]
    for together in range(1, _MOST_TOGETHER + 1):
        for chosen in combinations(ladders, together):
            mended = _lowest(chosen, fits)
            # Nothing that a shorter mend does without.
            if mended is not None and not any(set(each) <= set(mended) for each in found):
                found.append(mended)
                if len(found) == most:
                    return [_text(each) for each in found]
        if found:
            break
    return [_text(each) for each in found]


def share_mends(
    get: Callable[[str], Any],
    model_of: Callable[[str], ModelShape | None],
    facts: ModelFacts | None = None,
    *,
    key: str,
    teachers: Mapping[str, ModelFacts] | None = None,
) -> list[str]:
    """Overrides after which a share of a GPU holds what vLLM needs, and nothing else lacks more than before.

    Args:
        key: of the share.
    """
    settings = MemorySettings.read(get)
    memory = step_memory(settings, model_of)
    before = {shortage.what: shortage.needed for shortage in memory.shortages}

    def helps(overrides: Overrides) -> bool:
        changed = _under(overrides, get)
        if not _comes_out_even(changed, facts, teachers):
            return False
        after = step_memory(MemorySettings.read(changed), model_of).shortages
        return all(each.key != key and each.needed <= before.get(each.what, 0) for each in after)

    about = {key, f"{VLLM}.tensor_parallel_size"} if key == UTILIZATION else {key}
    ladders = [ladder for ladder in _generation(settings, memory) if ladder and ladder[0][0][0] in about]
    least = [next(filter(helps, ladder), None) for ladder in ladders]
    return [_text(overrides) for overrides in least if overrides is not None]


def _under(overrides: Overrides, get: Callable[[str], Any]) -> Callable[[str], Any]:
    changed = dict(overrides)
    return lambda key: changed[key] if key in changed else get(key)


def _comes_out_even(
    get: Callable[[str], Any], facts: ModelFacts | None, teachers: Mapping[str, ModelFacts] | None
) -> bool:
    sizes = LayoutSizes.read(get)
    return not misfits(sizes, facts) and teachers_fit(sizes, teachers or {})


def _lowest(ladders: tuple[list[Overrides], ...], fits: Callable[[Overrides], bool]) -> Overrides | None:
    """The least of each ladder, one after another, under which everything fits; None if not even the most does."""
    rungs = [len(ladder) - 1 for ladder in ladders]

    def joined() -> Overrides:
        return tuple(change for ladder, rung in zip(ladders, rungs, strict=True) for change in ladder[rung])

    if not fits(joined()):
        return None
    for number in reversed(range(len(ladders))):
        for rung in range(rungs[number]):
            most, rungs[number] = rungs[number], rung
            if fits(joined()):
                break
            rungs[number] = most
    return joined()


def _ladders(settings: MemorySettings, memory: StepMemory, model: ModelShape | None) -> Iterator[list[Overrides]]:
    """Ways to take less memory, each from little to much; best first."""
    sizes = settings.sizes
    ranks = (sizes.data_parallel or 1) * sizes.context
    if not sizes.dtensor:
        if not settings.distributed and ranks > 1:
            yield [((f"{_OPTIMIZER}.use_distributed_optimizer", True),)]
        if not settings.precision_aware and settings.precision == "bfloat16":
            yield [((f"{_OPTIMIZER}.use_precision_aware_optimizer", True),)]
        if model is not None and model.has_experts and sizes.backend == "ray":
            wider = [width for width in (2, 4, 8, 16, 32, 64) if width > sizes.expert]
            yield [((f"{MEGATRON}.expert_model_parallel_size", width),) for width in wider]
    yield from _generation(settings, memory)
    yield from _micro_batches(settings)
    if not settings.recomputes:
        yield [((f"{DTENSOR if sizes.dtensor else MEGATRON}.activation_checkpointing", True),)]
    if sizes.dtensor and not settings.cpu_offload:
        yield [((f"{DTENSOR}.cpu_offload", True),)]
    if not sizes.dtensor and settings.offload_fraction * settings.offloads < 1:
        offload = (f"{_OPTIMIZER}.optimizer_cpu_offload", True)
        yield [(offload, (f"{_OPTIMIZER}.optimizer_offload_fraction", share)) for share in (0.5, 0.75, 1.0)]
    if settings.chunk > 512:
        yield [(("policy.logprob_chunk_size", chunk),) for chunk in _halves(settings.chunk, 512)]
    if settings.teachers and not settings.offloads_teachers:
        yield [(("on_policy_distillation.offload", True),)]
    yield from _teachers(settings)
    yield from _more_gpus(settings, model)


def _generation(settings: MemorySettings, memory: StepMemory) -> Iterator[list[Overrides]]:
    sizes = settings.sizes
    for judge in settings.judges:
        if judge.vllm and not sizes.judge_nodes:
            shares = _shares(settings, memory, judge.role, judge.utilization)
            yield [((f"{judge.key}.gpu_memory_utilization", share),) for share in shares]
        if judge.vllm and _lacks(memory, judge.role):
            larger = [share for share in (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9) if share > judge.utilization]
            yield [((f"{judge.key}.gpu_memory_utilization", share),) for share in larger]
        if not judge.vllm:
            yield [((f"{judge.key}.max_sequences", rows),) for rows in _halves(judge.max_sequences, 8)]
            yield [((f"{judge.key}.max_total_sequence_length", each),) for each in _halves(judge.length, 8192)]
    if not sizes.samples:
        return
    if sizes.uses_vllm:
        yield [((UTILIZATION, share),) for share in _shares(settings, memory, GENERATOR, settings.utilization)]
        wider = [width for width in (2, 4, 8) if width > sizes.generator_width]
        if wider and sizes.backend == "ray":
            yield [
                (
                    (f"{VLLM}.tensor_parallel_size", width),
                    *([(f"{VLLM}.expert_parallel_size", width)] if sizes.generator_experts > 1 else []),
                )
                for width in wider
            ]
        larger = [share for share in (0.5, 0.6, 0.7, 0.8, 0.85, 0.9) if share > settings.utilization]
        if _lacks(memory, GENERATOR):
            yield [((UTILIZATION, share),) for share in larger]
    else:
        yield [(("policy.generation.max_sequences", rows),) for rows in _halves(settings.max_sequences, 8)]


def _teachers(settings: MemorySettings) -> Iterator[list[Overrides]]:
    """Of teachers that have devices of their own: fewer rows at once, or a model cut over more of its GPUs."""
    for section in dict.fromkeys(teacher.section for teacher in settings.sizes.teachers):
        teacher = next(each for each in settings.sizes.teachers if each.section == section)
        rows = teacher.micro_batch or settings.logprob_batch
        if rows > 1:
            yield [((teacher.key("micro_batch"), fewer),) for fewer in _halves(rows, 1)]
        parallel = () if teacher.sequence_parallel else ((teacher.key("sequence_parallel"), True),)
        yield [((teacher.key("tensor"), width), *parallel) for width in (2, 4, 8) if width > teacher.tensor]


def _micro_batches(settings: MemorySettings) -> Iterator[list[Overrides]]:
    section = "sequence_packing" if settings.packs else "dynamic_batching" if settings.balances else None
    if section is None:
        if settings.micro_batch > 1:
            yield [(("policy.train_micro_batch_size", rows),) for rows in _halves(settings.micro_batch, 1)]
        if settings.logprob_batch > 1 and (settings.has_reference or settings.teachers):
            yield [(("policy.logprob_batch_size", rows),) for rows in _halves(settings.logprob_batch, 1)]
        return
    least = settings.longest * settings.rows_per_unit
    budgets = {"train_mb_tokens": settings.budget}
    if settings.has_reference or settings.teachers:
        budgets["logprob_mb_tokens"] = settings.logprob_budget
    for name, budget in budgets.items():
        if budget is not None and budget > least:
            yield [((f"policy.{section}.{name}", tokens),) for tokens in _halves(budget, least)]


def _more_gpus(settings: MemorySettings, model: ModelShape | None) -> Iterator[list[Overrides]]:
    sizes = settings.sizes
    if sizes.backend != "ray":
        start = (("cluster.backend", "ray"), ("cluster.gpus_per_node", 8))
        if sizes.dtensor:
            yield [start]
            return
        distributed = (f"{_OPTIMIZER}.use_distributed_optimizer", True)
        yield [(*start, distributed, *_tensor(settings, width)) for width in (1, 2, 4, 8)]
        spread = [(f"{MEGATRON}.expert_model_parallel_size", 8)] if model is not None and model.has_experts else []
        wide = [(f"{VLLM}.tensor_parallel_size", 4)] if sizes.uses_vllm else []
        nodes = [[("cluster.num_nodes", count)] if count > 1 else [] for count in (1, 2, 4, 8)]
        yield [(*start, distributed, *spread, *wide, *several) for several in nodes]
        return
    if sizes.dtensor:
        yield [((f"{DTENSOR}.tensor_parallel_size", width),) for width in (2, 4, 8) if width > sizes.tensor]
    else:
        yield [_tensor(settings, width) for width in (2, 4, 8) if width > sizes.tensor]
        if sizes.context < 8:
            yield [((f"{MEGATRON}.context_parallel_size", size),) for size in (2, 4, 8) if size > sizes.context]
        yield [((f"{MEGATRON}.pipeline_model_parallel_size", size),) for size in (2, 4, 8) if size > sizes.pipeline]
    yield [(("cluster.num_nodes", sizes.nodes * times),) for times in (2, 4, 8)]


def _tensor(settings: MemorySettings, width: int) -> Overrides:
    if width == settings.sizes.tensor:
        return ()
    parallel = (f"{MEGATRON}.tensor_model_parallel_size", width)
    if settings.sizes.sequence_parallel:
        return (parallel,)
    return (parallel, (f"{MEGATRON}.sequence_parallel", True))


def _halves(value: int, least: int) -> list[int]:
    """Ever smaller, down to the least."""
    found = []
    while value > least:
        value = max(least, value // 2)
        found.append(value)
    return found


def _lacks(memory: StepMemory, role: str) -> bool:
    return role in memory.generators and memory.generators[role][1].lacks


def _shares(settings: MemorySettings, memory: StepMemory, role: str, utilization: float) -> list[float]:
    """Shares of a GPU below the one there is that hold what vLLM needs at least."""
    steps = (0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05)
    least = memory.generators[role][1].least / (settings.gpu_memory_gib * GIB) if role in memory.generators else 0.0
    return [share for share in steps if least < share < utilization]


def _text(overrides: Overrides) -> str:
    # Two ladders may begin with the same overrides; of two values of a key the last holds, as when it was tried.
    changed = dict(overrides)
    return " ".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in changed.items()
    )
