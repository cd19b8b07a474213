"""Rollouts that an agent ran against the policy's endpoint, as trajectories.

The endpoint puts the exact tokens of every turn on the items it returns; what lies between two turns (tool results,
the next generation prompt) is the part of the later prompt that the earlier turn does not end with. Only tokens that
the policy sampled are trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nemotron_steps.engine.rollouts.trajectory import Trajectory
from nemotron_steps.engine.types import Completion, FinishReason, SamplingParams
from nemotron_steps.environments.base import AgentRun
from nemotron_steps.models.chat import ChatFormat

BROKEN_TOKENS = "agent_tokens_broken"
"""Failure class: the agent's output has no token fields, or its turns do not continue each other."""


class BrokenTokensError(ValueError):
    """The output cannot be trained on. Internal: the rollout is masked out as BROKEN_TOKENS."""


def trajectory_of(run: AgentRun, chat: ChatFormat, version: int, params: SamplingParams) -> Trajectory:
    """The tokens of an agent's rollout.

    Args:
        params: what its turns were sampled with by default: its stop tokens and strings end a turn.
        version: of the weights when the rollout began: what turns that do not say theirs (another server's) count
            as, and the oldest that a turn may say.

    Raises:
        BrokenTokensError.
    """
    trajectory = Trajectory([], [], [], output=run.output)
    for item in run.output:
        if "generation_token_ids" not in item:
            continue
        prompt = _ids(item, "prompt_token_ids", chat)
        completion = _completion(item, version, chat, params)
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


def _completion(item: Mapping[str, Any], version: int, chat: ChatFormat, params: SamplingParams) -> Completion:
    ids = _ids(item, "generation_token_ids", chat)
    logprobs = item.get("generation_log_probs")
    if not isinstance(logprobs, list) or len(logprobs) != len(ids) or not all(map(_is_logprob, logprobs)):
        raise BrokenTokensError("generation_log_probs has not one number a token, finite and at most 0")
    versions = item.get("generation_weight_versions", [version] * len(ids))
    if not isinstance(versions, list) or len(versions) != len(ids) or not all(type(v) is int for v in versions):
        raise BrokenTokensError("generation_weight_versions has not one number a token")
    if min(versions) < version:
        raise BrokenTokensError(f"a token is of version {min(versions)}, and the rollout began under {version}")
    ended = ids[-1] in (*chat.end_ids, *params.stop_token_ids)
    ended = ended or any(stop in chat.decode(ids) for stop in params.stop_strings)
    reason = FinishReason.STOP if ended else FinishReason.LENGTH
    return Completion("", 0, ids, [float(value) for value in logprobs], reason, versions)


def _is_logprob(value: Any) -> bool:
    # Rounding may leave a certain token a little above 0.
    return isinstance(value, int | float) and math.isfinite(value) and value < 1e-3


def _ids(item: Mapping[str, Any], name: str, chat: ChatFormat) -> list[int]:
    ids = item.get(name)
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise BrokenTokensError(f"{name} is no list of token ids")
    if min(ids) < 0 or max(ids) >= len(chat.tokenizer):
        raise BrokenTokensError(f"{name} holds a token that the policy's tokenizer lacks")
    return ids
