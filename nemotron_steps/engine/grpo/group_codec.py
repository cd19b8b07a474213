"""Rollout groups as JSON-able data plus flat tensors, for checkpoints: no pickle, and compact for long rollouts.

Token columns of all rollouts are concatenated into one tensor each; the JSON holds everything else and each rollout's
length. Logprobs stay float64, so a restored group is equal to the saved one bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from nemotron_steps.engine.types import Rollout, RolloutGroup
from nemotron_steps.errors import EngineError

_TOKENS, _MASK, _LOGPROBS, _VERSIONS = "token_ids", "token_mask", "logprobs", "weight_versions"


def encode_groups(groups: Sequence[RolloutGroup]) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Groups as JSON-able records and four flat tensors.

    Rollout metadata must be JSON-able; a NaN reward (of a rollout that could not be graded) is written as null.
    """
    records: list[dict[str, Any]] = []
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for group in groups:
        rollouts = []
        for rollout in group.rollouts:
            tokens.extend(rollout.token_ids)
            mask.extend(rollout.token_mask)
            logprobs.extend(rollout.logprobs)
            versions.extend(rollout.weight_versions)
            rollouts.append(
                {
                    "index": rollout.index,
                    "length": len(rollout.token_ids),
                    "sampled": len(rollout.weight_versions),
                    "reward": None if math.isnan(rollout.reward) else rollout.reward,
                    "environment": rollout.environment,
                    "truncated": rollout.truncated,
                    "components": rollout.components,
                    "failure": rollout.failure,
                    "turns": [list(turn) for turn in rollout.turns],
                    "metadata": rollout.metadata,
                }
            )
        records.append(
            {
                "group_id": group.group_id,
                "prompt_index": group.prompt_index,
                "weight_version": group.weight_version,
                "rollouts": rollouts,
            }
        )
    tensors = {
        _TOKENS: torch.tensor(tokens, dtype=torch.int64),
        _MASK: torch.tensor(mask, dtype=torch.uint8),
        _LOGPROBS: torch.tensor(logprobs, dtype=torch.float64),
        _VERSIONS: torch.tensor(versions, dtype=torch.int64),
    }
    return records, tensors


def decode_groups(records: Sequence[dict[str, Any]], tensors: dict[str, torch.Tensor]) -> list[RolloutGroup]:
    """The inverse of `encode_groups`.

    Raises:
        EngineError: records and tensors do not belong together.
    """
    columns = {name: tensors[name].tolist() for name in (_TOKENS, _MASK, _LOGPROBS, _VERSIONS)}
    at, version_at = 0, 0
    groups: list[RolloutGroup] = []
    for record in records:
        rollouts: list[Rollout] = []
        for item in record["rollouts"]:
            end, version_end = at + int(item["length"]), version_at + int(item["sampled"])
            rollouts.append(
                Rollout(
                    group_id=record["group_id"],
                    index=int(item["index"]),
                    token_ids=columns[_TOKENS][at:end],
                    token_mask=columns[_MASK][at:end],
                    logprobs=columns[_LOGPROBS][at:end],
                    weight_versions=columns[_VERSIONS][version_at:version_end],
                    reward=math.nan if item["reward"] is None else float(item["reward"]),
                    environment=item["environment"],
                    truncated=bool(item["truncated"]),
                    components=dict(item["components"]),
                    failure=item["failure"],
                    turns=[(int(start), int(stop)) for start, stop in item["turns"]],
                    metadata=dict(item["metadata"]),
                )
            )
            at, version_at = end, version_end
        groups.append(
            RolloutGroup(record["group_id"], int(record["prompt_index"]), rollouts, int(record["weight_version"]))
        )
    if at != len(columns[_TOKENS]) or version_at != len(columns[_VERSIONS]):
        raise EngineError(
            "saved groups and their token tensors do not belong together",
            where="engine/grpo/group_codec.py",
            expected=f"{at} tokens and {version_at} versions",
            found=f"{len(columns[_TOKENS])} tokens and {len(columns[_VERSIONS])} versions",
        )
    return groups
