"""Megatron's distributed checkpoint format (`torch_dist`), read without unpickling anything but plain records. Saving
writes in this process instead of spawning a manager (about 5 s the first time). Loading reads `.metadata`, a pickle,
through an unpickler that knows the format's record classes alone, and object entries as `weights_only`."""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

from nemotron_steps.errors import ArtifactError, StepsError, StorageError, first_line
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

_WRITERS: dict[Any, Any] = {}
"""Default process group → the group that writers use beside it."""


class _RecordUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and name in _TORCH_DTYPES):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # early Python 3.11 (Debian 12) pickles an enum's member by it
            return _enum_member
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a checkpoint's metadata")


def _enum_member(kind: Any, name: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind.__members__[name]
    raise pickle.UnpicklingError(f"an attribute of {kind!r} is not part of a checkpoint's metadata")


def save_sharded(state: dict[str, Any], folder: str | Path) -> None:
    """Save nested dicts and lists of ShardedTensors, ShardedObjects and plain data in an empty or new folder.
    Collective; StorageError when writing failed."""
    stage_sharded(state, copy=False).write(folder)


def stage_sharded(state: dict[str, Any], *, copy: bool = True) -> StagedSave:
    """Get a sharded state dict ready to be written later, or by another thread. Collective. With `copy`, what this rank
    will write is copied to host memory, so that the tensors may change at once."""
    load_megatron_core()
    ensure_process_group()
    from megatron.core.dist_checkpointing.core import CheckpointingConfig
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.dist_checkpointing.strategies import torch as torch_strategy

    with on_available_device(), warnings.catch_warnings(action="ignore"):
        sharded, common = save_preprocess(state, validate_access_integrity=False)
        by_key, _, _ = torch_strategy._replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
        if copy:
            for parts in by_key.values():
                for part in parts:
                    if isinstance(part, ShardedTensor):
                        part.data = part.data.detach().to("cpu", copy=True)
        tensors = torch_strategy.mcore_to_pyt_state_dict(by_key, False)
        planner = torch_strategy.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    record = dataclasses.asdict(CheckpointingConfig("torch_dist", 1))
    return StagedSave(tensors, planner, common, record)


class StagedSave:
    """What torch.distributed.checkpoint saves, ready to be written; then, by rank 0 and only with a `record`, `common`
    as common.pt and the record as metadata.json."""

    def __init__(
        self,
        tensors: dict[str, Any],
        planner: Any = None,
        common: dict[str, Any] | None = None,
        record: dict[str, Any] | None = None,
    ) -> None:
        import torch.distributed as dist

        self._tensors, self._planner = tensors, planner
        self._common, self._record = common, record
        # The ranks agree over a group of their own: a save may run in a thread beside the training, and two threads
        # that use one group take each other's messages.
        self._group = None
        world = dist.group.WORLD
        if dist.get_world_size() > 1:
            if world not in _WRITERS:
                _WRITERS.clear()
                _WRITERS[world] = dist.new_group(backend="gloo")
            self._group = _WRITERS[world]
        # Said of every save by one process. Set here, not in `write`: filters are the whole process's.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

    def write(self, folder: str | Path, also: Callable[[], None] = lambda: None) -> None:
        """Write into a folder, then call `also` on rank 0. Collective; in any thread when staged with a copy. All
        ranks raise StorageError when writing failed on one."""
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as checkpoint
        from torch.distributed.checkpoint.api import CheckpointException

        folder = Path(folder)
        failure: BaseException | None = None
        try:
            checkpoint.save(  # type: ignore[attr-defined]
                self._tensors,
                storage_writer=_file_writer(str(folder)),
                planner=self._planner,
                process_group=self._group,
                no_dist=self._group is None,
            )
            if dist.get_rank() == 0:
                also()
                if self._record is not None:
                    torch.save(self._common, folder / "common.pt")
                    (folder / "metadata.json").write_text(json.dumps(self._record), encoding="utf-8")
        except (OSError, CheckpointException) as error:  # the latter is not an Exception, and holds every rank's error
            failure = error
        failed = torch.tensor(int(failure is not None))
        if self._group is not None:
            dist.all_reduce(failed, group=self._group)
        if failed:
            # What the disk said, from under what torch made of it ("unexpected pos 704 vs 598").
            failures = getattr(failure, "failures", None)
            first = cause = next(iter(failures.values()))[0] if failures else failure
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            found = str(getattr(cause, "strerror", None) or first or "another rank failed").splitlines()[0]
            raise StorageError("the checkpoint could not be written", where=str(folder), found=found) from failure


def load_sharded(state: dict[str, Any], folder: str | Path) -> dict[str, Any]:
    """The state dict with tensors in place of ShardedTensors, merged with the common state. Collective; ArtifactError
    for a checkpoint that is damaged, of other shapes, or holds objects that would have to be unpickled."""
    load_megatron_core()
    ensure_process_group()
    from megatron.core import dist_checkpointing

    with _readable(folder), on_available_device(), warnings.catch_warnings(action="ignore"):
        return dict(
            dist_checkpointing.load(
                state, str(folder), sharded_strategy=_load_strategy(), validate_access_integrity=False
            )
        )


def stage_tensors(state: dict[str, Any], *, copy: bool = True) -> StagedSave:
    """Named tensors and DTensors, ready to be written as a plain torch.distributed.checkpoint. Collective; `copy` as
    `stage_sharded`'s."""
    ensure_process_group()
    if copy:
        state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
    return StagedSave(state)


def load_tensors(state: dict[str, Any], folder: str | Path, *, alone: bool = False) -> None:
    """Load into the tensors of `state`, in place and in their own sharding. Collective, unless `alone`: of tensors that
    this rank has whole. ArtifactError when one is missing or has another shape, or the checkpoint is damaged."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoint

    ensure_process_group()
    no_dist = alone or dist.get_world_size() == 1
    with _readable(folder), warnings.catch_warnings(action="ignore"):
        checkpoint.load(  # type: ignore[attr-defined]
            state, storage_reader=_record_reader(str(folder)), no_dist=no_dist
        )


@contextmanager
def _readable(folder: str | Path, file: str = "") -> Iterator[None]:
    """ArtifactError for whatever libraries raise when they read a checkpoint: of a damaged one, that is anything."""
    try:
        yield
    except BaseException as error:
        # torch gathers what every rank raised in a CheckpointException, which is not an Exception.
        every = [each for each, _ in getattr(error, "failures", {}).values()] or [error]
        for each in every:
            if isinstance(each, StepsError) or not isinstance(each, Exception):
                raise each from None
        raise ArtifactError(
            "the checkpoint cannot be read",
            where=str(Path(folder) / file),
            expected="a complete checkpoint of this model",
            found=f"{type(every[0]).__name__}: {first_line(every[0])}",
        ) from error


def read_metadata(folder: str | Path) -> Any:
    """The checkpoint's torch.distributed.checkpoint Metadata, through the restricted unpickler. ArtifactError when it
    is damaged."""
    from torch.distributed.checkpoint.metadata import StorageMeta

    with _readable(folder, ".metadata"):
        metadata = _RecordUnpickler(io.BytesIO((Path(folder) / ".metadata").read_bytes())).load()
        for stored in metadata.storage_data.values():
            name = str(stored.relative_path)
            if name.startswith("/") or ".." in name.split("/"):
                raise ValueError(f"it names a file outside its folder: {name}")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        return metadata


def _file_writer(folder: str) -> Any:
    import torch
    import torch.distributed.checkpoint as checkpoint

    class RepeatableWriter(checkpoint.FileSystemWriter):  # type: ignore[misc,name-defined]
        def write_data(self, plan: Any, planner: Any) -> torch.futures.Future[list[Any]]:
            """As usual, but no file where there is nothing to write: replicas of what another rank writes."""
            if plan.items:
                return super().write_data(plan, planner)  # type: ignore[no-any-return]
            nothing: torch.futures.Future[list[Any]] = torch.futures.Future()
            nothing.set_result([])
            return nothing

        def storage_meta(self) -> None:
            """Nothing: a random id and this machine's path would make equal checkpoints differ byte for byte."""

    return RepeatableWriter(folder, single_file_per_rank=True, thread_count=1)


def _record_reader(folder: str) -> Any:
    import torch.distributed.checkpoint as checkpoint

    metadata = read_metadata(folder)  # here: torch would log what is wrong with it, and ask for another one

    class RecordReader(checkpoint.FileSystemReader):  # type: ignore[misc,name-defined]
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
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
