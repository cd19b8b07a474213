"""Counts the memory of tensors on CPU, where no allocator does."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class Peak(TorchDispatchMode):
    """The most bytes of tensors that were made and lived at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                place = storage._cdata
                if place not in self.live:
                    self.live[place] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, place, None)
                    self.most = max(self.most, sum(self.live.values()))
        return result
