"""Chats to token ids and back, through a tokenizer's own chat template.

Not for: reading what an assistant said (engine/rollouts/conversation.py) or training tokenizers (tokenizers.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.errors import ArtifactError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatFormat:
    """Renders chats with a tokenizer's own template and decodes what a model said.

    Raises ArtifactError when the folder has no tokenizer or the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str = "tokenizer") -> None:
        if not tokenizer.chat_template:
            raise ArtifactError("the tokenizer has no chat template", where=source, expected="chat_template.jinja")
        self.tokenizer = tokenizer
        self._render_cached = lru_cache(maxsize=4096)(self._render)

    @classmethod
    def from_folder(cls, folder: str | Path) -> ChatFormat:
        """Load tokenizer.json, tokenizer_config.json and the chat template from a checkpoint folder."""
        from transformers import AutoTokenizer

        if not Path(folder, "tokenizer.json").is_file() and not Path(folder, "tokenizer_config.json").is_file():
            raise ArtifactError("no tokenizer in the checkpoint", where=str(folder), expected="tokenizer.json")
        return cls(AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False), str(folder))

    @property
    def eos_token_id(self) -> int:
        """The token that ends an assistant turn."""
        return int(self.tokenizer.eos_token_id)

    def _render(self, messages_json: str, tools_json: str, generation_prompt: bool) -> tuple[int, ...]:
        text = self.render_text(json.loads(messages_json), json.loads(tools_json), generation_prompt)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def render_text(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), generation_prompt: bool = True
    ) -> str:
        """The chat as the template writes it."""
        return str(
            self.tokenizer.apply_chat_template(
                list(messages),
                tools=[_template_tool(t) for t in tools] or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        )

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a chat, ready to sample from when `generation_prompt`."""
        return list(self._render_cached(json.dumps(list(messages)), json.dumps(list(tools)), generation_prompt))

    def render_continuation(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Token ids to append after a sampled assistant turn (which ended with its end token): the messages (tool
        results or a user's) and the next generation prompt. The sampled tokens are never tokenised again.

        Raises:
            ArtifactError: the chat template rewrites earlier turns.
        """
        stub = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
        before = self.render_text(stub, tools, generation_prompt=False)
        after = self.render_text([*stub, *messages], tools)
        if not after.startswith(before):
            raise ArtifactError(
                "the chat template rewrites earlier turns when a message is added",
                expected="a template whose rendering only grows",
            )
        end = self.decode_token(self.eos_token_id)
        tail = after[before.rindex(end) + len(end) :] if end in before else after[len(before) :]
        return list(self.tokenizer.encode(tail, add_special_tokens=False))

    def decode_token(self, token_id: int) -> str:
        """Text of one token, special ones included."""
        return str(self.tokenizer.decode([token_id]))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled tokens, without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def count_tokens(self, text: str) -> int:
        """Tokens of a text by itself."""
        return len(self.tokenizer.encode(text, add_special_tokens=False)) if text else 0


def _template_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A Responses API tool (flat) as the chat template's (nested under `function`)."""
    if "function" in tool:
        return tool
    return {"type": "function", "function": {k: v for k, v in tool.items() if k not in ("type", "strict")}}
