"""Bytes of policies' weights, gradients and optimizer state, rank by rank, on torch's fake process group.

A program of its own: given a file of [model folder, `policy.*`, number of ranks], prints a list of what the first and
the last rank of each hold.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from nemotron_steps.engine.policy.megatron import MegatronPolicy
from tests.steps.build_ranks import build


def count(policy: MegatronPolicy) -> dict[str, int]:
    weights = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in policy.model.parameters()}
    optimizer = policy.optimizer
    masters = {m.untyped_storage().data_ptr(): m.nbytes for m in optimizer.masters if m.numel()}
    moments = [moment for kept in optimizer.moments for moment in kept.values()]
    return {
        "weights": sum(weights.values()),
        "gradients": sum(buffer.grads.nbytes for buffer in policy.buffers),
        # Those of a float32 policy are its weights.
        "optimizer": sum(n for place, n in masters.items() if place not in weights)
        + sum(moment.on_device.nbytes for moment in moments),
        "host": sum(moment.on_host.nbytes for moment in moments),
    }


def main(file: str) -> None:
    torch.set_num_threads(1)
    found: list[Any] = []
    for folder, settings, world in json.loads(Path(file).read_text()):
        found.append([count(build(folder, settings, rank, world)) for rank in dict.fromkeys((0, world - 1))])
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
