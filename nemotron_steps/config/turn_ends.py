"""What ends an assistant's turn, and where in what a chat template writes. Texts only: neither transformers nor Jinja.

Ends are a set, as in transformers' and vLLM's generation: the tokenizer's eos_token, eos_token_id of
generation_config.json (`named` ends), and what the template writes after a turn, of a text and of calls.
"""

import json
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from nemotron_steps.errors import ArtifactError

Messages = Sequence[dict[str, Any]]
Render = Callable[[Messages, Messages, bool], str]
"""Messages, tools and whether to add the generation prompt → the text that a chat template writes."""
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
MARKUP = frozenset({THINK_OPEN, THINK_CLOSE, "<tool_call>", "</tool_call>", "<TOOLCALL>", "</TOOLCALL>"})
"""Tags that are read in what a model says (engine/rollouts/parsers): they never end a turn."""
GENERATION_CONFIG = "generation_config.json"
TOOL = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}


def generation_ends(folder: Path) -> tuple[int, ...]:
    """Token ids of `eos_token_id` in a model's generation_config.json; ArtifactError where it is something else."""
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return ()
    try:
        config = json.loads(path.read_bytes())
        found = config.get("eos_token_id")
    except (ValueError, RecursionError, AttributeError) as error:
        found, config = repr(error)[:80], None
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if config is None or not all(type(number) is int and number >= 0 for number in ids):
        raise ArtifactError(
            "eos_token_id of generation_config.json must be a token id or a list of them",
            where=str(path),
            expected='{"eos_token_id": [151645, 151643]}',
            found=repr(found)[:80],
            hints=(f"rm {shlex.quote(str(path))}   # turns end as the tokenizer and the template say",),
        )
    return tuple(ids)


class TurnEnds:
    """Finds the ends of turns by rendering stubs of chats with and without messages after an assistant's turn. Of the
    tokenizer: texts of the named ends that are whole tokens, of special tokens, and of other added ones, which end a
    turn where no special one does."""

    def __init__(self, render: Render, named: Collection[str], special: Collection[str], added: Collection[str]):
        self._render = render
        self._named, self._special, self._added = (
            any_of({*texts} - MARKUP) for texts in (named, {*named, *special}, added)
        )
        self.after_text = lru_cache(maxsize=64)(self._what_follows_a_text)

    @cached_property
    def written(self) -> tuple[str, ...]:
        """Tokens that the template writes at the end of a turn: of one that says something, and of one that calls."""
        result = {"role": "tool", "content": "x", "name": "look", "tool_call_id": "call00001"}
        found = []
        for messages, tools in (([{"role": "user", "content": "x"}], ()), ([result], [{"type": "function", **TOOL}])):
            try:
                mark, before, after = self._around(messages, tools)
                closing = what_follows(mark, before)
                begun, ended = self._end_of_turn(closing, what_follows(mark, after), tools)
            except Exception:  # a template may break in any way; it writes no such turn
                continue
            found.append(closing[begun:ended])
        return tuple(dict.fromkeys(text for text in found if text))

    def continuation(self, messages: Messages, tools: Messages, *, turn_ended: bool) -> str:
        """See ChatFormat.render_continuation."""
        mark, before, after = self._around(messages, tools)
        closing, tail = what_follows(mark, before), what_follows(mark, after)
        begun, ended = self._end_of_turn(closing, tail, tools)
        if tail[:ended] != closing[:ended]:
            what = "the chat template ends an assistant turn otherwise when a message follows"
            raise ArtifactError(what, expected=repr(closing[:ended]), found=repr(tail[:ended]))
        return tail[ended if turn_ended else begun :]

    def _around(self, messages: Messages, tools: Messages) -> tuple[str, str, str]:
        """A word, and a stub of a chat whose assistant turn says it, without and with the messages after it."""
        mark = word_absent_from(json.dumps([list(messages), list(tools)]))
        *others, last = _stubs(mark, messages)
        for stub in others:
            try:
                return mark, self._render(stub, tools, False), self._render([*stub, *messages], tools, True)
            except Exception:  # Llama 3 allows one call a turn, other templates as many results as calls
                continue
        return mark, self._render(last, tools, False), self._render([*last, *messages], tools, True)

    def _end_of_turn(self, closing: str, tail: str, tools: Messages) -> tuple[int, int]:
        """Where the token that ends a turn is in `closing`, what follows a turn that nothing follows (`tail`: the same
        of one that messages follow); its end twice where no token ends turns.

        What follows a mere text ends any turn. A turn that makes calls closes them before that, maybe with special
        tokens as well (`</tool_call>`); if it has an end of its own (Llama's `<|eom_id|>`), that is the last one."""
        plain, tokens = self.after_text(json.dumps(list(tools))), self._special
        if plain is not None and closing.endswith(plain):
            start, tokens = len(closing) - len(plain), self._named
            # The first named end that stays where messages follow (Cohere closes a text within a turn, Phi a chat after
            # one); else the first special one: of a base model that names another end (`<|endoftext|>`), `<|im_end|>`.
            staying = (end for end in tokens.finditer(plain) if tail[start:].startswith(plain[: end.end()]))
            found = next(staying, None) or self._special.search(plain) or self._added.search(plain)
            if found is not None:
                return start + found.start(), start + found.end()
        ends = [end.span() for end in tokens.finditer(closing)]
        return ends[-1] if ends else (len(closing), len(closing))

    def _what_follows_a_text(self, tools_json: str) -> str | None:
        """What the template writes after a turn that makes no calls; None where it refuses or hides one."""
        mark, tools = word_absent_from(tools_json), json.loads(tools_json)
        (stub,) = _stubs(mark, ())
        try:
            return what_follows(mark, self._render(stub, tools, False))
        except Exception:  # as in `written`
            return None


def any_of(texts: Collection[str]) -> re.Pattern[str]:
    """Matches any of the texts, the longest first; nothing where there are none."""
    return re.compile("|".join(map(re.escape, sorted(filter(None, texts), key=len, reverse=True))) or r"(?!)")


def what_follows(mark: str, text: str) -> str:
    """The text after its last `mark`. ArtifactError where there is none."""
    _, found, rest = text.rpartition(mark)
    if not found:
        raise ArtifactError("the chat template does not show what an assistant said", expected=mark, found=repr(text))
    return rest


def _stubs(mark: str, messages: Sequence[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Chats that the messages may follow: before tool results, the assistant has made as many calls, or one."""
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


def word_absent_from(text: str) -> str:
    """A word that a text does not have."""
    word = "stub"
    while word in text:
        word += "x"
    return word
