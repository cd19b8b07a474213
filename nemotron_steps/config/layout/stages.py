"""Which layers a pipeline stage has."""

from __future__ import annotations

from itertools import pairwise


def stage_layers(layers: int, stages: int) -> list[range]:
    """The layers of each stage, counted from 0: neighbours, as even as they come.

    The first stages have one more where they do not come out even: the last has the output layer beside its own.
    """
    each, extra = divmod(layers, stages)
    starts = [stage * each + min(stage, extra) for stage in range(stages + 1)]
    return [range(start, end) for start, end in pairwise(starts)]
