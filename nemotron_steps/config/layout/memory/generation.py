"""What a generator of the policy, or a judge, takes on each of its devices."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nemotron_steps.config.layout.memory.activations import INT16, INT32, INT64
from nemotron_steps.config.layout.memory.settings import MemorySettings, prompt_and_answer
from nemotron_steps.config.layout.memory.shape import FLOAT32, ModelShape, held
from nemotron_steps.config.layout.parallel_config import JudgeLayout, ParallelConfig

GIB = 2**30
SLEEPING = int(0.75 * GIB)
"""What a vLLM that sleeps keeps beside its CUDA context: graphs, communicators, workspaces."""
SHARED_TOKENS = 32
"""Prompts from this length on are held once for all answers to them (engine/generation/embedded/prefix_cache.py)."""
FIRST_COLUMNS = 512
WIDENED = 3
"""From FIRST_COLUMNS on a cache is widened by half, keys and values in turn: a third of it exists twice."""
RECORDED_TOKENS = 2**14
"""Tokens of a step whose experts vLLM has room for on the GPU, beside its share: as many as its widest batch has."""
SMALL_CACHE = 8
"""A cache of at most this part of a GPU stays between generations (engine/generation/embedded/generator.py)."""


@dataclass(frozen=True)
class GeneratorMemory:
    """Bytes on one device while it samples, and while the policy trains (`rests`).

    `room`: tokens that its cache has room for; None where the cache grows with what is asked. `share`: of the GPU,
    which it takes whole (None where it takes what it needs), and `least`: what that has to hold at least."""

    generates: Mapping[str, int]
    rests: Mapping[str, int]
    own_process: bool = False
    room: int | None = None
    share: int | None = None
    least: int = 0


def policy_generator(shape: ModelShape, settings: MemorySettings) -> GeneratorMemory:
    """Of the policy's own."""
    sizes = settings.sizes
    frees = sizes.colocated and not settings.asynchronous
    own = JudgeLayout("policy", sizes.generator_width, None, "", settings.utilization, length=settings.longest)
    if not sizes.uses_vllm:
        own, answer = replace(own, max_sequences=settings.max_sequences), prompt_and_answer(settings)[1]
        records = sizes.router_replay
        return _embedded(shape, settings, own, answer, settings.element, sizes.group or 1, frees=frees, records=records)
    own = replace(own, max_sequences=settings.max_num_seqs)
    apart = sizes.generator_width > 1 or settings.own_process is not False
    memory = _vllm(shape, settings, own, experts=sizes.generator_experts, own_process=apart)
    sleeps = sizes.generator_width == 1 and apart and frees and settings.on_gpu
    rests = {"asleep": SLEEPING} if sleeps else memory.rests
    routes = {}
    if sizes.router_replay and settings.on_gpu:  # of every layer, and never asleep
        routes = {"recorded experts": RECORDED_TOKENS * len(shape.layers) * shape.experts_per_token * INT32}
    return replace(memory, generates={**memory.generates, **routes}, rests={**rests, **routes})


def judge(shape: ModelShape, settings: MemorySettings, role: JudgeLayout) -> GeneratorMemory:
    """Of a judge, which holds what it has between questions."""
    if role.backend == "vllm":
        return _vllm(shape, settings, role)
    return _embedded(shape, settings, role, min(role.length, 4096), 2 if settings.on_gpu else FLOAT32)


def _embedded(
    shape: ModelShape,
    settings: MemorySettings,
    layout: JudgeLayout,
    answer: int,
    element: int,
    group: int = 1,
    *,
    frees: bool = False,
    records: bool = False,
) -> GeneratorMemory:
    """Of sequences of which an `answer` is generated, `group` of each prompt."""
    rows, length, prompt = layout.max_sequences, layout.length, layout.length - answer
    weights = held(shape, ParallelConfig(), 0).total * element
    shared = group > 1 and prompt >= SHARED_TOKENS
    columns = min((answer if shared else length) + 2, length + max(64, length // 8))
    cache = rows * _row_bytes(shape, columns, element, records)
    prompts = -(-rows // group) if shared else 0
    prefixes = prompts * (prompt * shape.kv_bytes_per_token * element // 2 + shape.state_bytes(element))
    widening = cache // WIDENED if settings.on_gpu and columns > FIRST_COLUMNS else 0
    logits = rows * shape.vocabulary * (element + 3 * FLOAT32)
    generates = {"weights": weights, "cache": cache + widening + prefixes, "logits": logits}
    kept = not frees or not settings.on_gpu or cache * SMALL_CACHE <= settings.gpu_memory_gib * GIB
    return GeneratorMemory(generates, {"weights": weights, **({"cache": cache + prefixes} if kept else {})})


def _row_bytes(shape: ModelShape, columns: int, element: int, records: bool) -> int:
    """What the embedded generator's cache holds of one sequence, in `columns` columns."""
    # Beside keys and values: tokens, logprobs and what hides a row's padding.
    column = shape.kv_bytes_per_token * element // 2 + INT64 + FLOAT32 + FLOAT32 * shape.key_value_heads
    column += shape.routes * INT16 if records else 0
    return columns * column + shape.state_bytes(element, decoding=True)


def rows_that_fit(shape: ModelShape, free: int, *, most: int, length: int, element: int) -> int:
    """How many sequences, from 1 to `most`, the embedded generator can decode to `length` tokens at once on a GPU that
    has little else to do: `free` bytes before the generator's weights, of `element` bytes each."""
    weights = held(shape, ParallelConfig(), 0).total * element
    cache = _row_bytes(shape, length + max(64, length // 8), element, False)
    row = cache + cache // WIDENED + shape.vocabulary * (element + 3 * FLOAT32)
    # A tenth is for the forward passes of prompts, and for graphs.
    return max(1, min(most, (free * 9 // 10 - weights) // row))


def _vllm(
    shape: ModelShape, settings: MemorySettings, layout: JudgeLayout, *, experts: int = 1, own_process: bool = True
) -> GeneratorMemory:
    """A share of the GPU, of which the cache is what weights leave."""
    element, width = 2 if settings.on_gpu else settings.element, layout.width
    whole = held(shape, ParallelConfig(tensor=width, expert=max(1, experts)), 0)
    spread = whole.experts if experts > 1 else whole.experts // width
    weights = (whole.dense + whole.exact + spread) * element + whole.frozen * FLOAT32
    if not settings.on_gpu:
        return GeneratorMemory({"weights": weights}, {"weights": weights}, own_process)
    share = int(layout.utilization * settings.gpu_memory_gib * GIB)
    token = max(shape.kv_bytes_per_token // min(width, shape.key_value_heads), 1)
    state = shape.state_bytes(element) // width
    # A first forward pass as wide as any is made before the rest becomes the cache.
    least = weights + layout.max_sequences * shape.vocabulary // width * FLOAT32 + layout.length * token + state
    lines = {"weights": weights, "cache": max(0, share - weights)}
    return GeneratorMemory(lines, lines, own_process, lines["cache"] // token, share, least)
