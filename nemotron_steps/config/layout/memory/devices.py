"""Which of a step's parts are on one device at the same time, and how much of it they take together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nemotron_steps.config.layout.memory.generation import GIB, GeneratorMemory, judge, policy_generator
from nemotron_steps.config.layout.memory.policy import (
    RankMemory,
    TeacherMemory,
    apart,
    beside_policy,
    rank_memory,
    settings_of,
)
from nemotron_steps.config.layout.memory.settings import UTILIZATION, BatchArithmetic, JudgeSettings, MemorySettings
from nemotron_steps.config.layout.memory.shape import ModelShape

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
class DeviceMemory:
    """One device of a kind: of all that are alike, the one that takes most.

    Attributes:
        name: what such a device does.
        phases: phase → what is there then.
        capacity: bytes; None for host memory, which is not known.
    """

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
    """A step's devices, its batch, and which models are not known."""

    batch: BatchArithmetic | None
    devices: tuple[DeviceMemory, ...]
    host: Mapping[str, int]
    """What for → bytes of host memory that one rank keeps."""
    unknown: tuple[str, ...]
    """Roles whose model is not known yet."""
    generators: Mapping[str, tuple[str, GeneratorMemory]]
    """Role of the policy's generator and of each judge → the key of its share of a GPU, and what it takes."""
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
                needed = device.needed(phase)
                what = f"a GPU that {device.name} has less memory than it needs {_WHILE[phase]}"
                lines = {key: count for key, count in device.phases[phase].items() if key[1] != "allocator"}
                found.append(Shortage(what, CAPACITY, needed, device.capacity, lines))
        for role, (key, memory) in self.generators.items():
            if memory.share is not None and memory.lacks:
                what = f"vLLM's share of a GPU does not hold the {role}'s weights and one sequence"
                lines = {(role, "weights"): memory.generates["weights"]}
                found.append(Shortage(what, key, memory.least, memory.share, lines))
        return found

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
    """Of a training step.

    Args:
        model_of: role (policy, a judge's, or `teacher NAME`) → the shape of its model; None where that is not known.
    """
    sizes = settings.sizes
    shape = model_of(POLICY)
    rank = None if shape is None else rank_memory(shape, settings)
    generator = policy_generator(shape, settings) if shape is not None and sizes.samples else None
    judges: list[tuple[JudgeSettings, GeneratorMemory]] = []
    unknown = [POLICY] if shape is None else []
    for role in settings.judges:
        model = model_of(role.role)
        if model is None:
            unknown.append(role.role)
        else:
            judges.append((role, judge(model, settings, role)))
    teachers: dict[str, ModelShape] = {}
    for name in settings.teachers:
        model = model_of(f"{TEACHER} {name}")
        if model is None:
            unknown.append(f"{TEACHER} {name}")
        else:
            teachers[name] = model
    taught = None
    if rank is not None and teachers and not sizes.teachers:
        taught = beside_policy(teachers, settings, rank.stage)
    devices = (
        *_devices(settings, rank, taught, generator, judges),
        *_teachers_devices(settings, teachers),
    )
    host = {} if rank is None else {**rank.host, **(taught.host if taught is not None else {})}
    generators = {role.role: (f"{role.key}.gpu_memory_utilization", memory) for role, memory in judges}
    if generator is not None:
        generators[GENERATOR] = (UTILIZATION, generator)
    return StepMemory(BatchArithmetic.of(settings), devices, host, tuple(unknown), generators, settings.on_gpu)


def _teachers_devices(settings: MemorySettings, models: Mapping[str, ModelShape]) -> Iterator[DeviceMemory]:
    """Of teachers that have devices of their own, one each."""
    for teacher in settings.sizes.teachers:
        if teacher.name in models:
            own = settings_of(settings, teacher)
            memory = apart(models[teacher.name], settings, teacher)
            lines = {**_lines(TEACHER, memory.rests), **_lines(TEACHER, memory.scores)}
            if settings.on_gpu:
                lines[DEVICE, "context"] = CONTEXT
                lines[DEVICE, "communicators"] = COMMUNICATORS if own.sizes.ranks > 1 else 0
                lines[DEVICE, "allocator"] = int(ALLOCATOR * sum(lines[key] for key in lines if key[0] == TEACHER))
            yield DeviceMemory(f"is teacher {teacher.name}'s", {TEACHES: _without_zeros(lines)}, _capacity(settings))


def _devices(
    settings: MemorySettings,
    rank: RankMemory | None,
    taught: TeacherMemory | None,
    generator: GeneratorMemory | None,
    judges: list[tuple[JudgeSettings, GeneratorMemory]],
) -> Iterator[DeviceMemory]:
    sizes = settings.sizes
    own_nodes = settings.on_gpu and sizes.judge_nodes > 0
    beside = [] if own_nodes else _on_one_device(settings, judges)
    together = sizes.colocated and generator is not None and rank is not None
    if rank is not None:
        yield _device(settings, rank, generator if together else None, beside if together else [], taught)
    if generator is not None and not together:
        yield _device(settings, None, generator, beside)
    if own_nodes:
        for role, memory in judges:
            yield _device(settings, None, None, [(role, memory)])


def _on_one_device(
    settings: MemorySettings, judges: list[tuple[JudgeSettings, GeneratorMemory]]
) -> list[tuple[JudgeSettings, GeneratorMemory]]:
    """Of judges that share generators' devices: all where there is one generator, else that which takes most."""
    generators = max(1, settings.sizes.generating // max(1, settings.sizes.generator_width))
    if generators >= len(judges) > 1:
        return [max(judges, key=lambda each: sum(each[1].generates.values()))]
    return judges


def _device(
    settings: MemorySettings,
    rank: RankMemory | None,
    generator: GeneratorMemory | None,
    judges: list[tuple[JudgeSettings, GeneratorMemory]],
    taught: TeacherMemory | None = None,
) -> DeviceMemory:
    phases: dict[str, dict[tuple[str, str], int]] = {}
    does = []
    if rank is not None:
        does.append("trains")
    if generator is not None:
        does.append("generates")
        phases[GENERATES] = _lines(GENERATOR, generator.generates)
    elif judges and rank is None:
        phases[JUDGES] = {}
    if rank is not None:
        if rank.scores and settings.has_reference:
            phases[SCORES] = _lines(POLICY, rank.scores)
        if taught is not None:
            phases[TEACHES] = _lines(TEACHER, taught.scores)
        phases[TRAINS] = _lines(POLICY, rank.trains)
        if taught is not None:
            phases[TRAINS] |= _lines(TEACHER, taught.trains)
    for phase, lines in phases.items():
        if rank is not None:
            phases[phase] = lines = {**_lines(POLICY, rank.rests), **lines}
        for line, count in taught.rests.items() if taught is not None else ():
            lines[TEACHER, line] = lines.get((TEACHER, line), 0) + count
        if generator is not None and phase != GENERATES:
            lines.update(_lines(GENERATOR, generator.rests))
        for role, memory in judges:
            lines.update(_lines(role.role, memory.generates))
    for lines in phases.values():
        if settings.on_gpu:
            lines.update(_overhead(settings, rank, generator, judges, lines))
    named = " and ".join(does) or "judges"
    shown = {phase: _without_zeros(lines) for phase, lines in phases.items()}
    return DeviceMemory(named, shown, _capacity(settings))


def _capacity(settings: MemorySettings) -> int | None:
    return int(settings.gpu_memory_gib * GIB) if settings.on_gpu else None


def _without_zeros(lines: Lines) -> Lines:
    return {key: count for key, count in lines.items() if count}


def _overhead(
    settings: MemorySettings,
    rank: RankMemory | None,
    generator: GeneratorMemory | None,
    judges: list[tuple[JudgeSettings, GeneratorMemory]],
    lines: Lines,
) -> dict[tuple[str, str], int]:
    """Contexts of the processes, and what torch's allocator holds in those that are not vLLM's, which has its share."""
    outside = {GENERATOR} if generator is not None and generator.own_process else set()
    outside |= {role.role for role, memory in judges if memory.own_process}
    on_ray = settings.sizes.backend == "ray"
    inside = {role for role, _ in lines} - outside
    own = len(inside - {TEACHER})  # teachers are in the policy's process
    processes = (own if on_ray else min(1, own)) + len(outside)
    held = sum(count for (role, _), count in lines.items() if role in inside)
    overhead = {(DEVICE, "context"): processes * CONTEXT}
    if rank is not None and settings.sizes.ranks > 1:
        overhead[DEVICE, "communicators"] = COMMUNICATORS
    overhead[DEVICE, "allocator"] = int(ALLOCATOR * held)
    return overhead


def _lines(role: str, lines: Mapping[str, int]) -> dict[tuple[str, str], int]:
    return {(role, line): count for line, count in lines.items()}
