"""What a rank writes of a distributed checkpoint, and what its index may hold."""

import io
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from nemotron_steps.errors import ArtifactError
from nemotron_steps.models.distributed_checkpoint import (
    load_sharded,
    load_tensors,
    read_metadata,
    save_sharded,
    stage_sharded,
    stage_tensors,
)
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


class _EarlyPickler(pickle.Pickler):
    """Pickles members of enums as Python 3.11.2 does."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


def test_the_index_that_an_early_python_3_11_wrote_is_read(tmp_path: Path) -> None:
    load_megatron_core()
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    save_sharded({"a": ShardedTensor.from_rank_offsets("a", torch.zeros(8))}, tmp_path)
    before = read_metadata(tmp_path)
    file = io.BytesIO()
    _EarlyPickler(file).dump(before)
    assert b"getattr" in file.getvalue()
    (tmp_path / ".metadata").write_bytes(file.getvalue())
    assert read_metadata(tmp_path) == before


class _Attribute:
    def __init__(self, owner: type, name: str) -> None:
        self.of = owner, name

    def __reduce__(self) -> Any:
        return getattr, self.of


@pytest.mark.parametrize("name", ["unlink", "__class__"])
def test_an_index_gets_no_attribute_of_anything_but_an_enum(name: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Attribute(Path, name)))
    with pytest.raises(ArtifactError, match="cannot be read") as caught:
        read_metadata(tmp_path)
    assert "not part of a checkpoint's metadata" in str(caught.value.found)


@pytest.mark.parametrize(("copy", "written"), [(True, 1.0), (False, 2.0)])
def test_tensors_staged_with_a_copy_are_written_as_they_were(copy: bool, written: float, tmp_path: Path) -> None:
    tensor, loaded = torch.ones(4), torch.zeros(4)
    staged = stage_tensors({"a": tensor}, copy=copy)
    tensor.fill_(2.0)
    staged.write(tmp_path / "plain")
    load_tensors({"a": loaded}, tmp_path / "plain")
    assert torch.equal(loaded, torch.full((4,), written))


@pytest.mark.parametrize(("copy", "written"), [(True, 1.0), (False, 2.0)])
def test_shards_staged_with_a_copy_are_written_as_they_were(copy: bool, written: float, tmp_path: Path) -> None:
    load_megatron_core()
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    def sharded(tensor: torch.Tensor) -> dict[str, Any]:
        return {"a": ShardedTensor.from_rank_offsets("a", tensor)}

    tensor = torch.ones(4)
    staged = stage_sharded({**sharded(tensor), "step": 3}, copy=copy)
    tensor.fill_(2.0)
    beside: list[bool] = []
    staged.write(tmp_path / "sharded", lambda: beside.append((tmp_path / "sharded" / "metadata.json").exists()))
    loaded = load_sharded(sharded(torch.zeros(4)), tmp_path / "sharded")
    assert torch.equal(loaded["a"], torch.full((4,), written)) and loaded["step"] == 3
    assert beside == [False]  # what belongs beside the tensors is there before what makes it a checkpoint


def test_a_tensor_that_a_checkpoint_has_not_or_of_another_shape_is_refused(tmp_path: Path) -> None:
    stage_tensors({"a": torch.ones(4)}).write(tmp_path)
    for wrong in ({"b": torch.ones(4)}, {"a": torch.ones(5)}):
        with pytest.raises(ArtifactError, match="cannot be read") as caught:
            load_tensors(wrong, tmp_path)
        assert str(caught.value.where).startswith(str(tmp_path))
    with pytest.raises(ArtifactError, match="cannot be read"):
        load_sharded({}, tmp_path / "nothing")
