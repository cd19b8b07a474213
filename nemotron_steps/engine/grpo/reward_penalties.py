"""Rollouts whose reward is taken away for how they were written (`reward_penalties.*`), before anything reads it.

The whole rollout loses its reward, unlike a message-level penalty (penalties.py), which concerns one turn's tokens. It
counts for dynamic sampling, baselines and metrics as if the environment had said so; validation is not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

from nemotron_steps.engine.grpo.penalties import has_malformed_thinking
from nemotron_steps.engine.rollouts.conversation import FORMAT_KEY, TurnFormat, parse_assistant
from nemotron_steps.engine.types import Rollout, RolloutGroup
from nemotron_steps.errors import ConfigError

if TYPE_CHECKING:
    from nemotron_steps.config.schema.grpo import RewardPenaltiesConfig

METADATA_KEY = "reward_penalties"
"""`Rollout.metadata[METADATA_KEY]`: names of the penalties a rollout got."""


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
    """Finds what the config penalises and takes the reward away.

    Args:
        config: `reward_penalties`.
        tags: `env.nemo_gym.thinking_tags`.
        tag_ids: their tokens, where each is one.
    """

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
        """With the tags' tokens as the config gives them, or as the tokenizer has them if it writes each as one.

        Args:
            config: `reward_penalties`.
            tags: `env.nemo_gym.thinking_tags`.
            prompt: any chat as the policy's template renders it to be answered.
            encode: text to the policy's tokens.

        Raises:
            ConfigError: thinking tags are to be counted, and the template leaves it to the model to open its thinking,
                or one tag's token is known and the other's is not.
        """
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
        metadata = {**rollout.metadata, METADATA_KEY: [penalty.value for penalty in found]}
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
