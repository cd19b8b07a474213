"""What one rank of the trained model takes, in device and in host memory; and teachers, beside it or apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from nemotron_steps.config.layout.memory.activations import (
    Kept,
    inputs_ahead,
    kept,
    kept_ahead,
    kept_before_ahead,
    kept_by_all,
    kept_to_recompute,
    workspace,
)
from nemotron_steps.config.layout.memory.settings import BatchArithmetic, MemorySettings
from nemotron_steps.config.layout.memory.shape import (
    ATTENTION,
    FLOAT32,
    MAMBA,
    MLP,
    Held,
    ModelShape,
    held,
    held_ahead,
    layers_of,
    mixers,
)
from nemotron_steps.config.layout.parallel_config import ParallelConfig, TeacherLayout

ALIGNMENT = 64
"""Elements that a flat buffer's shards are a multiple of (engine/policy/param_and_grad_buffer.py)."""
LINE = 128
"""Elements that what stays of a moment on the GPU is rounded up to (engine/policy/param_and_grad_buffer.py)."""
KEPT_RESIDUALS = 64 * 2**20
"""Bytes up to which the logprobs' residuals are kept (engine/policy/logprob.py)."""
WIDTHS = {"float32": 4, "bfloat16": 2}
TOKEN_AND_LOGPROB = 8
"""Bytes of one of a teacher's heaviest tokens."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank, by what they are for.

    Attributes:
        stage: its pipeline stage.
        rests: what is there whatever the phase.
        trains: what training adds.
        scores: what a pass for logprobs alone adds.
        host: in host memory.
    """

    stage: int
    rests: Mapping[str, int]
    trains: Mapping[str, int]
    scores: Mapping[str, int]
    host: Mapping[str, int] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """Bytes on the device in the phase that takes most."""
        return sum(self.rests.values()) + max(sum(self.trains.values()), sum(self.scores.values()))


def rank_memory(shape: ModelShape, settings: MemorySettings) -> RankMemory | None:
    """Of the rank that takes most; None where the batch does not split over the ranks."""
    if BatchArithmetic.of(settings) is None:
        return None
    stages = {0, settings.sizes.pipeline - 1}
    return max((stage_memory(shape, settings, stage) for stage in sorted(stages)), key=lambda rank: rank.most)


def buffers(shape: ModelShape, settings: MemorySettings, stage: int) -> list[tuple[int, int, int]]:
    """(elements with padding, bytes of one, shards of the optimizer) of each flat buffer of trained parameters."""
    own, ahead = _parts(shape, settings, stage)
    parts = [own, ahead] if settings.detaches_mtp else [own + ahead]
    return [buffer for part in parts for buffer in _buffers_of(part, settings)]


def _buffers_of(part: Held, settings: MemorySettings) -> list[tuple[int, int, int]]:
    sizes = settings.sizes
    data = (sizes.data_parallel or 1) * sizes.context
    stage_ranks = data * sizes.tensor
    found = []
    for count, element, ranks in (
        (part.dense, settings.element, data),
        (part.exact, FLOAT32, data),
        (part.experts, settings.element, stage_ranks // sizes.expert),
    ):
        if count:
            shards = ranks if settings.distributed else 1
            whole = shards * ALIGNMENT
            found.append((-(-count // whole) * whole, element, shards))
    if settings.element == FLOAT32 and part.exact:  # of one type, they are in one buffer
        merged = part.dense + part.exact
        shards = data if settings.distributed else 1
        whole = shards * ALIGNMENT
        found[:2] = [(-(-merged // whole) * whole, FLOAT32, shards)]
    return found


def _parts(shape: ModelShape, settings: MemorySettings, stage: int) -> tuple[Held, Held]:
    """What a rank trains and holds beside it in float32: of the model, and of multi-token prediction."""
    if settings.adapts:
        named = settings.adapter_dim, settings.adapter_targets, settings.adapter_excluded
        return held_by_adapters(shape, settings.sizes, stage, *named), Held()
    own = held(shape, settings.sizes, stage, frozen_router=settings.freezes_router)
    return own, held_ahead(shape, settings.sizes, stage)


def stage_memory(shape: ModelShape, settings: MemorySettings, stage: int) -> RankMemory:
    """Of a rank of one pipeline stage; the batch splits over the ranks."""
    own, ahead = _parts(shape, settings, stage)
    part = own + ahead
    rests, gradients, host = (_fully_sharded if settings.sizes.dtensor else _flat)(shape, settings, stage, part)
    trains, scores = _passes(shape, settings, stage)
    weights = rests["weights"]
    if settings.has_reference and not (settings.adapts or settings.lora):  # the frozen weights are the reference
        host["reference weights"] = weights
        scores["reference weights"] = weights if not settings.sizes.dtensor else 0
    trains = {"gradients": gradients, **trains}
    if not settings.on_gpu:  # on CPU gradients stay
        rests, trains = {**rests, "gradients": trains.pop("gradients")}, trains
    return RankMemory(stage, rests, trains, scores, host)


def _flat(
    shape: ModelShape, settings: MemorySettings, stage: int, part: Held
) -> tuple[dict[str, int], int, dict[str, int]]:
    """(weights and optimizer, gradients, in host memory) of the megatron policy."""
    weights, gradients, masters, moments = part.frozen * FLOAT32, 0, 0, 0
    if settings.adapts:
        whole = held(shape, settings.sizes, stage, frozen_router=settings.freezes_router)
        weights = (whole.dense + whole.experts) * settings.element + (whole.exact + whole.frozen) * FLOAT32
    offloaded = settings.offload_fraction if settings.offloads and settings.on_gpu else 0.0
    widths = WIDTHS[settings.exp_avg] + WIDTHS[settings.exp_avg_sq]
    host = 0
    for count, element, shards in buffers(shape, settings, stage):
        own = count // shards
        weights += count * element
        gradients += count * FLOAT32
        if element != FLOAT32:
            masters += own * (2 if settings.precision_aware else FLOAT32)
        away = own - min(own, -(-int(own * (1 - offloaded)) // LINE) * LINE) if offloaded else 0
        moments += (own - away) * widths
        host += away * widths
    return (
        {"weights": weights, "optimizer": masters + moments},
        gradients,
        {"optimizer": host} if host else {},
    )


def _fully_sharded(
    shape: ModelShape, settings: MemorySettings, stage: int, part: Held
) -> tuple[dict[str, int], int, dict[str, int]]:
    """The same of the dtensor policy: float32, all of it cut over the data-parallel ranks."""
    ranks = settings.sizes.data_parallel or 1
    own = -(-part.total // ranks) * FLOAT32
    if settings.lora:
        adapters = held_by_adapters(shape, settings.sizes, stage, settings.lora_dim, (), (), fused=False).dense
        trained = -(-adapters // ranks) * FLOAT32
        if settings.cpu_offload and settings.on_gpu:
            return {"weights": 0, "optimizer": 0}, 0, {"weights": own + trained, "optimizer": 2 * trained}
        return {"weights": own + trained, "optimizer": 2 * trained}, trained, {}
    if settings.cpu_offload and settings.on_gpu:
        return {"weights": 0, "optimizer": 0}, 0, {"weights": own, "optimizer": 2 * own}
    return {"weights": own, "optimizer": 2 * own}, own, {}


def _passes(shape: ModelShape, settings: MemorySettings, stage: int) -> tuple[dict[str, int], dict[str, int]]:
    """What a training micro-batch takes, and one whose logprobs alone are computed."""
    batch, scored = BatchArithmetic.of(settings), BatchArithmetic.of(settings, logprobs=True)
    assert batch is not None and scored is not None
    sizes, element = settings.sizes, settings.element
    layers = layers_of(shape, sizes.pipeline, stage)
    last = stage == sizes.pipeline - 1

    tokens, rows = batch.tokens / sizes.context, batch.micro_rows
    share = tokens / (sizes.tensor if sizes.sequence_parallel else 1)
    own = {layer: kept(shape, layer, settings) for layer in set(layers)}
    depths = sizes.mtp_layers if last and shape.blocks else 0
    block = kept_ahead(shape, settings) if depths else Kept()
    if settings.recomputes:
        ahead = depths * inputs_ahead(shape, settings).of(tokens)
        inputs = kept_to_recompute(shape, settings, layers).of(tokens) + ahead
        one = inputs + max(each.of(tokens, rows) for each in (*own.values(), block))
    else:
        inputs = one = sum(own[layer].of(tokens, rows) for layer in layers) + depths * block.of(tokens, rows)
    before = kept_before_ahead(shape, settings).of(tokens) if depths else 0
    inputs, one = inputs + before, one + before
    # One forward, one backward: the first stages are ahead by as many micro-batches as there are stages after them.
    flying = min(sizes.pipeline - stage, batch.micro_batches)
    activations = one + (flying - 1) * inputs + int(share * shape.hidden * element)
    activations += flying * kept_by_all(shape, settings).of(tokens)
    computed = {*own, *(shape.ahead if depths else ())}
    work = max((workspace(shape, layer, settings, tokens) for layer in computed), default=0)
    gathered = _gathered(shape, settings) if sizes.dtensor else 0
    trains = {"activations": activations + work + gathered}
    scores = {"activations": forward_bytes(shape, settings, stage, scored) + gathered}
    if last:
        trains["logprobs"] = _logprobs(shape, settings, batch, with_gradient=True)
        trains["logprobs"] += depths * _kept_logprobs(shape, settings, batch)
        scores["logprobs"] = _logprobs(shape, settings, scored, with_gradient=False)
    return trains, scores


def forward_bytes(shape: ModelShape, settings: MemorySettings, stage: int, batch: BatchArithmetic) -> int:
    """Of a micro-batch's forward pass alone: one layer's tensors, since without gradients none outlives its layer."""
    context = settings.sizes.context
    layers = set(layers_of(shape, settings.sizes.pipeline, stage))
    widest = max((int(kept(shape, layer, settings).per_token * batch.tokens / context) for layer in layers), default=0)
    return int(batch.tokens / context * 4 * shape.hidden * settings.element) + widest


def _gathered(shape: ModelShape, settings: MemorySettings) -> int:
    """FSDP2's whole layers: this one and the next in the precision of computation, one layer's gradients in float32,
    and the embedding and output layer."""
    count = len(shape.layers)
    whole = held(shape, settings.sizes, 0)
    ends = (1 if shape.tied else 2) * shape.vocabulary * shape.hidden
    layer = (whole.total - ends) // max(count, 1)
    if settings.sizes.data_parallel == 1 and settings.element == FLOAT32:
        return 0
    return 2 * layer * settings.element + layer * FLOAT32 + ends * settings.element


def _logprobs(shape: ModelShape, settings: MemorySettings, batch: BatchArithmetic, *, with_gradient: bool) -> int:
    """Logits of a chunk of tokens, and, with gradients, that of the output layer (engine/policy/logprob.py)."""
    sizes, element, hidden = settings.sizes, settings.element, shape.hidden
    rows = batch.trained / sizes.context
    vocabulary = shape.vocabulary / sizes.tensor
    chunk = min(settings.chunk, rows)
    if with_gradient and settings.compares:
        logits = chunk * vocabulary * _compared(settings)
    elif settings.on_gpu and element != FLOAT32:
        logits = chunk * vocabulary * element
    else:
        logits = chunk * vocabulary * (2 * FLOAT32 if element == FLOAT32 else FLOAT32 + 2 * element)
    if not with_gradient:
        return int(logits + 2 * rows * hidden * element)
    weight = 0 if settings.adapts or settings.lora else vocabulary * hidden * (FLOAT32 + 2 * element)
    kept_logprobs = 2 * rows * hidden * element if settings.compares else _kept_logprobs(shape, settings, batch)
    return int(logits + weight + 3 * rows * hidden * element + kept_logprobs)


def _compared(settings: MemorySettings) -> int:
    """Bytes of a logit while the policy is compared with a teacher (engine/policy/teacher_logprob.py): float32, of the
    logits, their logs, probabilities and products; of everywhere's gradient under zero_outside_topk; and, where whole
    distributions are compared, of the teacher's and of both KLs."""
    if settings.topk is None:
        return 12 * FLOAT32
    return (6 if settings.zero_outside else 4) * FLOAT32


def _kept_logprobs(shape: ModelShape, settings: MemorySettings, batch: BatchArithmetic) -> int:
    """What the logprobs of a micro-batch's trained tokens keep for the backward pass."""
    rows = batch.trained / settings.sizes.context
    residuals = rows * shape.vocabulary / settings.sizes.tensor * settings.element
    return int(2 * rows * shape.hidden * settings.element + (residuals if residuals <= KEPT_RESIDUALS else 0))


def held_by_adapters(
    shape: ModelShape,
    sizes: ParallelConfig,
    stage: int,
    dim: int,
    targets: Sequence[str],
    excluded: Sequence[str],
    *,
    fused: bool = True,
) -> Held:
    """Elements of low-rank adapters (models/adapters.py) of a rank: of linears that `targets` and `excluded` name; a
    pattern counts as what its last part names, in every layer.

    A column-parallel linear has its rows of B and all of A, a row-parallel one its columns of A and all of B. Not
    fused, as the dtensor policy has them, every projection has an A of its own.
    """
    query, both = shape.heads * shape.head_dim, 2 * shape.key_value_heads * shape.head_dim
    hidden, tensor = shape.hidden, sizes.tensor
    three, two = (1, 1) if fused else (3, 2 if shape.gated else 1)
    widths = {
        ATTENTION: {"linear_qkv": (three * hidden, query + both), "linear_proj": (hidden, query)},
        MLP: {"linear_fc1": (two * hidden, (2 if shape.gated else 1) * shape.ffn), "linear_fc2": (hidden, shape.ffn)},
    }
    if shape.mamba is not None:
        inner = shape.mamba.inner
        widths[MAMBA] = {"in_proj": (hidden, shape.mamba.rows), "out_proj": (hidden, inner)}
    named, without = ({name.rpartition(".")[2] for name in names} for names in (targets, excluded))
    total = 0
    for mixer in mixers(layers_of(shape, sizes.pipeline, stage)):
        for name, (whole, cut) in widths.get(mixer, {}).items():
            if (not named or name in named) and name not in without:
                total += dim * (whole + cut // tensor)
    return Held(dense=total)


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
