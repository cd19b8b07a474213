"""Message-level penalties: one assistant turn that breaks a format rule is punished as a whole.

A turn's advantages are overwritten with a constant, whatever the sample's reward was, so that a rollout that ends well
still learns not to write that turn; or its tokens are left out of the loss. `treatments` reads the config,
`find_violations` text; `apply_penalties` and `mask_turns` write tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from nemotron_steps.engine.rollouts.conversation import DEFAULT_FORMAT, FORMAT_KEY, TurnFormat, parse_assistant
from nemotron_steps.engine.rollouts.parsers.reasoning import OPENED_BY_TEMPLATE
from nemotron_steps.engine.rollouts.parsers.tools import TOOL_CALL_MARKERS
from nemotron_steps.environments.responses import THINK_CLOSE, THINK_OPEN

if TYPE_CHECKING:
    from nemotron_steps.config.schema.grpo import GrpoConfig
    from nemotron_steps.engine.types import Rollout


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
    None to leave them out of the loss.

    Args:
        config: `grpo.{penalize_,}{invalid_tool_call,malformed_thinking}*`. A penalty is on where its advantage is set,
            unless its `penalize_` key says otherwise.
    """
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
    """Whether a decoded assistant turn tried to call a tool and failed.

    Well-formed calls are taken out first, and so is the reasoning: thinking about a marker is not using it.

    Args:
        patterns: what must not be left in the text; None for what the turn's tool parser writes calls with.
    """
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
    """Every broken rule of a batch.

    Args:
        rollouts: the batch's rows; `turns` gives each assistant turn's span.
        texts: decoded text of each of those turns.
        kinds: the rules to look at.
        patterns: `env.nemo_gym.invalid_tool_call_patterns`.
        tags: `env.nemo_gym.thinking_tags`.

    Raises:
        ValueError: a rollout whose texts and turns do not match.
    """
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
