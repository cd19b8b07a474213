"""Megatron's distributed checkpoint format (`torch_dist`), read without unpickling anything but plain records.

Two things differ from megatron-core's own strategies. Saving writes in this process instead of spawning a manager
(about 5 s the first time). Loading reads `.metadata`, which the format keeps as a pickle, through an unpickler that
knows the format's record classes and nothing else, and object entries only as `weights_only`.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemotron_steps.errors import ArtifactError, StorageError
from nemotron_steps.models.megatron_core import ensure_process_group, load_megatron_core, on_available_device

# Records of torch.distributed.checkpoint, and what they are made of. None of them runs anything when built.
_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta", "StateDictType",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint._extension", "ZStandard"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("collections", "OrderedDict"),
}  # fmt: skip
_TORCH_DTYPES = {
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool",
}  # fmt: skip


class _RecordUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and name in _TORCH_DTYPES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a checkpoint's metadata")


def save_sharded(state: dict[str, Any], folder: str | Path) -> None:
    """Save a sharded state dict. Collective over the default process group.

    Args:
        state: ShardedTensors and ShardedObjects, in nested dicts and lists; anything else goes to common.pt and must
            be numbers, strings, tensors, lists and dicts.
        folder: created if absent, must be empty.

    Raises:
        StorageError: writing failed.
    """
    load_megatron_core()
    ensure_process_group()
    from megatron.core import dist_checkpointing

    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with on_available_device(), _quiet():
            dist_checkpointing.save(
                state, str(folder), sharded_strategy=_save_strategy(), validate_access_integrity=False
            )
    except OSError as error:
        raise StorageError("the checkpoint could not be written", where=str(folder), found=str(error)) from error


def load_sharded(state: dict[str, Any], folder: str | Path) -> dict[str, Any]:
    """Load what `state` describes, in its own sharding. Collective over the default process group.

    Returns:
        The state dict with tensors in place of ShardedTensors, merged with the common state.

    Raises:
        ArtifactError: not a distributed checkpoint, damaged, of other shapes, or holding objects that would have to
            be unpickled.
    """
    load_megatron_core()
    ensure_process_group()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with on_available_device(), _quiet():
            loaded = dist_checkpointing.load(
                state, str(folder), sharded_strategy=_load_strategy(), validate_access_integrity=False
            )
    except (CheckpointingException, CheckpointException, KeyError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise ArtifactError(
            "the distributed checkpoint cannot be loaded",
            where=str(folder),
            expected="a complete torch_dist checkpoint of this model",
            found=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        ) from error
    return dict(loaded)


def save_tensors(state: dict[str, Any], folder: str | Path) -> None:
    """Save named tensors and DTensors as a plain torch.distributed.checkpoint. Collective. StorageError on failure."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoint

    ensure_process_group()
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with _quiet():
            checkpoint.save(  # type: ignore[attr-defined]
                state,
                storage_writer=_file_writer(str(folder)),
                no_dist=dist.get_world_size() == 1,
            )
    except OSError as error:
        raise StorageError("the checkpoint could not be written", where=str(folder), found=str(error)) from error


def load_tensors(state: dict[str, Any], folder: str | Path) -> None:
    """Load into the tensors of `state`, in place and in their own sharding. Collective.

    Raises:
        ArtifactError: a tensor is missing, has another shape, or the checkpoint is damaged.
    """
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.api import CheckpointException

    ensure_process_group()
    try:
        with _quiet():
            checkpoint.load(  # type: ignore[attr-defined]
                state, storage_reader=_record_reader(str(folder)), no_dist=dist.get_world_size() == 1
            )
    except (CheckpointException, RuntimeError, ValueError, KeyError, OSError, EOFError) as error:
        raise ArtifactError(
            "the checkpoint cannot be loaded",
            where=str(folder),
            expected="a complete checkpoint of this model",
            found=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        ) from error


def read_metadata(folder: str | Path) -> Any:
    """The checkpoint's torch.distributed.checkpoint Metadata, through the restricted unpickler."""
    from torch.distributed.checkpoint.metadata import StorageMeta

    path = Path(folder) / ".metadata"
    try:
        metadata = _RecordUnpickler(io.BytesIO(path.read_bytes())).load()
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError) as error:
        raise ArtifactError("the checkpoint's metadata cannot be read", where=str(path), found=str(error)) from error
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    return metadata


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the deprecation and single-process notices of torch.distributed.checkpoint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _save_strategy() -> Any:
    import torch.distributed.checkpoint as checkpoint
    from megatron.core.dist_checkpointing.strategies import torch as torch_strategy

    class InProcessSave(torch_strategy.TorchDistSaveShardedStrategy):  # type: ignore[misc]
        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            by_key, _, _ = torch_strategy._replace_state_dict_keys_with_sharded_keys(
                sharded_state_dict, self.keep_only_main_replica
            )
            planner = torch_strategy.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
            import torch.distributed as dist

            checkpoint.save(  # type: ignore[attr-defined]
                torch_strategy.mcore_to_pyt_state_dict(by_key, False),
                storage_writer=_file_writer(str(checkpoint_dir)),
                planner=planner,
                no_dist=dist.get_world_size() == 1,
            )

    return InProcessSave("torch_dist", 1)


def _file_writer(folder: str) -> Any:
    import torch.distributed.checkpoint as checkpoint

    class RepeatableWriter(checkpoint.FileSystemWriter):  # type: ignore[misc,name-defined]
        def storage_meta(self) -> None:
            """Nothing: a random id and this machine's path would make equal checkpoints differ byte for byte."""

    return RepeatableWriter(folder, single_file_per_rank=True, thread_count=1)


def _record_reader(folder: str) -> Any:
    import torch.distributed.checkpoint as checkpoint

    class RecordReader(checkpoint.FileSystemReader):  # type: ignore[misc,name-defined]
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            metadata = read_metadata(str(self.path))
            metadata.storage_meta.load_id = self.load_id
            return metadata

    return RecordReader(folder)


def _load_strategy() -> Any:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoint
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.strategies import torch as torch_strategy

    class PlainPlanner(torch_strategy.MCoreLoadPlanner):  # type: ignore[misc]
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    class RecordLoad(torch_strategy.TorchDistLoadShardedStrategy):  # type: ignore[misc]
        def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
            tensors = [value for value in nested_values(sharded_state_dict) if isinstance(value, ShardedTensor)]
            by_key, flat_mapping, rename_mapping = torch_strategy._replace_state_dict_keys_with_sharded_keys(
                sharded_state_dict
            )
            target = torch_strategy.mcore_to_pyt_state_dict(by_key, True)
            checkpoint.load(  # type: ignore[attr-defined]
                target,
                storage_reader=_record_reader(str(checkpoint_dir)),
                planner=PlainPlanner(
                    shapes_validation_sharded_tensors=[t for t in tensors if not t.allow_shape_mismatch],
                    allow_shape_mismatch_sharded_tensors={t.key: t for t in tensors if t.allow_shape_mismatch},
                ),
                no_dist=dist.get_world_size() == 1,
            )
            unwrapped = {key: torch_strategy._unwrap_pyt_sharded_tensor(value) for key, value in target.items()}
            return torch_strategy._replace_sharded_keys_with_state_dict_keys(unwrapped, flat_mapping, rename_mapping)

    return RecordLoad()
