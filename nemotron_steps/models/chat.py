"""Chats to token ids and back, through a tokenizer's own chat template. A conversation goes on in tokens
(docs/chat_templates.md). Text of a message is text: where it spells a special token, a GUARD breaks it before the
template sees it, and `encode` makes ordinary tokens of what has a guard."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from nemotron_steps.config.turn_ends import MARKUP, THINK_CLOSE, THINK_OPEN, TurnEnds, any_of, generation_ends
from nemotron_steps.errors import ArtifactError, DataError, show_line
from nemotron_steps.rows.messages import RENDERING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

COMMON_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Any other is some template's own: response_1, response_2 and principle of generative reward models."""
Encode = Callable[[str], list[int]]
GUARD = "q7GUARDz"
"""Letters, so that templates write it as it is, whether through tojson, repr or neither."""
_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Names of the one class for tokenizers that tokenizer.json describes in full."""
_KEEPING_PLAIN = ("llama", "qwen3", "qwen3_moe", "nemotron_h", None)
"""Families of models, or none, whose tokenizer_config.json transformers believes when it names that class."""


class ChatFormat:
    """Renders chats with a tokenizer's own template and decodes what a model said. tokenizer: with its chat template;
    source: where it is from, for errors; template_kwargs: variables of the template besides messages, tools and
    add_generation_prompt (`enable_thinking`, `truncate_history_thinking`, `date_string`, ...); generation_ends:
    eos_token_id of the model's generation_config.json. Raises ArtifactError when the folder has no tokenizer or the
    tokenizer has no chat template, and DataError for template_kwargs that are arguments of rendering
    (`add_generation_prompt`)."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        source: str = "tokenizer",
        template_kwargs: Mapping[str, Any] | None = None,
        generation_ends: Sequence[int] = (),
    ) -> None:
        if not tokenizer.chat_template:
            raise ArtifactError("the tokenizer has no chat template", where=source, expected="chat_template.jinja")
        self.tokenizer = tokenizer
        self.source = source
        self._template_kwargs = _template_kwargs(template_kwargs or {}, source)
        self._generation_ends = tuple(number for number in generation_ends if number < len(tokenizer))
        self._render_cached = lru_cache(maxsize=4096)(self._render)
        self._under_cached = lru_cache(maxsize=64)(self._under)

    @classmethod
    def from_folder(cls, folder: str | Path, template_kwargs: Mapping[str, Any] | None = None) -> ChatFormat:
        """Of a checkpoint folder: its tokenizer, chat template and generation_config.json."""
        import transformers

        if not Path(folder, "tokenizer.json").is_file() and not Path(folder, "tokenizer_config.json").is_file():
            raise ArtifactError("no tokenizer in the checkpoint", where=str(folder), expected="tokenizer.json")
        loader: Any = transformers.PreTrainedTokenizerFast if _is_plain(Path(folder)) else transformers.AutoTokenizer
        tokenizer = loader.from_pretrained(str(folder), trust_remote_code=False)
        return cls(tokenizer, str(folder), template_kwargs, generation_ends(Path(folder)))

    def with_template_kwargs(self, template_kwargs: Mapping[str, Any] | None, where: str | None = None) -> ChatFormat:
        """The same format with a row's own `chat_template_kwargs` on top. DataError, at `where`, for arguments of
        rendering."""
        if not template_kwargs:
            return self
        return self._under_cached(json.dumps(_template_kwargs(template_kwargs, where or self.source)))

    def _under(self, template_kwargs_json: str) -> ChatFormat:
        template_kwargs = {**self._template_kwargs, **json.loads(template_kwargs_json)}
        return ChatFormat(self.tokenizer, self.source, template_kwargs, self._generation_ends)

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant's turn: the tokenizer's, generation_config.json's, and the template's
        (config/turn_ends.py). Sampling stops at any, and nothing after one is trained."""
        number_of = {text: number for number, text in self._added.items()}
        return tuple(dict.fromkeys((*self._named_ends, *(number_of[text] for text in self._turn_ends.written))))

    @cached_property
    def _named_ends(self) -> tuple[int, ...]:
        own = self.tokenizer.eos_token_id
        return tuple(dict.fromkeys((*(() if own is None else (own,)), *self._generation_ends)))

    @cached_property
    def _turn_ends(self) -> TurnEnds:
        named = [self._added[number] for number in self._named_ends if number in self._added]
        special = [self._added[number] for number in self._special_ids]
        return TurnEnds(self._write, named, special, self._added.values())

    @cached_property
    def opens_thinking(self) -> bool:
        """Whether the generation prompt ends inside a think tag, so that every turn begins with reasoning."""
        prompt = self.render_text([{"role": "user", "content": "x"}])
        return prompt.rfind(THINK_OPEN) > prompt.rfind(THINK_CLOSE)

    @cached_property
    def _writes_tools(self) -> bool:
        """Whether the template writes tools at all, if need be with a system message: names alone may be in texts."""
        schema = {"type": "object", "properties": {}}
        tool = {"type": "function", "function": {"name": "markedname", "description": "x", "parameters": schema}}
        asked = {"role": "user", "content": "x"}
        try:
            texts = [self._write(chat, [tool], True) for chat in ([asked], [asked | {"role": "system"}, asked])]
        except Exception:  # a template may break in any way; with the chat's own messages it says so
            return True
        return any("markedname" in text for text in texts)

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        generation_prompt: bool = True,
    ) -> str:
        """The chat as the template writes it, for `encode`: with a GUARD in special tokens that messages spell."""
        return self._write(self._guarded(messages), self._guarded(tools), generation_prompt)

    def _write(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], generation_prompt: bool
    ) -> str:
        """As the template writes the messages; or, where it refuses them or writes calls as Python does, with arguments
        as JSON text (DeepSeek), with an empty text for a null beside calls (Gemma, Phi), and with both."""
        texts: list[str] = []
        refused: list[Exception] = []
        given: dict[str, Any] = self._template_kwargs | {"tokenize": False, "add_generation_prompt": generation_prompt}
        nested = []
        for tool in tools:  # of the Responses API they are flat
            function = tool.get("function") or {k: v for k, v in tool.items() if k not in ("type", "strict")}
            nested.append(tool if "function" in tool else {"type": "function", "function": function})
        given["tools"] = nested or None
        filled = [{**m, "content": m.get("content") or ""} if m.get("tool_calls") else m for m in messages]
        for form in (list(messages), _with_json(messages), filled, _with_json(filled)):
            try:
                text = str(self.tokenizer.apply_chat_template(form, **given))
            except (TemplateError, TypeError) as error:
                refused.append(error)
                continue
            texts.append(text)
            written = [each for m in messages for call in m.get("tool_calls") or () if (each := _arguments(call))]
            if not any(str(each) in text and json.dumps(each, ensure_ascii=False) not in text for each in written):
                return text
        if not texts:
            raise refused[0]
        return texts[0]

    def _guarded(self, value: Any) -> Any:
        """Messages or tools with a GUARD after the first character of special tokens that their texts spell."""
        if isinstance(value, str):
            return self._control.sub(lambda found: f"{found[0][0]}{GUARD}{found[0][1:]}", value)
        if isinstance(value, Mapping):
            return {self._guarded(key): self._guarded(each) for key, each in value.items()}
        return [self._guarded(each) for each in value] if isinstance(value, list | tuple) else value

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a chat, ready to sample from when `generation_prompt`. DataError as require_shown; TemplateError
        or TypeError when the template refuses the messages."""
        return list(self._render_cached(json.dumps(list(messages)), json.dumps(list(tools)), generation_prompt))

    def _render(self, messages_json: str, tools_json: str, generation_prompt: bool) -> tuple[int, ...]:
        messages, tools = json.loads(messages_json), json.loads(tools_json)
        text = self.render_text(messages, tools, generation_prompt)
        self.require_shown(text, messages, tools)
        return tuple(self.encode(text))

    def render_continuation(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), *, turn_ended: bool = True
    ) -> list[int]:
        """Token ids to append after a sampled assistant turn: its end where it has none (not `turn_ended`: it was cut
        off, or ended by a stop string), the messages after it, and the next generation prompt. The template renders a
        stub of a chat with and without the messages; what follows the stub's assistant turn is what follows any. So it
        does not matter how the template shows earlier turns. Raises as `render`, and ArtifactError when the template
        ends the turn before a message otherwise than the last one."""
        text = self._turn_ends.continuation(self._guarded(messages), self._guarded(tools), turn_ended=turn_ended)
        self.require_shown(text, messages)
        ends = (self._added[number] for number in self.end_ids if number in self._added) if turn_ended else ()
        return self.encode(text, next(iter(ends), "x"))

    def require_shown(
        self,
        text: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        where: str | None = None,
        hints: Sequence[str] = (),
    ) -> None:
        """DataError, `where` naming the row, for messages and tools that the template left out (`left_out`) of what it
        wrote: a model would be asked, or trained, without them."""
        missing = left_out(messages, tools, text)
        if missing is None and tools and not self._writes_tools:
            missing = "tools"
        if missing is not None:
            raise DataError(
                f"the chat template leaves out the {missing}",
                where=where or self.source,
                expected="a template that writes every message, call and tool",
                found=f"the template of {self.source}",
                hints=hints,
            )

    def turn_end(self, text: str) -> int:
        """Where what an assistant said is over: after the first end token of what follows any text, else after the last
        one, for a template may write several blocks for a message; or at the end of it."""
        closing = self._turn_ends.after_text("[]")
        begins = len(text) - len(closing) if closing and text.endswith(closing) else None
        ends = any_of({self._added[number] for number in self.end_ids if number in self._added})
        found = [*ends.finditer(text, begins or 0)]
        return found[-1 if begins is None else 0].end() if found else len(text)

    @cached_property
    def _added(self) -> dict[int, str]:
        """Tokens that the tokenizer finds in a text before it cuts it into others."""
        return {number: str(token) for number, token in self.tokenizer.added_tokens_decoder.items()}

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special)

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        """The special tokens and those that end turns, without MARKUP."""
        every = self._special_ids.union(self.end_ids) & self._added.keys()
        return frozenset(number for number in every if self._added[number] not in MARKUP)

    @cached_property
    def _guarded_ids(self) -> frozenset[int]:
        """Tokens that no message's text becomes: those, and others that the template writes between texts."""
        messages = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
        try:
            text = self._write(messages, (), True)
        except Exception:  # a template may break in any way; with the chat's own messages it says so
            text = ""
        words = {number for number, each in self._added.items() if not each.isspace() and not each.isalnum()}
        return self._control_ids | {n for n in words if self._added[n] in text and self._added[n] not in MARKUP}

    @cached_property
    def _control(self) -> re.Pattern[str]:
        return any_of({text for number in self._guarded_ids if len(text := self._added[number]) > 1})

    def decode_token(self, token_id: int) -> str:
        """Text of one token, special ones included."""
        return str(self.tokenizer.decode([token_id]))

    def decode(self, token_ids: Sequence[int], *, whole: bool = False) -> str:
        """Text of tokens; unless `whole`, of special ones and ends only those of MARKUP."""
        shown = token_ids if whole else [number for number in token_ids if number not in self._control_ids]
        return str(self.tokenizer.decode(list(shown), skip_special_tokens=False))

    def count_tokens(self, text: str) -> int:
        """Tokens of a text by itself."""
        return len(self.encode(text))

    def encode(self, text: str, after: str = "") -> list[int]:
        """Token ids of a text, none of them added. What a GUARD is in becomes ordinary tokens, without it. after: the
        text that it goes on from. Tokenizers like Llama 2's write a space before a text that begins."""
        pieces = [text]
        if GUARD in text:
            special = any_of({self._added[number] for number in self._special_ids | self._guarded_ids})
            pieces = [""]
            for piece in re.split(f"({special.pattern})", text):
                if GUARD in piece:
                    pieces += [piece, ""]
                else:
                    pieces[-1] += piece
        ids: list[int] = []
        for piece in filter(None, pieces):
            begins = True
            if after and self._unprefixed is not None:
                token = next((text for text in self._added.values() if after.endswith(text)), None)
                begins = token is not None and self._encode(f"{token}x")[1:] != self._unprefixed("x")
            ids += self._encode_piece(piece, begins)
            after = piece
        return ids

    def _encode_piece(self, piece: str, begins: bool) -> list[int]:
        """`begins`: the tokenizer writes its space before it."""
        if GUARD not in piece:
            if begins or self._unprefixed is None:
                return self._encode(piece)
            end = min((at for text in self._added.values() if (at := piece.find(text)) >= 0), default=len(piece))
            return self._unprefixed(piece[:end]) + self._encode(piece[end:])
        blind = self._unspecial if begins else self._unprefixed
        if blind is not None:
            ids = blind(piece.replace(GUARD, ""))
            if self._guarded_ids.isdisjoint(ids):
                return ids
        # A tokenizer may know a special token as a word, too: then its text is cut where the guard was.
        parts = enumerate(piece.split(GUARD))
        return [number for at, part in parts if part for number in self._encode_piece(part, begins and at == 0)]

    @cached_property
    def _backend(self) -> Tokenizer | None:
        return getattr(self.tokenizer, "backend_tokenizer", None)

    @cached_property
    def _unspecial(self) -> Encode | None:
        """The tokenizer, blind to special tokens in a text."""
        return None if self._backend is None else _blind(json.loads(self._backend.to_str()))

    @cached_property
    def _unprefixed(self) -> Encode | None:
        """The same, without the space that it writes before a text; None where it writes none."""
        parts = () if self._backend is None else (self._backend.normalizer, self._backend.pre_tokenizer)
        described = [json.loads(part.__getstate__()) for part in parts if part is not None]
        if self._backend is None or described == _without_prefix(described):
            return None
        whole = json.loads(self._backend.to_str())
        return _blind(whole | {part: _without_prefix(whole[part]) for part in ("normalizer", "pre_tokenizer")})

    @cached_property
    def _encode(self) -> Encode:
        """transformers' `encode` takes three times as long as the tokenizer that it calls, to make more than ids."""
        backend = self._backend
        if backend is None:
            return lambda text: list(self.tokenizer.encode(text, add_special_tokens=False))
        self.tokenizer.encode("", add_special_tokens=False)  # leaves the backend set to neither cut off nor pad
        return lambda text: list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def _blind(described: dict[str, Any]) -> Encode:
    """The tokenizer that a tokenizer.json describes, for texts in which special tokens are text."""
    from tokenizers import Tokenizer

    blind = Tokenizer.from_str(json.dumps(described | {"truncation": None, "padding": None}))
    blind.encode_special_tokens = True
    return lambda text: list(blind.encode(text, add_special_tokens=False).ids)


def _template_kwargs(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Variables of a template, none of which is an argument of rendering. DataError otherwise."""
    for name in sorted(RENDERING.intersection(given)):
        raise DataError(
            f"`chat_template_kwargs` must not have `{name}`, which is not the template's own",
            where=where,
            expected='variables that the template reads, as {"enable_thinking": false}',
            found=f"{name}: {str(given[name])[:80]!r}",
            hints=show_line(where),
        )
    return dict(given)


def _is_plain(folder: Path) -> bool:
    """Whether AutoTokenizer would choose the class that knows what tokenizer.json says and nothing else. To know of all
    others, it imports the code of models and compilers: more than a second of every process."""
    named = ("tokenizer_config.json", "config.json")
    try:
        tokenizer, model = (json.loads(file.read_bytes()) if (file := folder / n).is_file() else {} for n in named)
        plain = tokenizer.get("tokenizer_class") in _PLAIN and model.get("model_type") in _KEEPING_PLAIN
    except (OSError, ValueError, AttributeError):  # AutoTokenizer says what is wrong
        return False
    return plain and (folder / "tokenizer.json").is_file()


def _without_prefix(part: Any) -> Any:
    """A normalizer or pre-tokenizer of tokenizer.json without the space that it writes before a text."""
    if isinstance(part, list):
        return [_without_prefix(each) for each in part]
    if not isinstance(part, dict):
        return part
    off = {"prepend": "", "prepend_scheme": "never", "add_prefix_space": False}
    return {key: off[key] if key in off else _without_prefix(each) for key, each in part.items()}


def _arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """A call's arguments where they are an object, else nothing."""
    found = (call.get("function") or call).get("arguments")
    return found if isinstance(found, Mapping) else {}


def _with_json(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose calls have their arguments as JSON text."""
    changed = []
    for message in messages:
        calls = [{**call, "function": {**(call.get("function") or call)}} for call in message.get("tool_calls") or ()]
        for call in calls:
            if not isinstance(call["function"].get("arguments"), str):
                call["function"]["arguments"] = json.dumps(call["function"].get("arguments"), ensure_ascii=False)
        changed.append({**message, "tool_calls": calls} if calls else message)
    return changed


def left_out(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], text: str) -> str | None:
    """What of a chat a template did not write: a message's text, the reasoning of the last one (templates drop earlier
    turns'), a call or a tool; None for nothing. Whitespace and escapes do not count."""
    text = _squeezed(text)
    for tool in tools:
        name = str((tool.get("function") or tool).get("name"))
        if name not in text:
            return f"tool `{name}`"
    for place, message in enumerate(messages):
        role, content = str(message.get("role")), message.get("content")
        parts = content if isinstance(content, list) else [content]
        said = "".join(str(part.get("text") or "") if isinstance(part, Mapping) else str(part or "") for part in parts)
        if role == "assistant":
            said = said.rpartition(THINK_CLOSE)[2].partition(THINK_OPEN)[0]
        if not _is_in(text, said):
            return f"{role} message"
        if place == len(messages) - 1 and not _is_in(text, str(message.get("reasoning_content") or "")):
            return f"reasoning of the {role} message"
        for call in message.get("tool_calls") or ():
            function = call.get("function") or call
            name = str(function.get("name"))
            if not all(_is_in(text, leaf) for leaf in (name, *_leaves(function.get("arguments")))):
                return f"call of `{name}` of the {role} message"
    return None


def _leaves(value: Any) -> Iterator[str]:
    """Names and texts of a call's arguments; what else is in them is written in many ways."""
    if isinstance(value, Mapping):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, str):
        yield value


def _is_in(text: str, part: str) -> bool:
    """Whether a squeezed text has another, as it is or as JSON or Python write it."""
    if _squeezed(part) in text:
        return True
    escaped = json.dumps(part, ensure_ascii=False)[1:-1], json.dumps(part)[1:-1], repr(part)[1:-1]
    return any(_squeezed(form) in text for form in escaped)


def _squeezed(text: str) -> str:
    """Without whitespace, guards, and the words for reasoning that some templates take out (Nemotron Nano 2)."""
    return "".join(text.split()).replace(GUARD, "").replace("/no_think", "").replace("/think", "")
