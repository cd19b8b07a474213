"""Builds policies rank by rank in worlds of any size, on torch's fake process group: run as a program of its own.

Given a file of [model folder, `policy.*` of a megatron policy, number of ranks]. Each rank loads its part of the
folder's weights; that part is checked against the layout. Prints how many ranks were built.
"""

import functools
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from nemotron_steps.config.layout.parallel_config import stage_layers
from nemotron_steps.config.schema.policy import PolicyConfig
from nemotron_steps.engine.policy import megatron
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.models.huggingface import WeightReader
from nemotron_steps.models.mapping import parameters

MOST = 3
"""Ranks built of a world: the first, the last, and one between."""


def build(folder: str, settings: dict[str, Any], rank: int, world: int) -> MegatronPolicy:
    from megatron.core import parallel_state

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    return MegatronPolicy(PolicyConfig.model_validate(settings), folder, lambda *_: None)


def check(policy: MegatronPolicy, whole: dict[str, int]) -> None:
    """Every parameter of the rank's stage is there, in the share that the layout gives it."""
    layout = policy.layout
    layers = {p.layer for p in policy.shards.parameters if p.name in policy.shards.local and p.layer is not None}
    assert layers == set(stage_layers(policy.architecture.num_layers, layout.pipeline)[policy.groups.stage])
    for parameter in parameters(policy.architecture):
        part = policy.shards.local.get(parameter.name)
        assert part is not None or parameter.layer not in layers, parameter.name
        # Biases of experts are there only where the config moves them.
        if part is not None and parameter.name in whole:
            ranks = layout.expert if parameter.of_experts else layout.tensor if parameter.tp_dim is not None else 1
            assert part.numel() * ranks == whole[parameter.name], parameter.name


class OnceRead(WeightReader):
    """A reader whose tensors stay: a folder's are read by hundreds of ranks here."""

    def __call__(self, name: str) -> torch.Tensor:
        return self._kept(name)

    @functools.cached_property
    def _kept(self) -> Any:
        return functools.cache(super().__call__)


def main(file: str) -> None:
    torch.set_num_threads(1)
    gc.set_threshold(100_000, 50, 50)  # modules by the hundred thousand, of which few are in a cycle
    megatron.WeightReader = functools.cache(OnceRead)  # type: ignore[misc,assignment]
    built = 0
    wholes: dict[str, dict[str, int]] = {}
    for folder, settings, world in json.loads(Path(file).read_text()):
        if folder not in wholes:
            alone = build(folder, {"precision": "bfloat16"}, 0, 1)
            wholes[folder] = {name: tensor.numel() for name, tensor in alone.shards.local.items()}
        for rank in sorted({round(place * (world - 1) / (MOST - 1)) for place in range(MOST)}):
            check(build(folder, settings, rank, world), wholes[folder])
            built += 1
    print(built)


if __name__ == "__main__":
    main(sys.argv[1])
