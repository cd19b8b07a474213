"""Rollout groups as flat tensors, for checkpoints: no pickle, and compact for long rollouts.

Token columns of all rollouts are concatenated into one tensor each, as are the experts of those that have them.
Everything else, and each rollout's length, is JSON, a record a group, whose bytes are a tensor too. Logprobs stay
float64, so a restored group is equal to the saved one bit by bit. Encoding runs in a thread beside the event loop: it
goes rollout by rollout, so that no call of it holds the interpreter for long.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nemotron_steps.engine.types import Rollout, RolloutGroup
from nemotron_steps.errors import EngineError

_DTYPES: dict[str, type[np.generic]] = {
    "token_ids": np.int64,
    "token_mask": np.uint8,
    "logprobs": np.float64,
    "weight_versions": np.int64,
}
"""Column of a rollout → how it is kept. The last has an element for each sampled token, the others for each token."""
_AS_THEY_ARE = ("index", "environment", "truncated", "components", "failure", "metadata")
_RECORDS, _RECORD_BYTES, _EXPERTS = "records", "record_bytes", "routed_experts"


def encode_groups(groups: Sequence[RolloutGroup]) -> dict[str, torch.Tensor]:
    """Groups as flat tensors.

    Rollout metadata must be JSON-able; a NaN reward (of a rollout that could not be graded) is written as null.
    """
    columns: dict[str, list[np.ndarray]] = {name: [np.empty(0, dtype)] for name, dtype in _DTYPES.items()}
    records = [_record(group) for group in groups]
    experts: list[np.ndarray] = []
    for group in groups:
        for rollout in group.rollouts:
            for name, dtype in _DTYPES.items():
                columns[name].append(np.array(getattr(rollout, name), dtype))
            if rollout.routed_experts is not None:
                experts.append(rollout.routed_experts.ravel())
    arrays = {
        **{name: np.concatenate(parts) for name, parts in columns.items()},
        _RECORDS: np.frombuffer(bytearray(b"".join(records)), np.uint8),
        _RECORD_BYTES: np.array([len(record) for record in records], np.int64),
    }
    if experts:
        arrays[_EXPERTS] = np.concatenate(experts)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _record(group: RolloutGroup) -> bytes:
    """JSON of everything but the token columns."""
    rollouts = [
        {
            **{name: getattr(rollout, name) for name in _AS_THEY_ARE},
            "length": len(rollout.token_ids),
            "sampled": len(rollout.weight_versions),
            "reward": None if math.isnan(rollout.reward) else rollout.reward,
            "turns": [list(turn) for turn in rollout.turns],
            **({} if rollout.routed_experts is None else {_EXPERTS: list(rollout.routed_experts.shape)}),
        }
        for rollout in group.rollouts
    ]
    record = {
        "group_id": group.group_id,
        "prompt_index": group.prompt_index,
        "weight_version": group.weight_version,
        "rollouts": rollouts,
    }
    return json.dumps(record).encode()


def decode_groups(tensors: dict[str, torch.Tensor]) -> list[RolloutGroup]:
    """The inverse of `encode_groups`.

    Raises:
        EngineError: the tensors do not belong together.
    """
    texts = tensors[_RECORDS].numpy().tobytes()
    columns = {name: tensors[name].tolist() for name in _DTYPES}
    experts = tensors[_EXPERTS].numpy() if _EXPERTS in tensors else np.empty(0, np.int16)
    at, version_at, byte, expert_at = 0, 0, 0, 0
    groups: list[RolloutGroup] = []
    for size in tensors[_RECORD_BYTES].tolist():
        record: dict[str, Any] = json.loads(texts[byte : byte + size])
        byte += size
        rollouts: list[Rollout] = []
        for item in record["rollouts"]:
            end, version_end = at + int(item["length"]), version_at + int(item["sampled"])
            routed = None
            if _EXPERTS in item:
                shape = [int(size) for size in item[_EXPERTS]]
                routed = experts[expert_at : expert_at + math.prod(shape)].reshape(shape).copy()
                expert_at += routed.size
            rollouts.append(
                Rollout(
                    group_id=record["group_id"],
                    **{name: item[name] for name in _AS_THEY_ARE},
                    token_ids=columns["token_ids"][at:end],
                    token_mask=columns["token_mask"][at:end],
                    logprobs=columns["logprobs"][at:end],
                    weight_versions=columns["weight_versions"][version_at:version_end],
                    reward=math.nan if item["reward"] is None else float(item["reward"]),
                    turns=[(int(start), int(stop)) for start, stop in item["turns"]],
                    routed_experts=routed,
                )
            )
            at, version_at = end, version_end
        groups.append(
            RolloutGroup(record["group_id"], int(record["prompt_index"]), rollouts, int(record["weight_version"]))
        )
    if at != len(columns["token_ids"]) or version_at != len(columns["weight_versions"]):
        raise EngineError(
            "saved groups and their token tensors do not belong together",
            where="engine/grpo/group_codec.py",
            expected=f"{at} tokens and {version_at} versions",
            found=f"{len(columns['token_ids'])} tokens and {len(columns['weight_versions'])} versions",
        )
    return groups
