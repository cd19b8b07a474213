"""Which of a step's parts are on one device at the same time, how much of it they take together, and what to paste
where that is more than there is."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemotron_steps.config.layout.constraints import violations
from nemotron_steps.config.layout.memory.generation import GIB, GeneratorMemory, judge, policy_generator
from nemotron_steps.config.layout.memory.policy import Taken, apart, beside_policy, rank_memory
from nemotron_steps.config.layout.memory.settings import UTILIZATION, BatchArithmetic, MemorySettings
from nemotron_steps.config.layout.memory.shape import ModelShape
from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.config.layout.parallel_config import DTENSOR, KEYS, MEGATRON, JudgeLayout

CONTEXT = int(0.6 * GIB)
"""A process's CUDA context, cuBLAS workspaces and loaded kernels."""
COMMUNICATORS = int(0.5 * GIB)
"""NCCL's buffers, of a rank that has others beside it."""
ALLOCATOR = 0.1
"""What torch's caching allocator holds beside live tensors, blocks of sizes that nothing asks for: a share of those.
Given back when there is no other memory, so it refuses nothing."""
POLICY, GENERATOR, DEVICE = "policy", "generator", "device"
TEACHER = "teacher"
GENERATES, SCORES, TEACHES, TRAINS, JUDGES = "generate", "reference", "teach", "train", "judge"
CAPACITY = "cluster.gpu_memory_gib"

_WHILE = {
    GENERATES: "while it generates",
    SCORES: "while it computes reference logprobs",
    TEACHES: "while a teacher scores",
    TRAINS: "while it trains",
    JUDGES: "while it judges",
}

Lines = Mapping[tuple[str, str], int]
"""(role, what for) → bytes."""


@dataclass(frozen=True)
class Part:
    """What a role has on a device, by what it is for: whatever the phase, and in some phases instead. `outside`: in a
    process of its own, which is vLLM's."""

    role: str
    rests: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]
    outside: bool = False


@dataclass(frozen=True)
class DeviceMemory:
    """One device of a kind, named by what it does: of all that are alike, the one that takes most. `phases`: phase →
    what is there then; `capacity`: bytes, None for host memory, which is not known."""

    name: str
    phases: Mapping[str, Lines]
    capacity: int | None

    def total(self, phase: str) -> int:
        """Bytes in a phase, what the allocator holds for nothing included."""
        return sum(self.phases[phase].values())

    def needed(self, phase: str) -> int:
        """Bytes in a phase that there is no doing without."""
        return sum(count for (_, line), count in self.phases[phase].items() if line != "allocator")

    @property
    def peak(self) -> int:
        """Bytes in the phase that takes most."""
        return max(map(self.total, self.phases), default=0)

    @property
    def fullest(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=self.needed)

    @property
    def fits(self) -> bool:
        """Whether what is needed is not more than there is."""
        return self.capacity is None or self.needed(self.fullest) <= self.capacity

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable form, in bytes."""
        phases = {
            phase: {"total": self.total(phase), "lines": {f"{r}.{line}": n for (r, line), n in lines.items()}}
            for phase, lines in self.phases.items()
        }
        return {"name": self.name, "capacity": self.capacity, "peak": self.peak, "phases": phases}


@dataclass(frozen=True)
class Shortage:
    """Something that has less memory than it needs; `key` is the config key that says how much there is."""

    what: str
    key: str
    needed: int
    there: int
    lines: Lines


@dataclass(frozen=True)
class StepMemory:
    """A step's devices and its batch. `host`: what for → bytes of a rank's host memory; `unknown`: roles of unknown
    models; `generators`: role (a judge's too) → the key of its share of a GPU, and what it takes."""

    batch: BatchArithmetic | None
    devices: tuple[DeviceMemory, ...]
    host: Mapping[str, int]
    unknown: tuple[str, ...]
    generators: Mapping[str, tuple[str, GeneratorMemory]]
    on_gpu: bool

    @property
    def cache_tokens(self) -> dict[str, int]:
        """Role → tokens that the cache of its vLLM has room for, in one engine."""
        return {role: memory.room for role, (_, memory) in self.generators.items() if memory.room is not None}

    @property
    def shortages(self) -> list[Shortage]:
        """Everything that does not fit, devices first."""
        found = []
        for device in self.devices:
            if device.capacity is not None and not device.fits:
                phase = device.fullest
                what = f"a GPU that {device.name} has less memory than it needs {_WHILE[phase]}"
                lines = {key: count for key, count in device.phases[phase].items() if key[1] != "allocator"}
                found.append(Shortage(what, CAPACITY, device.needed(phase), device.capacity, lines))
        for role, (key, memory) in self.generators.items():
            if memory.share is not None and memory.least > memory.share:
                what = f"vLLM's share of a GPU does not hold the {role}'s weights and one sequence"
                lines = {(role, "weights"): memory.generates["weights"]}
                found.append(Shortage(what, key, memory.least, memory.share, lines))
        return found

    @property
    def lacking(self) -> int:
        """Bytes that are not there, of everything that does not fit."""
        return sum(each.needed - each.there for each in self.shortages)

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return {
            "batch": None if self.batch is None else vars(self.batch),
            "devices": [device.to_dict() for device in self.devices],
            "host": dict(self.host),
            "unknown": list(self.unknown),
            "cache_tokens": self.cache_tokens,
        }


def step_memory(settings: MemorySettings, model_of: Callable[[str], ModelShape | None]) -> StepMemory:
    """Of a training step. `model_of`: role (policy, a judge's, or `teacher NAME`) → the shape of its model; None where
    that is not known."""
    sizes = settings.sizes
    roles = [POLICY, *(each.role for each in sizes.judges), *(f"{TEACHER} {name}" for name in settings.teachers)]
    models = {role: model for role in roles if (model := model_of(role)) is not None}
    shape = models.get(POLICY)
    rank = None if shape is None else rank_memory(shape, settings)
    generator = policy_generator(shape, settings) if shape is not None and sizes.samples else None
    judges = [(each, judge(models[each.role], settings, each)) for each in sizes.judges if each.role in models]
    teachers = {name: models[f"{TEACHER} {name}"] for name in settings.teachers if f"{TEACHER} {name}" in models}
    taught = None
    if rank is not None and teachers and not sizes.teachers:
        taught = beside_policy(teachers, settings, rank.stage)
    host = {} if rank is None else {**rank.host, **(taught.host if taught is not None else {})}
    generators = {role.role: (f"{role.section}.gpu_memory_utilization", memory) for role, memory in judges}
    if generator is not None:
        generators[GENERATOR] = (UTILIZATION, generator)
    devices = [*_devices(settings, rank, taught, generator, judges)]
    for teacher in sizes.teachers:
        if teacher.name in teachers:
            memory = apart(teachers[teacher.name], settings, teacher)
            part = Part(TEACHER, {}, {TEACHES: _sum(memory.rests, memory.scores)})
            ranks = teacher.ranks(sizes.gpus_per_node)
            devices.append(_device(settings, f"is teacher {teacher.name}'s", [part], ranks))
    unknown = tuple(role for role in roles if role not in models)
    return StepMemory(BatchArithmetic.of(settings), tuple(devices), host, unknown, generators, settings.on_gpu)


def _devices(
    settings: MemorySettings,
    rank: Taken | None,
    taught: Taken | None,
    generator: GeneratorMemory | None,
    judges: Sequence[tuple[JudgeLayout, GeneratorMemory]],
) -> Iterator[DeviceMemory]:
    sizes, trains, generates = settings.sizes, list[Part](), list[Part]()
    if rank is not None:
        phases = {TRAINS: _sum(rank.rests, rank.trains)}
        if rank.scores and settings.has_reference:
            phases[SCORES] = _sum(rank.rests, rank.scores)
        trains.append(Part(POLICY, rank.rests, phases))
    if taught is not None:
        phases = {TEACHES: _sum(taught.rests, taught.scores), TRAINS: _sum(taught.rests, taught.trains)}
        trains.append(Part(TEACHER, taught.rests, phases))
    if generator is not None:
        generates.append(Part(GENERATOR, generator.rests, {GENERATES: generator.generates}, generator.own_process))
    own_nodes = settings.on_gpu and sizes.judge_nodes > 0
    beside = [Part(role.role, memory.generates, {}, memory.own_process) for role, memory in judges if not own_nodes]
    if len(beside) > 1 and max(1, sizes.generating // max(1, sizes.generator_width)) >= len(beside):
        # With as many generators each judge shares another one's devices.
        beside = [max(beside, key=lambda part: sum(part.rests.values()))]
    if trains and generates and sizes.colocated:
        yield _device(settings, "trains and generates", [*trains, *generates, *beside], sizes.ranks)
    else:
        if trains:
            yield _device(settings, "trains", trains, sizes.ranks)
        if generates:
            yield _device(settings, "generates", [*generates, *beside])
    for role, memory in judges if own_nodes else ():
        part = Part(role.role, {}, {JUDGES: memory.generates}, memory.own_process)
        yield _device(settings, "judges", [part])


def _device(settings: MemorySettings, name: str, parts: Sequence[Part], ranks: int = 1) -> DeviceMemory:
    """Parts on one device, and with GPUs the contexts of their processes and what torch's allocator holds in those
    that are not vLLM's, which has its share."""
    phases: dict[str, Lines] = {}
    outside = {part.role for part in parts if part.outside}
    for phase in _WHILE:
        if not any(phase in part.phases for part in parts):
            continue
        lines = dict[tuple[str, str], int]()
        for part in parts:
            lines |= {(part.role, line): count for line, count in part.phases.get(phase, part.rests).items()}
        if settings.on_gpu:
            inside = {role for role, _ in lines} - outside
            own = len(inside - {TEACHER}) or len(inside)  # teachers beside a policy are in its process
            processes = (own if settings.sizes.backend == "ray" else min(1, own)) + len(outside)
            held = sum(count for (role, _), count in lines.items() if role in inside)
            lines[DEVICE, "context"] = processes * CONTEXT
            lines[DEVICE, "communicators"] = COMMUNICATORS if ranks > 1 else 0
            lines[DEVICE, "allocator"] = int(ALLOCATOR * held)
        phases[phase] = {key: count for key, count in lines.items() if count}
    return DeviceMemory(name, phases, int(settings.gpu_memory_gib * GIB) if settings.on_gpu else None)


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {line: one.get(line, 0) + other.get(line, 0) for line in {**one, **other}}


def memory_measures(
    get: Callable[[str], Any],
    model_of: Callable[[str], ModelShape | None],
    model: ModelSpec | None = None,
    most_nodes: int | None = None,
) -> dict[str, Any]:
    """Config key → value, after which everything fits; none where no measure helps. A changed layout has to divide
    `model`, and `most_nodes` is how many nodes there are, if known."""

    def after(values: Mapping[str, Any]) -> float:
        """Bytes that are still lacking."""
        changed = MemorySettings.read(lambda key: values.get(key, get(key)))
        return math.inf if violations(changed.sizes, model) else step_memory(changed, model_of).lacking

    settings = MemorySettings.read(get)
    memory = step_memory(settings, model_of)
    measures = list(_measures(settings, memory, most_nodes or math.inf))
    for measure in measures:
        if after(measure) == 0:
            return measure
    taken, lacking = dict[str, Any](), float(memory.lacking)
    for measure in measures:
        less = after({**taken, **measure})
        if less < lacking:
            taken, lacking = {**taken, **measure}, less
    if lacking:
        return {}
    for measure in reversed(measures):  # what proved more than enough
        fewer = {key: value for key, value in taken.items() if key not in measure}
        if after(fewer) == 0:
            taken = fewer
    return taken


def _measures(settings: MemorySettings, memory: StepMemory, most_nodes: float) -> Iterator[dict[str, Any]]:
    """What an expert would try, the cheapest first."""
    sizes, twentieth = settings.sizes, settings.gpu_memory_gib * GIB / 20
    lacking = max((each.needed - each.there for each in memory.shortages if each.key == CAPACITY), default=0)
    for key, needs in memory.generators.values():
        if needs.share is not None and needs.least <= 19 * twentieth:
            left = math.floor((needs.share - lacking) / twentieth)
            yield {key: max(left, math.ceil(needs.least / twentieth)) / 20}
    embedded = {"policy.generation": settings.max_sequences} if sizes.samples and not sizes.uses_vllm else {}
    embedded |= {judge.section: judge.max_sequences for judge in sizes.judges if judge.backend != "vllm"}
    for section, rows in embedded.items():
        yield {f"{section}.max_sequences": min(8, rows)}
    if settings.teachers and not settings.offloads_teachers:
        yield {"on_policy_distillation.offload": True}
    for teacher in {each.section: each for each in sizes.teachers}.values():
        yield {teacher.key("tensor"): teacher.tensor * 2, teacher.key("sequence_parallel"): True}
    trains, scores, least = settings.budget(), settings.budget(logprobs=True), 1
    names = ("train_micro_batch_size", "logprob_batch_size")
    if trains is None or scores is None:
        trains, scores = settings.micro_batch, settings.logprob_batch
    else:
        section = "sequence_packing" if settings.packs else "dynamic_batching"
        names = (f"{section}.train_mb_tokens", f"{section}.logprob_mb_tokens")
        least = settings.longest * settings.rows_per_unit
    for name, count in zip(names, (trains, scores), strict=True):
        if count > least:
            yield {f"policy.{name}": least}
    yield {f"{DTENSOR if sizes.dtensor else MEGATRON}.activation_checkpointing": True}
    if sizes.dtensor:
        yield {sizes.key("tensor"): sizes.tensor * 2}
        yield {f"{DTENSOR}.cpu_offload": True}
    else:
        optimizer = f"{MEGATRON}.optimizer"
        yield {f"{optimizer}.use_distributed_optimizer": True}
        yield {f"{optimizer}.use_precision_aware_optimizer": True}
        for times in (2, 4, 8):
            yield {KEYS["expert"]: sizes.expert * times}
            yield {KEYS["tensor"]: sizes.tensor * times, KEYS["sequence_parallel"]: True}
        yield {f"{optimizer}.optimizer_cpu_offload": True, f"{optimizer}.optimizer_offload_fraction": 1.0}
    if sizes.uses_vllm:
        experts = [KEYS["generator_experts"]] if sizes.generator_experts > 1 else []
        yield dict.fromkeys([KEYS["generator_width"], *experts], sizes.generator_width * 2)
    if sizes.backend == "ray" and sizes.nodes * 2 <= most_nodes:
        yield {KEYS["nodes"]: sizes.nodes * 2}
