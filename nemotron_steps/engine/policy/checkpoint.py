"""A policy's training state on disk: weights and optimizer in one torch_dist checkpoint, the rest as JSON.

    hf/           config.json, tokenizer, chat template
    weights/      weights under megatron-core's names; moments and master weights under `optimizer.<state>.<name>`
    policy.json   optimizer steps and random generator state

Of a policy with adapters the weights are theirs alone: the frozen ones are where the policy was started from.

Optimizer tensors are saved under the sharding of their parameter, so any parallel layout can load them. Without the
optimizer the same folder is a `checkpoint_megatron` artifact.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from nemotron_steps.engine.policy.optimizer import FlatAdamW
from nemotron_steps.engine.policy.random_state import KEY, random_states, restore_random_states, saved_random_states
from nemotron_steps.engine.policy.shards import ModelShards
from nemotron_steps.engine.policy.snapshot import STATE_FILE, PolicySnapshot, unreadable, write_model_files
from nemotron_steps.errors import ArtifactError
from nemotron_steps.models.distributed_checkpoint import load_sharded, save_sharded, stage_sharded
from nemotron_steps.models.huggingface import CARRIED, WeightReader
from nemotron_steps.models.mapping import of_mtp, to_megatron
from nemotron_steps.models.megatron_checkpoint import WEIGHTS, sharded_key, stored_tensors

_MODEL = "model"


def save_model(shards: ModelShards, source: Path, folder: Path) -> None:
    """Weights, adapters added, and config and tokenizer from `source`. Collective."""
    if shards.groups.rank == 0:
        write_model_files(source, folder, carries=not shards.architecture.trains_mtp)
    shards.groups.barrier()
    save_sharded({_MODEL: shards.sharded_state(shards.current, of=shards.parameters)}, folder / WEIGHTS)


def load_model(shards: ModelShards, folder: Path) -> None:
    """Weights alone, from a Megatron checkpoint written in any layout. Collective.

    Multi-token prediction comes from among the carried tensors where the checkpoint was written without training it;
    ArtifactError where it has none.
    """
    stored = stored_tensors(folder / WEIGHTS, shards.architecture)
    state = {_MODEL: shards.sharded_state(lambda _, tensor: tensor, of=shards.parameters)}
    for parameter in shards.parameters:
        tensors = state[_MODEL].get(parameter.name)
        if parameter.optional and tensors is not None and tensors[0].key not in stored:
            del state[_MODEL][parameter.name]
    ahead = [parameter for parameter in shards.parameters if of_mtp(parameter, shards.architecture)]
    if ahead and sharded_key(ahead[0], shards.architecture) not in stored:
        for parameter in ahead:
            state[_MODEL].pop(parameter.name, None)
        if not (folder / "hf" / CARRIED).is_file():
            raise ArtifactError(
                "the checkpoint has no block of multi-token prediction, though its config.json says so",
                where=str(folder),
                expected=f"{ahead[0].name} among its weights, or hf/{CARRIED}",
                found="neither",
                hints=("policy.megatron_cfg.mtp_num_layers=0",),
            )
        shards.load(to_megatron(WeightReader(folder / "hf"), shards.architecture, mtp_alone=True))
    loaded = load_sharded(state, folder / WEIGHTS)
    shards.copy_loaded(loaded[_MODEL], lambda _, tensor: tensor)


def snapshot(shards: ModelShards, optimizer: FlatAdamW, source: Path, *, copy: bool) -> PolicySnapshot:
    """Everything needed to go on training. Collective.

    Args:
        copy: copy the tensors to host memory, so that training may go on before they are written.
    """
    state = {**_model_state(shards), **_optimizer_state(shards, optimizer.whole_state())}
    position = {"optimizer_steps": optimizer.steps, KEY: random_states(_layout(shards))}
    carries = not shards.architecture.trains_mtp
    return PolicySnapshot(stage_sharded(state, copy=copy), position, source, carries)


def load(shards: ModelShards, optimizer: FlatAdamW, folder: Path) -> None:
    """Restore what a snapshot wrote, whatever layout it was written in. Collective."""
    try:
        position = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        steps, states = int(position["optimizer_steps"]), saved_random_states(position)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise unreadable(folder, error) from error
    whole = optimizer.whole_state()
    loaded = load_sharded({**_model_state(shards), **_optimizer_state(shards, whole)}, folder / WEIGHTS)
    shards.copy_loaded(loaded[_MODEL], lambda _, tensor: tensor)
    for name, tensors in whole.items():
        shards.copy_loaded(loaded[f"optimizer.{name}"], lambda parameter, _, own=tensors: own[parameter])  # type: ignore[misc]
    optimizer.load_whole_state(whole, steps)
    try:
        restore_random_states(states, _layout(shards))
    except (ValueError, KeyError, IndexError, TypeError, RuntimeError) as error:
        raise unreadable(folder, error) from error


def _layout(shards: ModelShards) -> tuple[int, ...]:
    groups = shards.groups
    return groups.tensor_size, groups.stages, groups.context_size


def _model_state(shards: ModelShards) -> dict[str, Any]:
    return {_MODEL: shards.sharded_state(lambda _, tensor: tensor)}


def _optimizer_state(shards: ModelShards, whole: dict[str, dict[str, torch.Tensor]]) -> dict[str, Any]:
    return {
        f"optimizer.{name}": shards.sharded_state(
            lambda parameter, _, own=tensors: own.get(parameter),  # type: ignore[misc]
            prefix=f"optimizer.{name}.",
        )
        for name, tensors in whole.items()
    }
