"""Low-effort prompts: a small share of prompts asks for brevity, and is rewarded for it.

The choice of prompts is a pure function of (seed, group id), so a resumed run asks the same prompts again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from nemotron_steps.config.schema.rl import LowEffortConfig

METADATA_KEY = "low_effort"
"""`Rollout.metadata[METADATA_KEY]` is true where the prompt asked for low effort."""


def asks_for_low_effort(
    group_id: str, environment: str, config: LowEffortConfig, *, fraction: float, seed: int
) -> bool:
    """Whether this group's prompt gets `config.instruction`: `fraction` of the groups of the named environments.

    Args:
        group_id: the group's explicit id.
        environment: the environment that judges it.
        config: `grpo.low_effort`.
        fraction: share at this step (schedules.low_effort_fraction).
        seed: `grpo.seed`.
    """
    if not config.enabled or environment not in config.environments:
        return False
    digest = hashlib.sha256(f"low_effort:{seed}:{group_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def with_instruction(messages: Sequence[Mapping[str, Any]], instruction: str) -> list[dict[str, Any]]:
    """A prompt with `instruction` at the end of its last user message, wherever that stands: a tool's result or an
    earlier answer is not the place to ask for anything. A prompt without a user message gets one.

    Args:
        messages: chat messages, or a Responses API request's input items. Content may be a text or a list of parts.
        instruction: nothing is changed when it is empty.
    """
    asked = [dict(message) for message in messages]
    if not instruction:
        return asked
    users = [i for i, m in enumerate(asked) if m.get("type", "message") == "message" and m.get("role") == "user"]
    if not users:
        return [*asked, {"role": "user", "content": instruction}]
    last = asked[users[-1]]
    content = last.get("content")
    if isinstance(content, str):
        longer: Any = f"{content}\n\n{instruction}"
    else:
        longer = [*(content or ()), {"type": "input_text", "text": instruction}]
    asked[users[-1]] = {**last, "content": longer}
    return asked


def low_effort_rewards(
    rewards: torch.Tensor, lengths: torch.Tensor, low_effort: torch.Tensor, config: LowEffortConfig
) -> torch.Tensor:
    """Reward brevity on prompts that ask for low effort: R' = R + R max(l, 0) + penalty min(l, 0).

    l = min(1, weight x (1 - len / upper_bound)): a bonus in proportion to the reward below the bound, so that a short
    wrong answer gains nothing, and a penalty above it whatever the reward.

    Args:
        rewards: [N].
        lengths: [N] tokens of the last assistant message.
        low_effort: bool [N], whose prompt asked for low effort; the others are returned unchanged.
        config: `grpo.low_effort`.
    """
    term = (config.weight * (1.0 - lengths.double() / config.upper_bound_tokens)).clamp(max=1.0)
    adjusted = rewards + rewards * term.clamp(min=0.0) + config.penalty * term.clamp(max=0.0)
    return torch.where(low_effort, adjusted, rewards)
