"""Rollouts that an agent ran against the policy's endpoint, as trajectories.

The endpoint puts the exact tokens of every turn on the items it returns; what lies between two turns (tool results,
the next generation prompt) is the part of the later prompt that the earlier turn does not end with. Only tokens that
the policy sampled are trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemotron_steps.engine.trajectory import Trajectory
from nemotron_steps.engine.types import Completion, FinishReason
from nemotron_steps.environments.base import AgentRun, Row
from nemotron_steps.models.chat import ChatFormat

BROKEN_TOKENS = "agent_tokens_broken"
"""Failure class: the agent's output has no token fields, or its turns do not continue each other."""


class BrokenTokensError(ValueError):
    """The output cannot be trained on. Internal: the rollout is masked out as BROKEN_TOKENS."""


def trajectory_of(run: AgentRun, chat: ChatFormat, version: int) -> Trajectory:
    """The tokens of an agent's rollout.

    Args:
        version: weight version of turns that do not say theirs (another server's): the oldest that can be meant.

    Raises:
        BrokenTokensError.
    """
    trajectory = Trajectory([], [], [], output=run.output)
    for item in run.output:
        if "generation_token_ids" not in item:
            continue
        prompt = _ids(item, "prompt_token_ids")
        completion = _completion(item, version, ended=chat.eos_token_id)
        known = len(trajectory.token_ids)
        if prompt[:known] != trajectory.token_ids:
            raise BrokenTokensError(f"turn {len(trajectory.turns)} does not continue the tokens before it")
        trajectory.append_context(prompt[known:])
        trajectory.append_sampled(completion)
        trajectory.texts.append(chat.decode(completion.token_ids))
    if not trajectory.turns:
        raise BrokenTokensError("no output item has generation_token_ids")
    trajectory.truncated = trajectory.truncated or run.truncated
    return trajectory


def agent_row(row: Row, suffix: str) -> Row:
    """The row as an agent gets it, with `suffix` (if any) at the end of its last message."""
    if not suffix:
        return row
    request = row["responses_create_params"]
    items = [{"role": "user", "content": request["input"]}] if isinstance(request["input"], str) else request["input"]
    content = items[-1].get("content")
    parts = (
        [*content, {"type": "input_text", "text": suffix}] if isinstance(content, list) else f"{content}\n\n{suffix}"
    )
    return {**row, "responses_create_params": {**request, "input": [*items[:-1], {**items[-1], "content": parts}]}}


def _completion(item: Mapping[str, Any], version: int, *, ended: int) -> Completion:
    ids = _ids(item, "generation_token_ids")
    logprobs = item.get("generation_log_probs")
    if not isinstance(logprobs, list) or len(logprobs) != len(ids):
        raise BrokenTokensError("generation_log_probs has not one number a token")
    versions = item.get("generation_weight_versions", [version] * len(ids))
    if not isinstance(versions, list) or len(versions) != len(ids):
        raise BrokenTokensError("generation_weight_versions has not one number a token")
    reason = FinishReason.STOP if ids[-1] == ended else FinishReason.LENGTH
    return Completion("", 0, ids, [float(value) for value in logprobs], reason, [int(value) for value in versions])


def _ids(item: Mapping[str, Any], name: str) -> list[int]:
    ids = item.get(name)
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) for i in ids):
        raise BrokenTokensError(f"{name} is no list of token ids")
    return ids
