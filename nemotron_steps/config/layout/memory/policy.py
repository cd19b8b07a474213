"""What one rank of the trained model takes, in device and in host memory; and teachers, beside it or apart."""

from collections.abc import Mapping
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
    FLOAT32,
    Held,
    ModelShape,
    held,
    held_ahead,
    held_by_adapters,
    layers_of,
)
from nemotron_steps.config.layout.parallel_config import CUTS, TeacherLayout

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
class Taken:
    """Bytes of one rank, by what they are for: whatever the phase (`rests`), what training and what a pass for logprobs
    alone add, and in host memory."""

    rests: Mapping[str, int] = field(default_factory=dict)
    trains: Mapping[str, int] = field(default_factory=dict)
    scores: Mapping[str, int] = field(default_factory=dict)
    host: Mapping[str, int] = field(default_factory=dict)
    stage: int = 0
    """Of the pipeline."""

    @property
    def most(self) -> int:
        """Bytes on the device in the phase that takes most."""
        return sum(self.rests.values()) + max(sum(self.trains.values()), sum(self.scores.values()))


def rank_memory(shape: ModelShape, settings: MemorySettings) -> Taken | None:
    """Of the rank that takes most; None where the batch does not split over the ranks."""
    if BatchArithmetic.of(settings) is None:
        return None
    stages = (0, settings.sizes.pipeline - 1)
    return max((stage_memory(shape, settings, stage) for stage in stages), key=lambda rank: rank.most)


def stage_memory(shape: ModelShape, settings: MemorySettings, stage: int) -> Taken:
    """Of a rank of one pipeline stage; the batch splits over the ranks."""
    state = _fully_sharded if settings.sizes.dtensor else _flat
    rests, gradients, host = state(shape, settings, stage)
    trains, scores = _passes(shape, settings, stage)
    weights = rests["weights"]
    if settings.has_reference and not (settings.adapts or settings.lora):  # the frozen weights are the reference
        host["reference weights"] = weights
        scores["reference weights"] = weights if not settings.sizes.dtensor else 0
    if settings.on_gpu:
        trains = {"gradients": gradients, **trains}
    else:  # they stay
        rests["gradients"] = gradients
    return Taken(rests, trains, scores, host, stage)


def _flat(shape: ModelShape, settings: MemorySettings, stage: int) -> tuple[dict[str, int], int, dict[str, int]]:
    """(weights and optimizer, gradients, in host memory) of the megatron policy."""
    sizes, element = settings.sizes, settings.element
    parts = [held(shape, sizes, stage, frozen_router=settings.freezes_router), held_ahead(shape, sizes, stage)]
    weights = (parts[0].frozen + parts[1].frozen) * FLOAT32
    if settings.adapts:
        weights, named = parts[0].bytes(element), (settings.adapter_targets, settings.adapter_excluded)
        parts = [held_by_adapters(shape, sizes, stage, settings.adapter_dim, *named)]
    elif not settings.detaches_mtp:
        parts = [parts[0] + parts[1]]
    gradients = masters = moments = host = 0
    offloaded = settings.offload_fraction if settings.offloads and settings.on_gpu else 0.0
    widths = WIDTHS[settings.exp_avg] + WIDTHS[settings.exp_avg_sq]
    for count, width, shards in (buffer for part in parts for buffer in _buffers(part, settings)):
        own = count // shards
        weights += count * width
        gradients += count * FLOAT32
        if width != FLOAT32:
            masters += own * (2 if settings.precision_aware else FLOAT32)
        away = own - min(own, -(-int(own * (1 - offloaded)) // LINE) * LINE) if offloaded else 0
        moments += (own - away) * widths
        host += away * widths
    return {"weights": weights, "optimizer": masters + moments}, gradients, {"optimizer": host} if host else {}


def _buffers(part: Held, settings: MemorySettings) -> list[tuple[int, int, int]]:
    """(elements with padding, bytes of one, shards of the optimizer) of each flat buffer of trained parameters."""
    sizes, element = settings.sizes, settings.element
    data = (sizes.data_parallel or 1) * sizes.context
    kinds = [(part.dense, element, data), (part.exact, FLOAT32, data)]
    if element == FLOAT32:  # of one type, they are in one buffer
        kinds = [(part.dense + part.exact, element, data)]
    found = []
    for count, width, ranks in (*kinds, (part.experts, element, data * sizes.tensor // sizes.expert)):
        shards = ranks if settings.distributed else 1
        whole = shards * ALIGNMENT
        found.append((-(-count // whole) * whole, width, shards))
    return found


def _fully_sharded(
    shape: ModelShape, settings: MemorySettings, stage: int
) -> tuple[dict[str, int], int, dict[str, int]]:
    """The same of the dtensor policy: float32, all of it cut over the data-parallel ranks."""
    sizes = settings.sizes
    whole = held(shape, sizes, stage, frozen_router=settings.freezes_router) + held_ahead(shape, sizes, stage)
    ranks = sizes.data_parallel or 1
    weights = trained = -(-whole.total // ranks) * FLOAT32
    if settings.lora:
        adapters = held_by_adapters(shape, sizes, stage, settings.lora_dim, fused=False).dense
        trained = -(-adapters // ranks) * FLOAT32
        weights += trained
    lines = {"weights": weights, "optimizer": 2 * trained}
    if settings.cpu_offload and settings.on_gpu:
        return {"weights": 0, "optimizer": 0}, 0, lines
    return lines, trained, {}


def _passes(shape: ModelShape, settings: MemorySettings, stage: int) -> tuple[dict[str, int], dict[str, int]]:
    """What a training micro-batch takes, and one whose logprobs alone are computed."""
    batch, scored = BatchArithmetic.of(settings), BatchArithmetic.of(settings, logprobs=True)
    assert batch is not None and scored is not None
    sizes, last = settings.sizes, stage == settings.sizes.pipeline - 1
    layers = layers_of(shape, sizes.pipeline, stage)
    tokens, rows = batch.tokens / sizes.context, batch.micro_rows
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
    activations = one + (flying - 1) * inputs + int(tokens * settings.share * shape.hidden * settings.element)
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
    tokens = batch.tokens / settings.sizes.context
    layers = set(layers_of(shape, settings.sizes.pipeline, stage))
    widest = max((int(kept(shape, layer, settings).per_token * tokens) for layer in layers), default=0)
    return int(tokens * 4 * shape.hidden * settings.element) + widest


def _gathered(shape: ModelShape, settings: MemorySettings) -> int:
    """FSDP2's whole layers: this one and the next in the precision of computation, one layer's gradients in float32,
    and the embedding and output layer."""
    if settings.sizes.data_parallel == 1 and settings.element == FLOAT32:
        return 0
    ends = (1 if shape.tied else 2) * shape.vocabulary * shape.hidden
    layer = (held(shape, settings.sizes, 0).total - ends) // max(len(shape.layers), 1)
    return 2 * layer * settings.element + layer * FLOAT32 + ends * settings.element


def _logprobs(shape: ModelShape, settings: MemorySettings, batch: BatchArithmetic, *, with_gradient: bool) -> int:
    """Logits of a chunk of tokens, and, with gradients, that of the output layer (engine/policy/logprob.py)."""
    sizes, element, hidden = settings.sizes, settings.element, shape.hidden
    rows = batch.trained / sizes.context
    vocabulary = shape.vocabulary / sizes.tensor
    if with_gradient and settings.compares:
        each = compared_bytes(settings)
    elif settings.on_gpu and element != FLOAT32:
        each = element
    else:
        each = 2 * FLOAT32 if element == FLOAT32 else FLOAT32 + 2 * element
    logits = min(settings.chunk, rows) * vocabulary * each
    states = rows * hidden * element
    if not with_gradient:
        return int(logits + 2 * states)
    weight = 0 if settings.adapts or settings.lora else vocabulary * hidden * (FLOAT32 + 2 * element)
    kept_logprobs = 2 * states if settings.compares else _kept_logprobs(shape, settings, batch)
    return int(logits + weight + 3 * states + kept_logprobs)


def compared_bytes(settings: MemorySettings) -> int:
    """Of a logit while the policy is compared with a teacher (engine/policy/logprob.py): float32, of the
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


def beside_policy(models: Mapping[str, ModelShape], settings: MemorySettings, stage: int) -> Taken:
    """Of teachers on the policy's ranks (engine/policy/teachers.py), one pipeline stage's."""
    sizes, last = settings.sizes, stage == settings.sizes.pipeline - 1
    moves = settings.offloads_teachers and settings.on_gpu
    scored = _scored(settings, models)
    weights, passes = 0, []
    for shape in models.values():
        own = _weights(shape, settings, stage)
        weights += own
        passes.append({"weights": own if moves else 0, **_forward(shape, settings, stage)})
    rests = {} if moves else {"weights": weights}
    if settings.compares and settings.topk is None and last and moves:
        # The output layers stay where every training step needs them; beside the policy they are no copies.
        layers = sum(-(-each.vocabulary // sizes.tensor) * each.hidden for each in models.values())
        rests["output layers"] = layers * settings.element
    batch = BatchArithmetic.of(settings)
    # Of the rows as they come, and of the tokens that are trained.
    trains = {} if batch is None else {"scores": int(2 * scored * batch.tokens / sizes.context)}
    host = {"teachers' weights": weights} if moves else {}
    host["teachers' scores"] = int(scored * (sizes.rollouts or 0) * settings.longest)
    return Taken(rests, trains, max(passes, key=lambda lines: sum(lines.values())), host)


def apart(shape: ModelShape, settings: MemorySettings, teacher: TeacherLayout) -> Taken:
    """Of a rank of a teacher that has devices of its own: of the pipeline stage that takes most."""
    own, stages = settings_of(settings, teacher), (0, teacher.pipeline - 1)
    taken = (Taken({"weights": _weights(shape, own, at)}, scores=_forward(shape, own, at)) for at in stages)
    return max(taken, key=lambda each: each.most)


def settings_of(settings: MemorySettings, teacher: TeacherLayout) -> MemorySettings:
    """A run's settings with the layout, precision and micro-batches of a teacher."""
    cluster = settings.sizes.gpus_per_node
    sizes = replace(
        settings.sizes,
        **{name: getattr(teacher, name) for name in (*CUTS, "sequence_parallel", "nodes")},
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
    sizes = replace(settings.sizes, mtp_layers=0)
    return held(shape, sizes, stage, frozen_router=settings.freezes_router).bytes(settings.element)


def _forward(shape: ModelShape, settings: MemorySettings, stage: int) -> dict[str, int]:
    """A micro-batch's forward pass, and on the last stage what is made of a chunk of its logits: them, in float32, and
    their exponentials (engine/policy/logprob.py)."""
    batch = BatchArithmetic.of(settings, logprobs=True)
    if batch is None:
        return {}
    sizes, element = settings.sizes, settings.element
    lines = {"activations": forward_bytes(shape, settings, stage, batch)}
    if stage == sizes.pipeline - 1:
        rows = batch.trained / sizes.context
        logits = min(settings.chunk, rows) * shape.vocabulary / sizes.tensor
        each = 2 * FLOAT32 + (element if element != FLOAT32 else 0)
        states = 2 * rows * shape.hidden * element
        lines["logprobs"] = int(logits * each + states + rows * _scored(settings, {"": shape}))
    return lines


def _scored(settings: MemorySettings, models: Mapping[str, ModelShape]) -> int:
    """Bytes of what is kept of a token: its heaviest tokens, or the state of the widest teacher; and its logprob."""
    if not settings.compares:
        return FLOAT32
    if settings.topk is None:
        return FLOAT32 * (1 + max((each.hidden for each in models.values()), default=0))
    return FLOAT32 + TOKEN_AND_LOGPROB * min([settings.topk, *(each.vocabulary for each in models.values())])
