"""What teachers of on-policy distillation take: beside the policy on each of its ranks, or on devices of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from nemotron_steps.config.layout.memory.policy import forward_bytes
from nemotron_steps.config.layout.memory.settings import BatchArithmetic, MemorySettings
from nemotron_steps.config.layout.memory.shape import FLOAT32, ModelShape, held
from nemotron_steps.config.layout.parallel_config import TeacherLayout

TOKEN_AND_LOGPROB = 8
"""Bytes of one of a teacher's heaviest tokens."""


@dataclass(frozen=True)
class TeacherMemory:
    """Bytes on one device, by what they are for.

    Attributes:
        rests: whatever the phase.
        scores: what scoring adds.
        trains: what training on the scores adds.
        host: in host memory.
    """

    rests: Mapping[str, int] = field(default_factory=dict)
    scores: Mapping[str, int] = field(default_factory=dict)
    trains: Mapping[str, int] = field(default_factory=dict)
    host: Mapping[str, int] = field(default_factory=dict)


def beside_policy(models: Mapping[str, ModelShape], settings: MemorySettings, stage: int) -> TeacherMemory:
    """Of teachers on the policy's ranks (engine/policy/teachers.py), one pipeline stage's."""
    sizes, last = settings.sizes, stage == settings.sizes.pipeline - 1
    weights = {name: _weights(shape, settings, stage) for name, shape in models.items()}
    moves = settings.offloads_teachers and settings.on_gpu
    passes = {}
    for name, shape in models.items():
        passes[name] = {"weights": weights[name] if moves else 0, **_forward(shape, settings, stage)}
    largest = max(passes.values(), key=lambda lines: sum(lines.values()), default={})
    rests = {} if moves else {"weights": sum(weights.values())}
    trains: dict[str, int] = {}
    if settings.compares and settings.topk is None and last:
        # The output layers stay where every training step needs them; beside the policy they are no copies.
        layers = sum(-(-each.vocabulary // sizes.tensor) * each.hidden for each in models.values())
        if moves:
            rests["output layers"] = layers * settings.element
    batch = BatchArithmetic.of(settings)
    if batch is not None:
        # Of the rows as they come, and of the tokens that are trained.
        trains = {"scores": int(2 * _scored(settings, list(models.values())) * batch.tokens / sizes.context)}
    host = {"teachers' weights": sum(weights.values())} if moves else {}
    rollouts = sizes.rollouts or 0
    host["teachers' scores"] = int(_scored(settings, list(models.values())) * rollouts * settings.longest)
    return TeacherMemory(rests, largest, trains, host)


def apart(shape: ModelShape, settings: MemorySettings, teacher: TeacherLayout) -> TeacherMemory:
    """Of a rank of a teacher that has devices of its own: of the pipeline stage that takes most."""
    own = settings_of(settings, teacher)
    found = []
    for stage in sorted({0, teacher.pipeline - 1}):
        found.append(TeacherMemory({"weights": _weights(shape, own, stage)}, _forward(shape, own, stage)))
    return max(found, key=lambda each: sum(each.rests.values()) + sum(each.scores.values()))


def settings_of(settings: MemorySettings, teacher: TeacherLayout) -> MemorySettings:
    """A run's settings with the layout, precision and micro-batches of a teacher."""
    cluster = settings.sizes.gpus_per_node
    sizes = replace(
        settings.sizes,
        tensor=teacher.tensor,
        pipeline=teacher.pipeline,
        context=teacher.context,
        expert=teacher.expert,
        sequence_parallel=teacher.sequence_parallel,
        nodes=teacher.nodes,
        gpus_per_node=(teacher.gpus_per_node or cluster) if cluster else 0,
        workers=None if cluster else teacher.ranks(0),
        judge_nodes=0,
        colocated=True,
        mtp_layers=0,
        router_replay=False,
        batch=settings.sizes.rollouts,
        teachers=(),
    )
    changed = replace(settings, sizes=sizes, precision=teacher.precision or settings.precision)
    if teacher.micro_batch is None:
        return changed
    return replace(changed, packed_logprob_tokens=None, balanced_logprob_tokens=None, logprob_batch=teacher.micro_batch)


def _weights(shape: ModelShape, settings: MemorySettings, stage: int) -> int:
    own = held(shape, replace(settings.sizes, mtp_layers=0), stage, frozen_router=settings.freezes_router)
    return (own.dense + own.experts) * settings.element + (own.exact + own.frozen) * FLOAT32


def _forward(shape: ModelShape, settings: MemorySettings, stage: int) -> dict[str, int]:
    """A micro-batch's forward pass, and on the last stage what is made of a chunk of its logits: them, in float32, and
    their exponentials (engine/policy/teacher_logprob.py)."""
    batch = BatchArithmetic.of(settings, logprobs=True)
    if batch is None:
        return {}
    sizes, element = settings.sizes, settings.element
    lines = {"activations": forward_bytes(shape, replace(settings, adapts=False), stage, batch)}
    if stage == sizes.pipeline - 1:
        rows = batch.trained / sizes.context
        logits = min(settings.chunk, rows) * shape.vocabulary / sizes.tensor
        each = 2 * FLOAT32 + (element if element != FLOAT32 else 0)
        states = 2 * rows * shape.hidden * element
        lines["logprobs"] = int(logits * each + states + rows * _scored(settings, [shape]))
    return lines


def _scored(settings: MemorySettings, models: list[ModelShape]) -> int:
    """Bytes of what is kept of a token: its heaviest tokens, or the state of the widest teacher; and its logprob."""
    if not settings.compares:
        return FLOAT32
    if settings.topk is None:
        return FLOAT32 * (1 + max((each.hidden for each in models), default=0))
    return FLOAT32 + TOKEN_AND_LOGPROB * min([settings.topk, *(each.vocabulary for each in models)])
