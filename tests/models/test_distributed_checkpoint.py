"""What a rank writes of a distributed checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nemotron_steps.models.distributed_checkpoint import save_sharded
from nemotron_steps.models.megatron_core import load_megatron_core


@pytest.mark.parametrize(("replica", "tensors"), [(0, 2), (1, 1)])
def test_of_what_several_ranks_hold_only_the_first_writes(replica: int, tensors: int, tmp_path: Path) -> None:
    load_megatron_core()
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    def sharded(name: str, replica: int) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(name, torch.zeros(100_000), replica_id=replica)

    save_sharded({"a": sharded("a", 0), "b": sharded("b", replica)}, tmp_path / "checkpoint")
    written = sum(file.stat().st_size for file in tmp_path.rglob("*.distcp"))
    assert written == pytest.approx(tensors * 400_000, rel=0.02)
