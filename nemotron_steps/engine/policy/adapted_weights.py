"""Weights of which adapters alone change: a generator is given the frozen ones once, and then what adapters change.

same process     the frozen weights lie in the policy: merged sums of the adapted ones replace the generator's
another process  A and B travel, and are added where the weights arrive (weight_sync/adapted.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

Weights = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class AdaptedWeights:
    """What `Policy.weights` returns where adapters are trained. Iterated, all weights with adapters added.

    Attributes:
        source: the same object for all of one policy, whose frozen weights never change.
        whole: every weight, adapters added.
        changed: those that have one.
        frozen: every weight, without adapters.
        adapters: A, and B times its scale, of each that has one.
        whole_modules: whether those that have one are all of the modules that vLLM fuses them into; a generator that
            loads modules whole is given `whole` otherwise.
    """

    source: object
    whole: Callable[[], Weights]
    changed: Callable[[], Weights]
    frozen: Callable[[], Weights]
    adapters: Callable[[], Weights]
    whole_modules: bool

    def __iter__(self) -> Weights:
        return self.whole()

    @property
    def bytes(self) -> int:
        """Of A and B. Collective."""
        return sum(tensor.nbytes for _, tensor in self.adapters())


@dataclass(frozen=True)
class ChangedWeights:
    """Some of a model's weights, for a generator that has the others."""

    weights: Iterable[tuple[str, torch.Tensor]]

    def __iter__(self) -> Weights:
        return iter(self.weights)


def after(weights: object, source: object) -> Iterable[tuple[str, torch.Tensor]]:
    """What a generator whose frozen weights are of `source` has to load."""
    if isinstance(weights, AdaptedWeights) and source is weights.source:
        return ChangedWeights(weights.changed())
    assert isinstance(weights, Iterable)
    return weights
