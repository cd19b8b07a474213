"""Reasoning parsers: assistant text to (reasoning, answer). Not for tool calls, which are read from the answer."""

from __future__ import annotations

from collections.abc import Callable

from nemotron_steps.config.schema.policy import ReasoningParserName
from nemotron_steps.environments.responses import THINK_CLOSE, split_reasoning

ReasoningParser = Callable[[str], tuple[str, str]]
"""Text of one assistant turn → (reasoning, answer)."""


def deepseek_r1(text: str) -> tuple[str, str]:
    """For templates that open the thinking in the prompt: all is reasoning until the closing tag, or to the end."""
    if THINK_CLOSE in text:
        return split_reasoning(text)
    return text.removeprefix("<think>").strip(), ""


def no_reasoning(text: str) -> tuple[str, str]:
    """The model does not think aloud, or the caller wants its text as it is."""
    return "", text


REASONING_PARSERS: dict[ReasoningParserName, ReasoningParser] = {
    "qwen3": split_reasoning,
    "deepseek_r1": deepseek_r1,
    "nano_v3": deepseek_r1,
    "none": no_reasoning,
}
"""qwen3: `<think>…</think>` where the model wrote it; a text without tags is all answer. nano_v3: Nemotron 3's
name for the same format as deepseek_r1."""

OPENED_BY_TEMPLATE: frozenset[ReasoningParserName] = frozenset({"deepseek_r1", "nano_v3"})
"""Formats whose template ends the prompt with the opening tag: every turn begins inside its thinking and has to close
it."""
