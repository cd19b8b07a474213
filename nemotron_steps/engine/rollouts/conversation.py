"""Between decoded text and assistant turns.

Assistant text is read by the two parsers that `policy.generation` names (tool_calls.py); by default
`<think>…</think>` before the answer and `<tool_call>{json}</tool_call>` for calls. Rendering to tokens is
models/chat.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemotron_steps.config.schema.policy import GenerationConfig, ReasoningParserName, ToolParserName
from nemotron_steps.engine.rollouts.tool_calls import TOOL_PARSERS
from nemotron_steps.environments.responses import THINK_CLOSE, ToolCall, message_item, reasoning_item, split_reasoning
from nemotron_steps.models.chat import ChatFormat

ReasoningParser = Callable[[str], tuple[str, str]]
"""Text of one assistant turn → (reasoning, answer)."""


def deepseek_r1(text: str) -> tuple[str, str]:
    """For templates that open the thinking in the prompt: all is reasoning until the closing tag, or to the end."""
    if THINK_CLOSE in text:
        return split_reasoning(text)
    return text.removeprefix("<think>").strip(), ""


REASONING_PARSERS: dict[ReasoningParserName, ReasoningParser] = {
    "qwen3": split_reasoning,
    "deepseek_r1": deepseek_r1,
    "nano_v3": deepseek_r1,
    "none": lambda text: ("", text),
}
"""qwen3: `<think>…</think>` where the model wrote it; a text without tags is all answer. nano_v3: Nemotron 3's
name for the same format as deepseek_r1. none: the model does not think aloud, or its text is wanted as it is."""

OPENED_BY_TEMPLATE: frozenset[ReasoningParserName] = frozenset({"deepseek_r1", "nano_v3"})
"""Formats whose template ends the prompt with the opening tag: every turn begins inside its thinking and has to close
it."""


@dataclass(frozen=True)
class AssistantTurn:
    """What one assistant turn says, taken apart."""

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed_tool_calls: tuple[str, ...] = ()

    def output_items(self) -> list[dict[str, Any]]:
        """The turn as OpenAI Responses output items."""
        items: list[dict[str, Any]] = []
        if self.reasoning:
            items.append(reasoning_item(self.reasoning))
        if self.text or not self.tool_calls:
            items.append(message_item(self.text))
        for call in self.tool_calls:
            items.append(
                {"type": "function_call", "name": call.name, "arguments": call.arguments, "call_id": call.call_id}
            )
        return items


@dataclass(frozen=True)
class TurnFormat:
    """How a model writes a turn: the names of its parsers."""

    reasoning_parser: ReasoningParserName = "qwen3"
    tool_parser: ToolParserName = "hermes"

    @classmethod
    def of(cls, config: GenerationConfig, chat: ChatFormat) -> TurnFormat:
        """As `policy.generation` says; but whether a turn begins inside its reasoning is read from the template, as one
        template may do either (`enable_thinking`)."""
        return cls(config.reasoning_parser, config.tool_parser).under(chat)

    def under(self, chat: ChatFormat) -> TurnFormat:
        """The same parsers, as the template begins a turn."""
        reasoning = self.reasoning_parser
        if reasoning != "none" and chat.opens_thinking != (reasoning in OPENED_BY_TEMPLATE):
            reasoning = "deepseek_r1" if chat.opens_thinking else "qwen3"
        return TurnFormat(reasoning, self.tool_parser)


DEFAULT_FORMAT = TurnFormat()
FORMAT_KEY = "turn_format"
"""`Rollout.metadata[FORMAT_KEY]`: names of the reasoning and the tool parser its turns are read with."""


def parse_assistant(
    text: str,
    call_prefix: str = "call",
    turn_format: TurnFormat = DEFAULT_FORMAT,
    tools: Sequence[Mapping[str, Any]] = (),
) -> AssistantTurn:
    """Take a decoded assistant turn apart. Calls that cannot be read stay in the text and are named, never guessed."""
    reasoning, answer = REASONING_PARSERS[turn_format.reasoning_parser](text)
    found = TOOL_PARSERS[turn_format.tool_parser](answer, tools)
    calls = tuple(ToolCall(name, arguments, f"{call_prefix}_{i}") for i, (name, arguments) in enumerate(found.calls))
    return AssistantTurn(found.text, reasoning, calls, found.malformed)
