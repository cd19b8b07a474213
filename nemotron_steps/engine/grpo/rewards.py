"""What happens to a reward between the environment and the baseline, and to turns and rollouts that break a rule.

scale_rewards, shape_rewards    pure functions on float64 [N] tensors, one entry a rollout
Violation                       a turn that breaks a format rule: another advantage for its tokens, or none of them
RewardPenalties                 a rollout that loses its reward for how it is written

Not here: rewards themselves (environments), brevity on request (rollouts/low_effort.py), advantages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from nemotron_steps.engine.rollouts.conversation import (
    DEFAULT_FORMAT,
    FORMAT_KEY,
    OPENED_BY_TEMPLATE,
    TurnFormat,
    parse_assistant,
)
from nemotron_steps.engine.rollouts.tool_calls import TOOL_CALL_MARKERS
from nemotron_steps.engine.types import Rollout, RolloutGroup
from nemotron_steps.environments.responses import THINK_CLOSE, THINK_OPEN
from nemotron_steps.errors import ConfigError

if TYPE_CHECKING:
    from nemotron_steps.config.schema.grpo import (
        GrpoConfig,
        RewardPenaltiesConfig,
        RewardScalingConfig,
        RewardShapingConfig,
    )


def scale_rewards(rewards: torch.Tensor, config: RewardScalingConfig) -> torch.Tensor:
    """Clamp to [source_min, source_max], then map that interval linearly onto [target_min, target_max]."""
    if not config.enabled:
        return rewards
    width = config.source_max - config.source_min
    share = (rewards.clamp(config.source_min, config.source_max) - config.source_min) / width
    return config.target_min + share * (config.target_max - config.target_min)


def shape_rewards(
    rewards: torch.Tensor,
    lengths: torch.Tensor,
    truncated: torch.Tensor,
    config: RewardShapingConfig,
    *,
    max_response_length: int,
) -> torch.Tensor:
    """Length-dependent shaping: DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), or a factor on the rewards
    of truncated samples.

    The punishment is min(-(len - (L_max - buffer)) / buffer x penalty, 0): 0 up to L_max - buffer, then falling
    linearly, -penalty at L_max. With `stop_properly_penalty_coef` c the reward of a truncated sample is multiplied by c
    instead: the two answer the same question.

    Args:
        rewards: [N], already scaled.
        lengths: [N] tokens of the first assistant message.
        truncated: bool [N].
        config: `grpo.reward_shaping`; rewards are returned unchanged when it is off.
        max_response_length: L_max where the config leaves it open (the generator's max_new_tokens).
    """
    if not config.enabled:
        return rewards
    if config.stop_properly_penalty_coef is not None:
        return torch.where(truncated, rewards * config.stop_properly_penalty_coef, rewards)
    limit = config.max_response_length if config.max_response_length is not None else max_response_length
    exceeded = lengths.double() - (limit - config.overlong_buffer_length)
    return rewards + (-exceeded / config.overlong_buffer_length * config.overlong_buffer_penalty).clamp(max=0.0)


class Violation(StrEnum):
    """A format rule a turn may break. Of a turn that breaks several, the first one here decides."""

    INVALID_TOOL_CALL = "invalid_tool_call"
    """A tool-call marker is left in the answer's text, or a call's JSON does not parse."""
    MALFORMED_THINKING = "malformed_thinking"
    """Thinking tags are doubled, out of order, or opened (by the turn or its template) and never closed by a turn that
    ended by itself."""


@dataclass(frozen=True)
class TurnViolation:
    """One broken rule."""

    row: int
    """Index of the sequence in the batch."""
    start: int
    """First token of the turn."""
    end: int
    """One past the last."""
    kind: Violation


def treatments(config: GrpoConfig) -> dict[Violation, float | None]:
    """The rules that are looked at, and what becomes of a turn that breaks one: the advantage that its tokens get, or
    None to leave them out of the loss."""
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
    """Whether thinking tags are malformed.

    A lone closing tag is fine: many chat templates write the opening one into the prompt. Thinking that is never closed
    counts only if the turn was not cut off; where the template always opens it, a turn without any tag has not closed
    it. A format without reasoning has no tags.
    """
    if turn_format.reasoning_parser == "none":
        return False
    opened, closed = text.count(tags[0]), text.count(tags[1])
    if opened > 1 or closed > 1:
        return True
    if opened and closed:
        return text.index(tags[0]) > text.index(tags[1])
    begun = bool(opened) or (not closed and turn_format.reasoning_parser in OPENED_BY_TEMPLATE)
    return begun and not truncated


def find_violations(
    rollouts: Sequence[Rollout],
    texts: Sequence[Sequence[str]],
    kinds: Collection[Violation] = tuple(Violation),
    *,
    patterns: Sequence[str] | None = None,
    tags: tuple[str, str] = (THINK_OPEN, THINK_CLOSE),
) -> list[TurnViolation]:
    """Every broken rule of a batch."""
    found: list[TurnViolation] = []
    if not kinds:
        return found
    for row, (rollout, turn_texts) in enumerate(zip(rollouts, texts, strict=True)):
        if len(turn_texts) != len(rollout.turns):
            raise ValueError(f"rollout {rollout.group_id}[{rollout.index}] has {len(rollout.turns)} turns but "
                             f"{len(turn_texts)} texts")  # fmt: skip
        turn_format = TurnFormat(*rollout.metadata.get(FORMAT_KEY, ()))
        for index, ((start, end), text) in enumerate(zip(rollout.turns, turn_texts, strict=True)):
            truncated = rollout.truncated and index == len(rollout.turns) - 1
            broken = {
                Violation.INVALID_TOOL_CALL: not truncated and has_invalid_tool_call(text, patterns, turn_format),
                Violation.MALFORMED_THINKING: has_malformed_thinking(
                    text, truncated=truncated, turn_format=turn_format, tags=tags
                ),
            }
            found += [TurnViolation(row, start, end, kind) for kind in broken if broken[kind] and kind in kinds]
    return found


def apply_penalties(
    advantages: torch.Tensor, violations: Sequence[TurnViolation], penalties: Mapping[Violation, float | None]
) -> torch.Tensor:
    """A copy of `advantages` [N, T] in which every violating turn's tokens have the advantage of the broken rule."""
    advantages = advantages.clone()
    for kind in reversed(Violation):  # the first rule has the last word
        penalty = penalties.get(kind)
        for violation in violations:
            if violation.kind is kind and penalty is not None:
                advantages[violation.row, violation.start : violation.end] = penalty
    return advantages


def mask_turns(token_mask: torch.Tensor, violations: Sequence[TurnViolation]) -> torch.Tensor:
    """A copy of `token_mask` [N, T] with every violating turn's tokens set to 0: they teach nothing, good or bad."""
    token_mask = token_mask.clone()
    for violation in violations:
        token_mask[violation.row, violation.start : violation.end] = 0.0
    return token_mask


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
        opening, closing = (
            known if known is not None else _single(encode(tag)) for known, tag in zip(given, tags, strict=True)
        )
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
        return [replace(group, rollouts=[self._penalised(rollout) for rollout in group.rollouts]) for group in groups]

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

    def _penalised(self, rollout: Rollout) -> Rollout:
        if rollout.failure is not None:
            return rollout
        found = self.found(rollout)
        metadata = {**rollout.metadata, REWARD_PENALTIES_KEY: [penalty.value for penalty in found]}
        return replace(rollout, reward=min(rollout.reward, 0.0) if found else rollout.reward, metadata=metadata)

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
                if left_open not in (0, 1) or (said.count(self._tag_ids[0]), said.count(self._tag_ids[1])) != (
                    0,
                    left_open,
                ):
                    return True
            before = end
        return False


def _single(ids: Sequence[int]) -> int | None:
    return ids[0] if len(ids) == 1 else None
