"""What happens to a reward between the environment and the baseline: scaling, shaping, brevity on request, and what is
taken from turns and rollouts that break a rule. Not here: rewards themselves (environments), advantages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from nemotron_steps.engine.rollouts.conversation import (
    DEFAULT_FORMAT,
    FORMAT_KEY,
    OPENED_BY_TEMPLATE,
    TOOL_CALL_MARKERS,
    TurnFormat,
    parse_assistant,
)
from nemotron_steps.engine.rollouts.data import PromptRow, asks_for_low_effort
from nemotron_steps.engine.types import Rollout, RolloutGroup
from nemotron_steps.environments.responses import THINK_CLOSE, THINK_OPEN
from nemotron_steps.errors import ConfigError

if TYPE_CHECKING:
    from nemotron_steps.config.schema.grpo import GrpoConfig, LowEffortConfig, RewardPenaltiesConfig


def scale_rewards(rewards: torch.Tensor, config: GrpoConfig) -> torch.Tensor:
    """`grpo.reward_scaling`: clamp rewards [N] to the source interval, then map that linearly onto the target's."""
    scaling = config.reward_scaling
    if not scaling.enabled:
        return rewards
    width = scaling.source_max - scaling.source_min
    share = (rewards.clamp(scaling.source_min, scaling.source_max) - scaling.source_min) / width
    return scaling.target_min + share * (scaling.target_max - scaling.target_min)


def shape_rewards(
    rewards: torch.Tensor,
    lengths: torch.Tensor,
    truncated: torch.Tensor,
    config: GrpoConfig,
    *,
    max_response_length: int,
) -> torch.Tensor:
    """`grpo.reward_shaping` of scaled rewards [N]: DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), or a
    factor on the rewards of truncated samples, which answers the same question.

    The punishment is min(-(len - (L_max - buffer)) / buffer x penalty, 0). Lengths [N] are tokens of the first
    assistant message; `max_response_length` is L_max where the config leaves it open.
    """
    shaping = config.reward_shaping
    if not shaping.enabled:
        return rewards
    if shaping.stop_properly_penalty_coef is not None:
        return torch.where(truncated, rewards * shaping.stop_properly_penalty_coef, rewards)
    limit = shaping.max_response_length if shaping.max_response_length is not None else max_response_length
    exceeded = lengths.double() - (limit - shaping.overlong_buffer_length)
    return rewards + (-exceeded / shaping.overlong_buffer_length * shaping.overlong_buffer_penalty).clamp(max=0.0)


class Violation(StrEnum):
    """A format rule a turn may break; of several the first one decides."""

    INVALID_TOOL_CALL = "invalid_tool_call"
    """A tool-call marker is left in the answer's text, or a call's JSON does not parse."""
    MALFORMED_THINKING = "malformed_thinking"
    """Thinking tags are doubled, out of order, or opened (by the turn or its template) and never closed by a turn that
    ended by itself."""


def treatments(config: GrpoConfig) -> dict[Violation, float | None]:
    """The advantage that tokens of a turn that breaks a rule get; None: left out of the loss."""
    found: dict[Violation, float | None] = {}
    if config.invalid_tool_call_strategy == "mask":
        found[Violation.INVALID_TOOL_CALL] = None
    elif config.invalid_tool_call_advantage is not None and config.penalize_invalid_tool_call is not False:
        found[Violation.INVALID_TOOL_CALL] = config.invalid_tool_call_advantage
    if config.malformed_thinking_advantage is not None and config.penalize_malformed_thinking is not False:
        found[Violation.MALFORMED_THINKING] = config.malformed_thinking_advantage
    return found


def has_invalid_tool_call(
    text: str, patterns: Sequence[str] | None = None, turn_format: TurnFormat = DEFAULT_FORMAT
) -> bool:
    """Whether a decoded assistant turn tried to call a tool and failed."""
    if patterns is None:
        patterns = TOOL_CALL_MARKERS[turn_format.tool_parser]
    turn = parse_assistant(text, turn_format=turn_format)
    return bool(turn.malformed_tool_calls) or any(pattern in turn.text for pattern in patterns)


def has_malformed_thinking(
    text: str,
    *,
    truncated: bool,
    turn_format: TurnFormat = DEFAULT_FORMAT,
    tags: tuple[str, str] = (THINK_OPEN, THINK_CLOSE),
) -> bool:
    """A lone closing tag is fine: many chat templates write the opening one into the prompt. Thinking that is never
    closed counts only if the turn was not cut off; where the template always opens it, a turn without any tag has not
    closed it."""
    if turn_format.reasoning_parser == "none":
        return False
    opened, closed = text.count(tags[0]), text.count(tags[1])
    if opened > 1 or closed > 1:
        return True
    if opened and closed:
        return text.index(tags[0]) > text.index(tags[1])
    begun = bool(opened) or (not closed and turn_format.reasoning_parser in OPENED_BY_TEMPLATE)
    return begun and not truncated


def penalize_turns(
    rollouts: Sequence[Rollout],
    treated: Mapping[Violation, float | None],
    advantages: torch.Tensor,
    token_mask: torch.Tensor,
    *,
    patterns: Sequence[str] | None = None,
    tags: tuple[str, str] = (THINK_OPEN, THINK_CLOSE),
) -> Counter[Violation]:
    """Give the tokens of every turn that breaks a rule another advantage, or none: in place, both [N, T]. Returns how
    often each rule is broken. `patterns` and `tags` are `env.nemo_gym`'s."""
    found: Counter[Violation] = Counter()
    for row, rollout in enumerate(rollouts if treated else ()):
        turn_format = TurnFormat(*rollout.metadata.get(FORMAT_KEY, ()))
        texts = rollout.metadata.get("turn_texts", ())
        for index, ((start, end), text) in enumerate(zip(rollout.turns, texts, strict=True)):
            cut = rollout.truncated and index == len(rollout.turns) - 1
            broken = {
                Violation.INVALID_TOOL_CALL: not cut and has_invalid_tool_call(text, patterns, turn_format),
                Violation.MALFORMED_THINKING: has_malformed_thinking(
                    text, truncated=cut, turn_format=turn_format, tags=tags
                ),
            }
            for kind in reversed([kind for kind in treated if broken[kind]]):  # the first rule has the last word
                found[kind] += 1
                advantage = treated[kind]
                if advantage is None:
                    token_mask[row, start:end] = 0.0
                else:
                    advantages[row, start:end] = advantage
    return found


REWARD_PENALTIES_KEY = "reward_penalties"
"""`Rollout.metadata[REWARD_PENALTIES_KEY]`: names of the penalties a rollout got."""


class RewardPenalty(StrEnum):
    """Why a rollout loses its reward."""

    DUPLICATED_REASONING = "duplicated_reasoning"
    """A turn's answer repeats its reasoning word for word."""
    EMPTY_FINAL_ANSWER = "empty_final_answer"
    """The last turn says nothing and calls no tool."""
    UNWANTED_TOKEN = "unwanted_token"
    """A sampled token is one of `token_ids.unwanted`, wherever it stands."""
    MALFORMED_THINK_TAG = "malformed_think_tag"
    """A turn has malformed thinking; or opens it, which the prompt does; or does not close it exactly as often as its
    prompt leaves it open."""


class RewardPenalties:
    """Finds what the config penalises and takes the reward away."""

    def __init__(
        self, config: RewardPenaltiesConfig, *, tags: tuple[str, str], tag_ids: tuple[int, int] | None
    ) -> None:
        self._tags, self._tag_ids = tags, tag_ids
        self._unwanted = frozenset(config.token_ids.unwanted)
        self._looked_for = {
            RewardPenalty.DUPLICATED_REASONING: config.penalize_duplicated_reasoning,
            RewardPenalty.EMPTY_FINAL_ANSWER: config.penalize_empty_final_answer,
            RewardPenalty.UNWANTED_TOKEN: config.penalize_unwanted_tokens,
            RewardPenalty.MALFORMED_THINK_TAG: config.penalize_malformed_think_tag,
        }

    @classmethod
    def of(
        cls, config: RewardPenaltiesConfig, tags: tuple[str, str], prompt: str, encode: Callable[[str], Sequence[int]]
    ) -> RewardPenalties:
        """With the tags' tokens as the config gives them, or as the tokenizer has them if it writes each as one."""
        if not config.penalize_malformed_think_tag:
            return cls(config, tags=tags, tag_ids=None)
        key = "reward_penalties.penalize_malformed_think_tag"
        if tags[0] not in prompt:
            raise ConfigError(
                "the chat template writes no thinking tag: the model opens its thinking itself, and every turn that "
                "thinks would be penalised",
                where=key,
                expected=f"a template that ends the prompt with {tags[0]}, or with {tags[0]}{tags[1]}",
                hints=(f"{key}=false", "grpo.malformed_thinking_advantage=-5"),
            )
        given = (config.token_ids.think_open, config.token_ids.think_close)
        known: list[int | None] = []
        for token, tag in zip(given, tags, strict=True):
            ids = encode(tag)
            known.append(token if token is not None or len(ids) != 1 else ids[0])
        opening, closing = known
        if opening is not None and closing is not None:
            return cls(config, tags=tags, tag_ids=(opening, closing))
        if given != (None, None):
            name = "think_open" if opening is None else "think_close"
            raise ConfigError(
                "the token of one thinking tag is given, and the tokenizer has none for the other",
                where=f"reward_penalties.token_ids.{name}",
                hints=("reward_penalties.token_ids.think_open=null reward_penalties.token_ids.think_close=null",),
            )
        return cls(config, tags=tags, tag_ids=None)

    def apply(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """The groups, with the reward of penalised rollouts at 0. One that is below 0 stays: no penalty is a gain."""

        def penalised(rollout: Rollout) -> Rollout:
            if rollout.failure is not None:
                return rollout
            found = self.found(rollout)
            metadata = {**rollout.metadata, REWARD_PENALTIES_KEY: [penalty.value for penalty in found]}
            return replace(rollout, reward=min(rollout.reward, 0.0) if found else rollout.reward, metadata=metadata)

        return [replace(group, rollouts=[penalised(rollout) for rollout in group.rollouts]) for group in groups]

    def found(self, rollout: Rollout) -> list[RewardPenalty]:
        """What a graded rollout is penalised for."""
        texts = rollout.metadata["turn_texts"]
        turn_format = TurnFormat(*rollout.metadata.get(FORMAT_KEY, ()))
        turns = [parse_assistant(text, turn_format=turn_format) for text in texts]
        last = turns[-1]
        broken = {
            RewardPenalty.DUPLICATED_REASONING: any(
                bool(turn.reasoning.strip()) and turn.reasoning.strip() == turn.text.strip() for turn in turns
            ),
            RewardPenalty.EMPTY_FINAL_ANSWER: not last.tool_calls and not last.text.strip(),
            RewardPenalty.UNWANTED_TOKEN: any(
                not self._unwanted.isdisjoint(rollout.token_ids[start:end]) for start, end in rollout.turns
            ),
            RewardPenalty.MALFORMED_THINK_TAG: self._looked_for[RewardPenalty.MALFORMED_THINK_TAG]
            and self._has_malformed_tags(rollout, texts, turn_format),
        }
        return [penalty for penalty, is_broken in broken.items() if is_broken and self._looked_for[penalty]]

    def _has_malformed_tags(self, rollout: Rollout, texts: Sequence[str], turn_format: TurnFormat) -> bool:
        opening, closing = self._tags
        before = 0
        for index, ((start, end), text) in enumerate(zip(rollout.turns, texts, strict=True)):
            cut = rollout.truncated and index == len(rollout.turns) - 1
            if has_malformed_thinking(text, truncated=cut, turn_format=turn_format, tags=self._tags):
                return True
            if opening in text or text.count(closing) > 1:  # also where it is spelled in pieces
                return True
            if self._tag_ids is not None:
                prompt, said = rollout.token_ids[before:start], rollout.token_ids[start:end]
                left_open = prompt.count(self._tag_ids[0]) - prompt.count(self._tag_ids[1])
                written = (said.count(self._tag_ids[0]), said.count(self._tag_ids[1]))
                if left_open not in (0, 1) or written != (0, left_open):
                    return True
            before = end
        return False


LOW_EFFORT_KEY = "low_effort"
"""`Rollout.metadata[LOW_EFFORT_KEY]`, of prompts that ask for it: the environment's `reward`, and `length_reward`."""


def reward_brevity(
    prompts: Sequence[PromptRow], groups: Sequence[RolloutGroup], config: LowEffortConfig
) -> list[RolloutGroup]:
    """The groups of prompts, with R' = R + R max(l, 0) + penalty min(l, 0) for those that ask for low effort, where
    l = min(1, weight x (1 - length of the last assistant message / upper_bound_tokens)).

    A short wrong answer gains nothing; above the bound there is a penalty whatever the reward. As in NeMo-RL, it comes
    before anything reads the reward, and validation is rewarded alike.
    """
    if not config.enabled:
        return list(groups)

    def rewarded(rollout: Rollout) -> Rollout:
        if rollout.failure is not None:
            return rollout
        term = min(1.0, config.weight * (1.0 - _last_length(rollout) / config.upper_bound_tokens))
        reward = rollout.reward + rollout.reward * max(term, 0.0) + config.penalty * min(term, 0.0)
        told = {LOW_EFFORT_KEY: {"reward": rollout.reward, "length_reward": term}}
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
    low = [rollout for rollout in graded if LOW_EFFORT_KEY in rollout.metadata]
    values = {
        "share": [float(LOW_EFFORT_KEY in rollout.metadata) for rollout in graded],
        "reward": [rollout.reward for rollout in low],
        "length_reward": [rollout.metadata[LOW_EFFORT_KEY]["length_reward"] for rollout in low],
        "length": [float(_last_length(rollout)) for rollout in low],
        "length_of_others": [float(_last_length(r)) for r in graded if LOW_EFFORT_KEY not in r.metadata],
    }
    return {f"low_effort/{name}": fmean(each) for name, each in values.items() if each}


def _last_length(rollout: Rollout) -> int:
    return rollout.turns[-1][1] - rollout.turns[-1][0] if rollout.turns else 0
