"""A policy's training state on disk: weights and optimizer in one torch_dist checkpoint, the rest as JSON.

    hf/           config.json, tokenizer, chat template
    weights/      weights under megatron-core's names; moments and master weights under `optimizer.<state>.<name>`
    policy.json   optimizer steps and random generator state

Optimizer tensors have the sharding of their parameter, so any parallel layout can load them. Of adapters the weights
are theirs alone. Without the optimizer the same folder is a `checkpoint_megatron` artifact.
"""

import base64
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemotron_steps.engine.policy.distributed.shards import ModelShards
from nemotron_steps.engine.policy.optimizer import FlatAdamW
from nemotron_steps.errors import ArtifactError
from nemotron_steps.models.distributed_checkpoint import StagedSave, load_sharded, save_sharded, stage_sharded
from nemotron_steps.models.huggingface import CARRIED, WeightReader, copy_model_files
from nemotron_steps.models.mapping import of_mtp, to_megatron
from nemotron_steps.models.megatron_checkpoint import WEIGHTS, sharded_key, stored_tensors

STATE_FILE = "policy.json"


@dataclass(frozen=True)
class PolicySnapshot:
    """The `Snapshot` of a policy in this process (or of this rank's part of it)."""

    tensors: StagedSave
    position: dict[str, Any]  # JSON-able: optimizer steps and random generator state
    source: Path
    carries: bool = True  # whether tensors that are not this policy's travel along

    def write(self, path: str) -> None:
        """Write `hf/`, `policy.json` and `weights/`. Collective; returns once every rank is done."""
        folder = Path(path)

        def beside() -> None:
            copy_model_files(self.source, folder / "hf", carries=self.carries)
            (folder / STATE_FILE).write_text(json.dumps(self.position), encoding="utf-8")

        self.tensors.write(folder / WEIGHTS, beside)


def written_by_rank_0(write: Callable[..., object], *streams: Iterable[Any]) -> None:
    """Call `write` with streams that the other ranks take part in making."""
    if dist.get_rank() == 0:
        write(*streams)
    else:
        for _ in chain(*streams):
            pass
    if dist.get_world_size() > 1:
        dist.barrier()


def _unreadable(folder: Path, error: Exception) -> ArtifactError:
    step = folder.parent
    aside = step.with_name(f"broken_{step.name}")  # a name that no checkpoint has
    return ArtifactError(
        "not a training checkpoint",
        where=str(folder / STATE_FILE),
        found=str(error),
        hints=(f"mv {shlex.quote(str(step))} {shlex.quote(str(aside))}   # training goes on from the one before",),
    )


def position(steps: int, layout: Sequence[int]) -> dict[str, Any]:
    """Steps and random states, JSON-able; `layout` are parallel sizes."""
    return {"optimizer_steps": steps, KEY: random_states(layout)}


@contextmanager
def restored_position(folder: Path, layout: Sequence[int]) -> Iterator[int]:
    """The optimizer steps of a checkpoint; random states are restored at the end."""
    try:
        saved = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        steps, states = int(saved["optimizer_steps"]), saved_random_states(saved)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(folder, error) from error
    yield steps
    try:
        restore_random_states(states, layout)
    except (ValueError, KeyError, IndexError, TypeError, RuntimeError) as error:
        raise _unreadable(folder, error) from error


KEY = "random_states"


def random_states(layout: Sequence[int]) -> dict[str, Any]:
    """Of all ranks, JSON-able. Collective."""
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
    """Out of a checkpoint's state file; of an earlier version, rank 0's torch generator."""
    if KEY in position:
        return dict(position[KEY])
    earlier = position["torch_rng"]  # base64, or a list of bytes of the dtensor policy
    state = earlier if isinstance(earlier, str) else base64.b64encode(bytes(earlier)).decode()
    return {"layout": [], "bytes": [torch.get_rng_state().numel()], "states": [state], "of_rank": [0]}


def restore_random_states(saved: Mapping[str, Any], layout: Sequence[int]) -> None:
    """This rank's saved state, rank 0's in another layout."""
    same = list(saved["layout"]) == [dist.get_world_size(), *layout]
    number = saved["of_rank"][dist.get_rank() if same else 0]
    together = torch.frombuffer(bytearray(base64.b64decode(saved["states"][number])), dtype=torch.uint8)
    for (_, put), state in zip(_generators(), torch.split(together, list(saved["bytes"])), strict=False):
        put(state.clone())  # torch reads it from the start of its storage


def _generators() -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = [(torch.get_rng_state, torch.set_rng_state)]
    if torch.cuda.is_available():
        found.append((torch.cuda.get_rng_state, torch.cuda.set_rng_state))
    return found


_MODEL = "model"


def save_model(shards: ModelShards, source: Path, folder: Path) -> None:
    """Weights, adapters added, and config and tokenizer from `source`. Collective."""
    carries = not shards.architecture.trains_mtp
    written_by_rank_0(partial(copy_model_files, source, folder / "hf", carries=carries))
    save_sharded({_MODEL: shards.sharded_state(shards.current, of=shards.parameters)}, folder / WEIGHTS)


def load_model(shards: ModelShards, folder: Path) -> None:
    """Weights alone, from a Megatron checkpoint written in any layout. Collective."""
    stored = stored_tensors(folder / WEIGHTS, shards.architecture)
    state = shards.sharded_state(lambda _, tensor: tensor, of=shards.parameters)
    for parameter in shards.parameters:
        tensors = state.get(parameter.name)
        if parameter.optional and tensors is not None and tensors[0].key not in stored:
            del state[parameter.name]
    ahead = [parameter for parameter in shards.parameters if of_mtp(parameter, shards.architecture)]
    if ahead and sharded_key(ahead[0], shards.architecture) not in stored:
        for parameter in ahead:
            state.pop(parameter.name, None)
        if not (folder / "hf" / CARRIED).is_file():
            raise ArtifactError(
                "the checkpoint has no block of multi-token prediction, though its config.json says so",
                where=str(folder),
                expected=f"{ahead[0].name} among its weights, or hf/{CARRIED}",
                found="neither",
                hints=("policy.megatron_cfg.mtp_num_layers=0",),
            )
        shards.load(to_megatron(WeightReader(folder / "hf"), shards.architecture, mtp_alone=True))
    loaded = load_sharded({_MODEL: state}, folder / WEIGHTS)
    shards.copy_loaded(loaded[_MODEL], lambda _, tensor: tensor)


def snapshot(shards: ModelShards, optimizer: FlatAdamW, source: Path, *, copy: bool) -> PolicySnapshot:
    """Everything needed to go on training; with `copy` in host memory. Collective."""
    staged = stage_sharded(_state(shards, optimizer.whole_state()), copy=copy)
    place = position(optimizer.steps, shards.groups.sizes)
    return PolicySnapshot(staged, place, source, carries=not shards.architecture.trains_mtp)


def load(shards: ModelShards, optimizer: FlatAdamW, folder: Path) -> None:
    """Restore what a snapshot wrote, whatever layout it was written in. Collective."""
    with restored_position(folder, shards.groups.sizes) as steps:
        whole = optimizer.whole_state()
        loaded = load_sharded(_state(shards, whole), folder / WEIGHTS)
        shards.copy_loaded(loaded[_MODEL], lambda _, tensor: tensor)
        for name, tensors in whole.items():
            shards.copy_loaded(loaded[f"optimizer.{name}"], lambda parameter, _, own=tensors: own[parameter])  # type: ignore[misc]
        optimizer.load_whole_state(whole, steps)


def _state(shards: ModelShards, whole: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    state = {_MODEL: shards.sharded_state(lambda _, tensor: tensor)}
    for name, tensors in whole.items():
        key = f"optimizer.{name}"
        state[key] = shards.sharded_state(lambda parameter, _, own=tensors: own.get(parameter), f"{key}.")  # type: ignore[misc]
    return state
