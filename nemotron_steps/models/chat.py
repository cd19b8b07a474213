"""Chats to token ids and back, through a tokenizer's own chat template.

A conversation goes on in tokens: what was sampled stays as it was sampled, and only new messages are rendered.
Templates that show earlier turns otherwise than later ones (without their reasoning, say) therefore work as they are:
docs/decisions/tokens-in-tokens-out.md.

Not for: reading what an assistant said (engine/rollouts/conversation.py) or training tokenizers (tokenizers.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from nemotron_steps.errors import ArtifactError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMMON_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Any other is some template's own: response_1, response_2 and principle of generative reward models."""
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
MARKUP = frozenset({THINK_OPEN, THINK_CLOSE, "<tool_call>", "</tool_call>", "<TOOLCALL>", "</TOOLCALL>"})
"""Tags that are read in what a model says (engine/rollouts/parsers)."""
_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Names of the one class for tokenizers that tokenizer.json describes in full."""
_KEEPING_PLAIN = ("llama", "qwen3", "qwen3_moe", "nemotron_h", None)
"""Families of models, or none, whose tokenizer_config.json transformers believes when it names that class."""


class ChatFormat:
    """Renders chats with a tokenizer's own template and decodes what a model said.

    Args:
        tokenizer: with its chat template.
        source: where it is from, for errors.
        template_kwargs: variables of the template besides messages, tools and add_generation_prompt
            (`enable_thinking`, `truncate_history_thinking`, `date_string`, ...).

    Raises ArtifactError when the folder has no tokenizer or the tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        source: str = "tokenizer",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not tokenizer.chat_template:
            raise ArtifactError("the tokenizer has no chat template", where=source, expected="chat_template.jinja")
        self.tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        self._render_cached = lru_cache(maxsize=4096)(self._render)
        self._after_text = lru_cache(maxsize=64)(self._what_follows_a_text)

    @classmethod
    def from_folder(cls, folder: str | Path, template_kwargs: Mapping[str, Any] | None = None) -> ChatFormat:
        """Load tokenizer.json, tokenizer_config.json and the chat template from a checkpoint folder."""
        import transformers

        if not Path(folder, "tokenizer.json").is_file() and not Path(folder, "tokenizer_config.json").is_file():
            raise ArtifactError("no tokenizer in the checkpoint", where=str(folder), expected="tokenizer.json")
        loader: Any = transformers.PreTrainedTokenizerFast if _is_plain(Path(folder)) else transformers.AutoTokenizer
        return cls(loader.from_pretrained(str(folder), trust_remote_code=False), str(folder), template_kwargs)

    def with_template_kwargs(self, template_kwargs: Mapping[str, Any] | None) -> ChatFormat:
        """The same format with these variables of the template on top: a row's own `chat_template_kwargs`."""
        if not template_kwargs:
            return self
        return ChatFormat(self.tokenizer, template_kwargs={**self._template_kwargs, **template_kwargs})

    @property
    def eos_token_id(self) -> int:
        """The token that ends an assistant turn."""
        return int(self.tokenizer.eos_token_id)

    @cached_property
    def opens_thinking(self) -> bool:
        """Whether the generation prompt ends inside a think tag, so that every turn begins with reasoning."""
        prompt = self.render_text([{"role": "user", "content": "x"}])
        return prompt.rfind(THINK_OPEN) > prompt.rfind(THINK_CLOSE)

    def _render(self, messages_json: str, tools_json: str, generation_prompt: bool) -> tuple[int, ...]:
        text = self.render_text(json.loads(messages_json), json.loads(tools_json), generation_prompt)
        return tuple(self.encode(text))

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
                **self._template_kwargs,
            )
        )

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a chat, ready to sample from when `generation_prompt`."""
        return list(self._render_cached(json.dumps(list(messages)), json.dumps(list(tools)), generation_prompt))

    def render_continuation(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), *, turn_ended: bool = True
    ) -> list[int]:
        """Token ids to append after a sampled assistant turn: its end where it has none, the messages that came after
        it (tool results, a user's), and the next generation prompt. The sampled tokens are never tokenised again.

        The template renders a stub of a chat with and without the messages; what follows the stub's assistant turn is
        what follows any. So it does not matter how the template shows earlier turns.

        Args:
            turn_ended: the turn's last token is one that ends turns. False: it was cut off, or ended by a stop string.

        Raises:
            ArtifactError: the template ends the turn before a message otherwise than the last one.
            jinja2.TemplateError, TypeError: the template refuses the messages.
        """
        mark = _word_absent_from(json.dumps([list(messages), list(tools)]))
        before, after = self._around(mark, messages, tools)
        closing, tail = _what_follows(mark, before), _what_follows(mark, after)
        begun, ended = self._end_of_turn(closing, tail, tools)
        if tail[:ended] != closing[:ended]:
            raise ArtifactError(
                "the chat template ends an assistant turn otherwise when a message follows",
                expected=repr(closing[:ended]),
                found=repr(tail[:ended]),
            )
        return self.encode(tail[ended if turn_ended else begun :])

    def _around(
        self, mark: str, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> tuple[str, str]:
        """A stub of a chat whose assistant turn says `mark`, without and with the messages after it."""
        *others, last = _stubs(mark, messages)
        for stub in others:
            try:
                return self.render_text(stub, tools, False), self.render_text([*stub, *messages], tools)
            except TemplateError:  # Llama 3 allows one call a turn, other templates as many results as calls
                continue
        return self.render_text(last, tools, False), self.render_text([*last, *messages], tools)

    def _end_of_turn(self, closing: str, tail: str, tools: Sequence[dict[str, Any]]) -> tuple[int, int]:
        """Where the token that ends a turn is in `closing`; its end twice where no token ends turns.

        What follows a mere text ends any turn. A turn that makes calls closes them before that, maybe with special
        tokens as well (`</tool_call>`); if it has an end of its own (Llama's `<|eom_id|>`), that is the last one.

        Args:
            closing: what follows a turn that nothing follows. tail: the same of one that messages follow.
        """
        plain = self._after_text(json.dumps(list(tools)))
        if plain is not None and closing.endswith(plain):
            start = len(closing) - len(plain)
            found = self._end_token(plain, tail[start:])
            if found is not None:
                return start + found[0], start + found[1]
            at = closing.rfind(self.eos_text)
            return (at, at + len(self.eos_text)) if at >= 0 else (len(closing), len(closing))
        tokens = [match.span() for match in self._special_tokens.finditer(closing)]
        return tokens[-1] if tokens else (len(closing), len(closing))

    def _end_token(self, plain: str, followed: str) -> tuple[int, int] | None:
        """Where the token that ends a text is in what follows it.

        The tokenizer's end token, if it stays where messages follow (Cohere closes a text within a turn, Phi a chat
        after one); else the first special one: of a base model with another end token (`<|endoftext|>`), `<|im_end|>`.

        Args:
            plain: with nothing after the turn. followed: with messages after it.
        """
        at = plain.find(self.eos_text)
        ended = at + len(self.eos_text)
        if at >= 0 and plain[:ended] == followed[:ended]:
            return at, ended
        first = self._special_tokens.search(plain)
        return first.span() if first is not None else None

    def _what_follows_a_text(self, tools_json: str) -> str | None:
        """What the template writes after a turn that makes no calls; None where it refuses or hides one."""
        mark, tools = _word_absent_from(tools_json), json.loads(tools_json)
        (stub,) = _stubs(mark, ())
        try:
            return _what_follows(mark, self.render_text(stub, tools, False))
        except (TemplateError, ArtifactError):
            return None

    @cached_property
    def _special_tokens(self) -> re.Pattern[str]:
        """The end token, and all that the tokenizer calls special."""
        special = {str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        texts = sorted(special | {self.decode_token(self.eos_token_id)}, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)))

    @cached_property
    def eos_text(self) -> str:
        """Text of the token that ends an assistant turn."""
        return self.decode_token(self.eos_token_id)

    def decode_token(self, token_id: int) -> str:
        """Text of one token, special ones included."""
        return str(self.tokenizer.decode([token_id]))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled tokens, without special tokens but those of MARKUP, which tell reasoning and calls."""
        if self._special_markup:
            silent = self._special_ids - self._special_markup
            return str(self.tokenizer.decode([i for i in token_ids if i not in silent], skip_special_tokens=False))
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self.tokenizer.added_tokens_decoder.items()
        return frozenset({number for number, token in added if token.special} | {*self.tokenizer.all_special_ids})

    @cached_property
    def _special_markup(self) -> frozenset[int]:
        """Tokens of MARKUP that the tokenizer calls special; most call none so."""
        return frozenset(number for number in self._special_ids if self.decode_token(number) in MARKUP)

    def count_tokens(self, text: str) -> int:
        """Tokens of a text by itself."""
        return len(self.encode(text))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text by itself, none of them added."""
        return self._encode(text) if text else []

    @cached_property
    def _encode(self) -> Callable[[str], list[int]]:
        """transformers' `encode` takes three times as long as the tokenizer that it calls, to make more than ids."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return lambda text: list(self.tokenizer.encode(text, add_special_tokens=False))
        self.tokenizer.encode("", add_special_tokens=False)  # leaves the backend set to neither cut off nor pad
        return lambda text: list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def _is_plain(folder: Path) -> bool:
    """Whether AutoTokenizer would choose the class that knows what tokenizer.json says and nothing else.

    To know of all others, AutoTokenizer imports the code of models and compilers: more than a second of every process.
    """
    try:
        tokenizer, model = (
            json.loads((folder / name).read_bytes()) if (folder / name).is_file() else {}
            for name in ("tokenizer_config.json", "config.json")
        )
        return (
            (folder / "tokenizer.json").is_file()
            and tokenizer.get("tokenizer_class") in _PLAIN
            and model.get("model_type") in _KEEPING_PLAIN
        )
    except (OSError, ValueError, AttributeError):  # AutoTokenizer says what is wrong
        return False


def _template_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A Responses API tool (flat) as the chat template's (nested under `function`)."""
    if "function" in tool:
        return tool
    return {"type": "function", "function": {k: v for k, v in tool.items() if k not in ("type", "strict")}}


def _stubs(mark: str, messages: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Chats that the messages may follow: before tool results, the assistant has made calls, as many as there are
    results or one."""
    user, assistant = {"role": "user", "content": "x"}, {"role": "assistant", "content": mark}
    roles = [message.get("role") for message in messages]
    count = next((i for i, role in enumerate(roles) if role != "tool"), len(roles))
    for calls in sorted({count, min(count, 1)}, reverse=True):
        made = [
            {
                "id": message.get("tool_call_id", ""),
                "type": "function",
                "function": {"name": message.get("name", "x"), "arguments": {"x": mark}},
            }
            for message in messages[:calls]
        ]
        yield [user, {**assistant, "tool_calls": made} if made else assistant]


def _what_follows(mark: str, text: str) -> str:
    _, found, rest = text.rpartition(mark)
    if not found:
        raise ArtifactError("the chat template does not show what an assistant said", expected=mark, found=repr(text))
    return rest


def left_out(messages: Sequence[Mapping[str, Any]], text: str) -> list[str]:
    """Roles of messages that a template passed over without a word, as most do with roles that are not COMMON_ROLES.

    Args:
        text: the chat as the template wrote it.
    """
    own = [message for message in messages if message.get("role") not in COMMON_ROLES]
    return [str(each.get("role")) for each in own if str(each.get("content") or "").strip() not in text]


def _word_absent_from(text: str) -> str:
    word = "stub"
    while word in text:
        word += "x"
    return word
