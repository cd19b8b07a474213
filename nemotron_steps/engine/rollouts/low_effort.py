"""Low effort: a prompt that asks for brevity is rewarded for it, as by NeMo-RL's `effort_levels`.

Which prompts do is decided by the string in their last user message, whoever put it there: the rows' author, or
data_prep/rl_prep (`low_effort.share`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from nemotron_steps.rows.layouts import REQUEST, read_request
from nemotron_steps.rows.messages import decoded

if TYPE_CHECKING:
    from nemotron_steps.config.schema.grpo import LowEffortConfig
    from nemotron_steps.engine.rollouts.data import PromptRow
    from nemotron_steps.engine.types import Rollout, RolloutGroup

METADATA_KEY = "low_effort"
"""`Rollout.metadata[METADATA_KEY]`, of prompts that ask for it: the environment's `reward` and the `length_reward`."""


def asks_for_low_effort(row: Mapping[str, Any], where: str, string: str) -> bool:
    """Whether the last user message of a prompt contains `string`, in its text or in a part of it."""
    messages = read_request(row, where).messages
    return string in next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")


def with_instruction(messages: Sequence[Mapping[str, Any]], instruction: str) -> list[dict[str, Any]]:
    """A prompt with `instruction` at the end of its last user message, wherever that stands: a tool's result or an
    earlier answer is not the place to ask for anything."""
    asked = [dict(message) for message in messages]
    users = [i for i, m in enumerate(asked) if (m.get("type") or "message") == "message" and m.get("role") == "user"]
    if not users:
        return [*asked, {"role": "user", "content": instruction}]
    last = asked[users[-1]]
    content = last.get("content")
    parts = [content] if isinstance(content, str | Mapping) else list(content or ())
    if any(instruction in (part if isinstance(part, str) else part.get("text") or "") for part in parts):
        return asked
    if isinstance(content, str):
        longer: Any = f"{content}\n\n{instruction}"
    else:
        longer = [*parts, {"type": "input_text", "text": f"\n\n{instruction}" if parts else instruction}]
    asked[users[-1]] = {**last, "content": longer}
    return asked


def low_effort_row(row: Mapping[str, Any], string: str) -> dict[str, Any]:
    """A prompt row whose last user message ends with `string`."""
    request = decoded(row[REQUEST])
    given = decoded(request["input"])
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return {**row, REQUEST: {**request, "input": with_instruction(items, string)}}


def reward_brevity(
    prompts: Sequence[PromptRow], groups: Sequence[RolloutGroup], config: LowEffortConfig
) -> list[RolloutGroup]:
    """The groups of prompts, with R' = R + R max(l, 0) + penalty min(l, 0) for those that ask for low effort, where
    l = min(1, weight x (1 - length of the last assistant message / upper_bound_tokens)).

    A bonus in proportion to the reward below the bound, so that a short wrong answer gains nothing, and a penalty above
    it whatever the reward. As in NeMo-RL, it comes before anything reads the reward: penalties, scaling, dynamic
    sampling, baselines, metrics; and validation is rewarded alike.
    """
    if not config.enabled:
        return list(groups)

    def rewarded(rollout: Rollout) -> Rollout:
        if rollout.failure is not None:
            return rollout
        term = min(1.0, config.weight * (1.0 - _last_length(rollout) / config.upper_bound_tokens))
        reward = rollout.reward + rollout.reward * max(term, 0.0) + config.penalty * min(term, 0.0)
        told = {METADATA_KEY: {"reward": rollout.reward, "length_reward": term}}
        return replace(rollout, reward=reward, metadata={**rollout.metadata, **told})

    return [
        replace(group, rollouts=[rewarded(rollout) for rollout in group.rollouts])
        if asks_for_low_effort(prompt.row, prompt.where, config.string)
        else group
        for prompt, group in zip(prompts, groups, strict=True)
    ]


def low_effort_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """What was asked of the graded rollouts, and how long their last messages are."""
    graded = [rollout for rollout in rollouts if rollout.failure is None]
    low = [rollout for rollout in graded if METADATA_KEY in rollout.metadata]
    values = {
        "share": [float(METADATA_KEY in rollout.metadata) for rollout in graded],
        "reward": [rollout.reward for rollout in low],
        "length_reward": [rollout.metadata[METADATA_KEY]["length_reward"] for rollout in low],
        "length": [float(_last_length(rollout)) for rollout in low],
        "length_of_others": [float(_last_length(r)) for r in graded if METADATA_KEY not in r.metadata],
    }
    return {f"low_effort/{name}": fmean(each) for name, each in values.items() if each}


def _last_length(rollout: Rollout) -> int:
    return rollout.turns[-1][1] - rollout.turns[-1][0] if rollout.turns else 0
