"""What a layer keeps for its backward pass, in bytes, tensor by tensor as engine/policy saves them.

Three paths of the engine keep different tensors: CUDA (Triton kernels, FlashAttention), CPU in float32 (a layer's
halves as one function each), and CPU in bfloat16 (torch's own operators). Of CUDA in float32, which is for tests, the
first is taken with 4 bytes an element; attention's padding there is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemotron_steps.config.layout.memory.settings import MemorySettings
from nemotron_steps.config.layout.memory.shape import ATTENTION, EXPERTS, FLOAT32, MAMBA, MLP, ModelShape

INT16, INT32, INT64 = 2, 4, 8
SCAN_SCORES = 2**25
"""Elements of the triangular matrices that the plain scan of Mamba-2 has at once."""


@dataclass(frozen=True)
class Kept:
    """Bytes of one layer: for each of this rank's tokens, whatever these are, and for each sequence."""

    per_token: float = 0.0
    fixed: int = 0
    per_row: float = 0.0

    def __add__(self, other: Kept) -> Kept:
        return Kept(self.per_token + other.per_token, self.fixed + other.fixed, self.per_row + other.per_row)

    def of(self, tokens: float, rows: int = 0) -> int:
        """Bytes for so many tokens in so many sequences."""
        return int(self.per_token * tokens + self.per_row * rows) + self.fixed


def kept(shape: ModelShape, layer: str, settings: MemorySettings) -> Kept:
    """By one layer that is not computed again. A rank's tokens are those of its context-parallel share; of a
    sequence-parallel rank's the norms and the experts see a part, which is taken into account here."""
    return sum((_of_mixer(shape, mixer, settings) for mixer in layer), Kept())


def kept_by_all(shape: ModelShape, settings: MemorySettings) -> Kept:
    """Beside the layers: the tokens, cosines and sines of their positions, and the experts to replay."""
    if settings.sizes.dtensor:  # the last norm is of every token
        return Kept(INT64 + (FLOAT32 + settings.element) * shape.hidden)
    routes = shape.routes * INT16 if settings.sizes.router_replay else 0
    return Kept(INT64 + 2 * shape.head_dim * settings.element + routes)


def kept_to_recompute(shape: ModelShape, settings: MemorySettings, layers: Sequence[str]) -> Kept:
    """By layers that are computed again: what goes into each, the residual stream and what is still to be added to it,
    where these are tensors of their own."""
    if settings.sizes.dtensor:
        return Kept(len(layers) * shape.hidden * settings.element)
    inputs, adds = 1, False
    for layer in layers[:-1]:
        plain = settings.one_function and layer[-1] in "*-"  # adds its result itself, and leaves that to no other layer
        inputs += int(adds or plain or len(layer) > 1) + int(not plain)
        adds = not plain
    return Kept(inputs * shape.hidden * settings.element * settings.share)


def kept_ahead(shape: ModelShape, settings: MemorySettings) -> Kept:
    """By one depth of multi-token prediction: norms of the states before it, of the tokens ahead and of its own last
    states, what they are projected from, and its layers."""
    norm = _norm(shape, settings)
    return sum((kept(shape, layer, settings) for layer in shape.ahead), Kept(INT64) + norm + norm + norm)


def kept_before_ahead(shape: ModelShape, settings: MemorySettings) -> Kept:
    """By the last norm of the model's states, of all tokens, before multi-token prediction; without what it gives,
    which the first depth keeps."""
    norm = _norm(shape, settings)
    return Kept(norm.per_token / settings.share - shape.hidden * settings.element)


def inputs_ahead(shape: ModelShape, settings: MemorySettings) -> Kept:
    """By one depth that is computed again: the states before it and the tokens ahead."""
    return Kept(INT64 + 2 * shape.hidden * settings.element * settings.share)


def workspace(shape: ModelShape, layer: str, settings: MemorySettings, tokens: float) -> int:
    """What a layer's own passes need at most beside what is kept: gradients of its widest tensors."""
    tensor, element, mamba = settings.sizes.tensor, settings.element, shape.mamba
    products, widest, scan = 3 if shape.gated else 2, 0.0, 0
    for mixer in layer:
        if mixer == MLP:
            wide = products * (shape.ffn / tensor) * element
        elif mixer == EXPERTS:
            chosen = shape.experts_per_token * settings.share
            wide = chosen * (products * shape.expert_ffn + 2 * shape.outer) * element
        elif mixer == ATTENTION:
            heads = shape.heads + shape.key_value_heads
            wide = (2 * heads * element + 2 * heads * FLOAT32) * shape.head_dim / tensor
        else:
            assert mamba is not None
            wide = (2 * mamba.channels * FLOAT32 + mamba.rows * element) / tensor
            scan = int(3 * min(tokens * mamba.heads / tensor * mamba.chunk, SCAN_SCORES) * FLOAT32)
        widest = max(widest, wide)
    return int((widest + 2 * shape.hidden * element) * tokens) + scan


def _is_plain(shape: ModelShape, mixer: str, settings: MemorySettings) -> bool:
    """Whether a mixer is one function with its norm (engine/kernels/cpu_layers.py)."""
    whole = settings.sizes.context == 1 and not (shape.experts and shape.gated) and not shape.qkv_bias
    return settings.one_function and (mixer == MLP or (mixer == ATTENTION and whole))


def _of_mixer(shape: ModelShape, mixer: str, settings: MemorySettings) -> Kept:
    if settings.sizes.dtensor:
        return _of_transformers(shape, mixer, settings)
    plain = _is_plain(shape, mixer, settings)
    if mixer == MLP:
        own = _mlp(shape, settings, plain=plain)
    else:
        own = {ATTENTION: _attention, EXPERTS: _experts, MAMBA: _mamba}[mixer](shape, settings)
    return own if plain else own + _norm(shape, settings)


def _norm(shape: ModelShape, settings: MemorySettings) -> Kept:
    """The residual stream that is normed, the root mean square, and the normed states that the next product takes."""
    element = settings.element
    exact = not settings.on_gpu and element != FLOAT32  # computed in float32, whose two tensors are kept
    states = 2 * FLOAT32 + element if exact else 2 * element
    return Kept((states * shape.hidden + FLOAT32) * settings.share)


def _attention(shape: ModelShape, settings: MemorySettings) -> Kept:
    sizes, element = settings.sizes, settings.element
    width, heads = shape.head_dim, shape.heads / sizes.tensor
    shared = max(shape.key_value_heads / sizes.tensor, 1.0)
    mixed, queries, both = (heads + 2 * shared) * width, heads * width, 2 * shared * width
    norms = FLOAT32 * (heads + shared) if shape.qk_norm or settings.on_gpu else 0.0
    if settings.on_gpu:  # what the heads are split from; queries, keys, values and the result; log-sum-exps
        return Kept((mixed + 2 * queries + both) * element + norms + FLOAT32 * heads)
    if element == FLOAT32:  # what the heads are split from, the result; log-sum-exps
        kept = Kept((mixed + queries) * element + FLOAT32 * heads)
        if _is_plain(shape, ATTENTION, settings):
            folded = int(shape.hidden * mixed) * element
            kept += Kept(shape.hidden * element + FLOAT32, folded)
        return kept
    # Keys and values are views: what they were rotated and split from stays with them.
    turned = (heads + shared) * width
    normed = (FLOAT32 + element) * turned + norms if shape.qk_norm else 0.0
    return Kept((2 * queries + turned + mixed) * element + normed + FLOAT32 * heads)


def _mlp(shape: ModelShape, settings: MemorySettings, width: int | None = None, *, plain: bool = False) -> Kept:
    """The products before and after the activation."""
    element, inner = settings.element, (width or shape.ffn) / settings.sizes.tensor
    products = 3 if shape.gated else 2
    if plain:  # with the normed states, and the weights that the norm's are folded into
        folded = int((products - 1) * inner * shape.hidden) * element
        return Kept((products * inner + shape.hidden) * element + FLOAT32, folded)
    sigmoid = shape.gated and not settings.on_gpu  # which torch's own gate keeps
    return Kept((products + sigmoid) * inner * element)


def _experts(shape: ModelShape, settings: MemorySettings) -> Kept:
    """Router and experts, of each of the experts that a token chooses; shared experts beside them."""
    element, chosen = settings.element, shape.experts_per_token
    inner = (2 if not shape.gated else 3 if settings.on_gpu else 4) * shape.expert_ffn
    exact = not settings.freezes_router and element != FLOAT32  # the router's input and weights, in float32
    router = (FLOAT32 * shape.hidden if exact else 0) + FLOAT32 * shape.experts
    # Chosen experts, their order and its inverse; weights before and after normalisation, and in the model's precision.
    indices = chosen * (3 * INT64 + 2 * FLOAT32 + element)
    token = router + indices + chosen * (2 * shape.outer + inner) * element
    if shape.latent:
        token += shape.latent * element
    elif not shape.shared_ffn and element != FLOAT32:
        token -= shape.hidden * element  # what the norm gave is sorted by expert, and otherwise only the router's
    kept = Kept(token * settings.share, shape.experts * shape.hidden * FLOAT32 if exact else 0)
    return kept + _mlp(shape, settings, shape.shared_ffn) if shape.shared_ffn else kept


def _mamba(shape: ModelShape, settings: MemorySettings) -> Kept:
    """The projection; the convolution's input and result; the scan's result and the normed one; time steps. A sequence
    that goes on from a shared prompt has that prompt's state, twice."""
    mamba, sizes = shape.mamba, settings.sizes
    assert mamba is not None
    wide = mamba.rows + 2 * mamba.channels + 2 * mamba.inner
    exact = 2 * mamba.heads + mamba.groups
    shares = sizes.samples and (sizes.group or 1) > 1
    states = 2 * mamba.inner * mamba.state * FLOAT32 / (sizes.tensor * sizes.context) if shares else 0.0
    return Kept((wide * settings.element + exact * FLOAT32) / sizes.tensor, per_row=states)


def _of_transformers(shape: ModelShape, mixer: str, settings: MemorySettings) -> Kept:
    """Of transformers' own modules, in which every operator keeps its inputs, norms in float32."""
    element, hidden, tensor = settings.element, shape.hidden, settings.sizes.tensor
    norm = Kept((FLOAT32 + 2 * element) * hidden + FLOAT32)
    if mixer == ATTENTION:
        query, shared = (count * shape.head_dim / tensor for count in (shape.heads, shape.key_value_heads))
        normed = (FLOAT32 + element) * (query + shared) if shape.qk_norm else 0.0
        return norm + Kept(normed + 2 * (query + shared) * element + FLOAT32 * shape.heads / tensor)
    if mixer == MLP:
        return norm + Kept(4 * shape.ffn / tensor * element)
    if mixer == EXPERTS:
        chosen = (4 * shape.expert_ffn + 3 * shape.outer) * shape.experts_per_token
        return norm + Kept(chosen * element + 4 * shape.shared_ffn * element)
    return norm + _mamba(shape, settings)
