"""What a generator of the policy, or a judge, takes on each of its devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nemotron_steps.config.layout.memory.activations import INT16, INT32, INT64
from nemotron_steps.config.layout.memory.settings import JudgeSettings, MemorySettings, prompt_and_answer
from nemotron_steps.config.layout.memory.shape import FLOAT32, ModelShape, held
from nemotron_steps.config.layout.parallel_config import ParallelConfig

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
    """Bytes on one device.

    Attributes:
        generates: while it samples, by what they are for.
        rests: while the policy trains.
        own_process: whether it has a CUDA context of its own.
        room: tokens that its cache has room for; None where the cache grows with what is asked.
        share: of the GPU, which it takes whole; None where it takes what it needs.
        least: what that share has to hold at least.
    """

    generates: Mapping[str, int]
    rests: Mapping[str, int]
    own_process: bool = False
    room: int | None = None
    share: int | None = None
    least: int = 0

    @property
    def lacks(self) -> bool:
        """Whether its share is less than it needs."""
        return self.share is not None and self.least > self.share


def policy_generator(shape: ModelShape, settings: MemorySettings) -> GeneratorMemory:
    """Of the policy's own."""
    sizes = settings.sizes
    if not sizes.uses_vllm:
        prompt, answer = prompt_and_answer(settings)
        shares = sizes.colocated and not settings.asynchronous
        return _embedded(
            shape,
            settings,
            rows=settings.max_sequences,
            prompt=prompt,
            answer=answer,
            group=sizes.group or 1,
            element=settings.element,
            frees=shares,
            records=sizes.router_replay,
        )
    own_process = sizes.generator_width == 1 and settings.own_process is not False
    sleeps = own_process and sizes.colocated and not settings.asynchronous
    return _vllm(
        shape,
        settings,
        sizes.generator_width,
        settings.utilization,
        experts=sizes.generator_experts,
        sequences=settings.max_num_seqs,
        length=settings.longest,
        sleeps=sleeps,
        own_process=own_process or sizes.generator_width > 1,
        records=sizes.router_replay,
    )


def judge(shape: ModelShape, settings: MemorySettings, role: JudgeSettings) -> GeneratorMemory:
    """Of a judge, which holds what it has between questions."""
    if role.vllm:
        return _vllm(
            shape,
            settings,
            role.tensor,
            role.utilization,
            experts=1,
            sequences=role.max_sequences,
            length=role.length,
            sleeps=False,
            own_process=True,
        )
    element = 2 if settings.on_gpu else FLOAT32
    answer = min(role.length, 4096)
    return _embedded(
        shape,
        settings,
        rows=role.max_sequences,
        prompt=role.length - answer,
        answer=answer,
        group=1,
        element=element,
        frees=False,
    )


def _embedded(
    shape: ModelShape,
    settings: MemorySettings,
    *,
    rows: int,
    prompt: int,
    answer: int,
    group: int,
    element: int,
    frees: bool,
    records: bool = False,
) -> GeneratorMemory:
    weights = held(shape, ParallelConfig(), 0).total * element
    length = prompt + answer
    most = length + max(64, length // 8)
    shared = group > 1 and prompt >= SHARED_TOKENS
    columns = min((answer if shared else length) + 2, most)
    cache = rows * _row_bytes(shape, columns, element, records)
    prompts = -(-rows // group) if shared else 0
    prefixes = prompts * (prompt * shape.kv_bytes_per_token * element // 2 + shape.state_bytes(element))
    widening = cache // WIDENED if settings.on_gpu and columns > FIRST_COLUMNS else 0
    logits = rows * shape.vocabulary * (element + 3 * FLOAT32)
    generates = {"weights": weights, "cache": cache + widening + prefixes, "logits": logits}
    kept = not frees or not settings.on_gpu or cache * SMALL_CACHE <= settings.gpu_memory_gib * GIB
    rests = {"weights": weights, **({"cache": cache + prefixes} if kept else {})}
    return GeneratorMemory(generates, rests)


def _row_bytes(shape: ModelShape, columns: int, element: int, records: bool) -> int:
    """What the embedded generator's cache holds of one sequence, in `columns` columns."""
    # Beside keys and values: tokens, logprobs and what hides a row's padding.
    column = shape.kv_bytes_per_token * element // 2 + INT64 + FLOAT32 + FLOAT32 * shape.key_value_heads
    column += shape.routes * INT16 if records else 0
    return columns * column + shape.state_bytes(element, decoding=True)


def rows_that_fit(shape: ModelShape, free: int, *, most: int, length: int, element: int) -> int:
    """How many sequences the embedded generator can decode at once on a GPU that has little else to do.

    Args:
        free: bytes of the GPU that nothing has, before the generator's weights.
        most: more than these are not asked for.
        length: most tokens of prompt and answer together.
        element: bytes of a weight, a key and a value.

    Returns:
        From 1 to `most`.
    """
    weights = held(shape, ParallelConfig(), 0).total * element
    cache = _row_bytes(shape, length + max(64, length // 8), element, False)
    row = cache + cache // WIDENED + shape.vocabulary * (element + 3 * FLOAT32)
    # A tenth is for the forward passes of prompts, and for graphs.
    return max(1, min(most, (free * 9 // 10 - weights) // row))


def _vllm(
    shape: ModelShape,
    settings: MemorySettings,
    width: int,
    utilization: float,
    *,
    experts: int,
    sequences: int,
    length: int,
    sleeps: bool,
    own_process: bool,
    records: bool = False,
) -> GeneratorMemory:
    """A share of the GPU, of which the cache is what weights leave."""
    element = 2 if settings.on_gpu else settings.element
    whole = held(shape, ParallelConfig(tensor=width, expert=experts if experts > 1 else 1), 0)
    spread = whole.experts if experts > 1 else whole.experts // width
    weights = (whole.dense + whole.exact + spread) * element + whole.frozen * FLOAT32
    if not settings.on_gpu:
        return GeneratorMemory({"weights": weights}, {"weights": weights}, own_process)
    share = int(utilization * settings.gpu_memory_gib * GIB)
    token = max(shape.kv_bytes_per_token // min(width, shape.key_value_heads), 1)
    state = shape.state_bytes(element) // width
    # A first forward pass as wide as any is made before the rest becomes the cache.
    least = weights + sequences * shape.vocabulary // width * FLOAT32 + length * token + state
    room = max(0, share - weights) // token
    generates = {"weights": weights, "cache": max(0, share - weights)}
    rests = {"asleep": SLEEPING} if sleeps else dict(generates)
    if records:  # of every layer, and never asleep
        layers = len(shape.layers)
        routes = {"recorded experts": RECORDED_TOKENS * layers * shape.experts_per_token * INT32}
        generates, rests = {**generates, **routes}, {**rests, **routes}
    return GeneratorMemory(generates, rests, own_process, room, share, least)
