"""The state of every rank's random generators, torch's and CUDA's, in a training checkpoint: JSON, no pickle.

Adapters' dropout alone draws at random. Ranks that draw different amounts (data-parallel ones have different rows) have
different states. In another layout there is no state that would go on as it was, so every rank then has rank 0's:
tensor-parallel ranks must draw alike.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

KEY = "random_states"


def random_states(layout: Sequence[int]) -> dict[str, Any]:
    """Of all ranks, JSON-able. Collective over the default process group.

    Args:
        layout: the parallel sizes that the ranks are in.
    """
    own = [get() for get, _ in _generators()]
    together, ranks = torch.cat(own), dist.get_world_size()
    found = [together]
    if ranks > 1:
        found = [torch.empty_like(together) for _ in range(ranks)]
        dist.all_gather(found, together)
    written = [base64.b64encode(state.numpy().tobytes()).decode() for state in found]
    different = list(dict.fromkeys(written))  # without dropout, one
    return {
        "layout": [ranks, *layout],
        "bytes": [len(state) for state in own],
        "states": different,
        "of_rank": [different.index(state) for state in written],
    }


def saved_random_states(position: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `random_states` made, out of a checkpoint's state file; of an earlier version, rank 0's torch generator.

    Raises:
        KeyError: there is neither.
    """
    if KEY in position:
        return dict(position[KEY])
    earlier = position["torch_rng"]  # base64, or a list of bytes of the dtensor policy
    state = earlier if isinstance(earlier, str) else base64.b64encode(bytes(earlier)).decode()
    return {"layout": [], "bytes": [torch.get_rng_state().numel()], "states": [state], "of_rank": [0]}


def restore_random_states(saved: Mapping[str, Any], layout: Sequence[int]) -> None:
    """Go on from this rank's saved state; from rank 0's in another layout. A generator that was not saved stays as it
    is (a checkpoint of a CPU that goes on on a GPU).

    Raises:
        KeyError, ValueError, IndexError, TypeError, RuntimeError: not what `random_states` made; torch raises the last.
    """
    same = list(saved["layout"]) == [dist.get_world_size(), *layout]
    number = saved["of_rank"][dist.get_rank() if same else 0]
    together = torch.frombuffer(bytearray(base64.b64decode(saved["states"][number])), dtype=torch.uint8)
    for (_, put), state in zip(_generators(), torch.split(together, list(saved["bytes"])), strict=False):
        put(state.clone())  # torch reads it from the start of its storage


def _generators() -> list[tuple[Any, Any]]:
    """How the state of each generator is read and set, uint8 on CPU: of torch, and of this rank's GPU."""
    found: list[tuple[Any, Any]] = [(torch.get_rng_state, torch.set_rng_state)]
    if torch.cuda.is_available():
        found.append((torch.cuda.get_rng_state, torch.cuda.set_rng_state))
    return found
