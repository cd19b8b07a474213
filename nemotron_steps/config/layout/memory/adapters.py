"""How many elements of low-rank adapters one rank holds (models/adapters.py has the parameters themselves)."""

from __future__ import annotations

from collections.abc import Sequence

from nemotron_steps.config.layout.memory.shape import ATTENTION, MAMBA, MLP, Held, ModelShape, layers_of, mixers
from nemotron_steps.config.layout.sizes import LayoutSizes


def held_by_adapters(
    shape: ModelShape,
    sizes: LayoutSizes,
    stage: int,
    dim: int,
    targets: Sequence[str],
    excluded: Sequence[str],
    *,
    fused: bool = True,
) -> Held:
    """Of the linears that `targets` and `excluded` name; a pattern counts as what its last part names, in every layer.

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
