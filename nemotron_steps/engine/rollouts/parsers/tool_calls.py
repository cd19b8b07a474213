"""What tool parsers share: their result, and reading JSON that ends where its grammar ends.

A parser takes well-formed calls out of the text. A malformed call stays in it, and is named besides: it is never
guessed at. Searching for a closing tag alone would cut a call whose argument contains that tag.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class ParsedCalls:
    """An answer taken apart.

    Attributes:
        text: what is left of it without its well-formed calls; stripped when there were some.
        calls: (tool name, arguments as JSON text), in order.
        malformed: bodies of calls that could not be read; they are in `text` too.
    """

    text: str
    calls: tuple[tuple[str, str], ...] = ()
    malformed: tuple[str, ...] = ()


ToolParser = Callable[[str, Sequence[Mapping[str, Any]]], ParsedCalls]
"""(answer without reasoning, tools offered) → ParsedCalls."""


class MalformedCallError(ValueError):
    """A call that cannot be read. Internal to the parsers: it becomes ParsedCalls.malformed."""


def read_json(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at or after `start`, and where it ends.

    Raises:
        MalformedCallError: no value, or one with NaN or infinities, which JSON does not have.
    """
    try:
        return _DECODER.raw_decode(text, skip_space(text, start))
    except (ValueError, RecursionError) as error:
        raise MalformedCallError(str(error)) from error


def skip_space(text: str, start: int) -> int:
    """Position of the first character at or after `start` that is no white space."""
    found = _SPACE.match(text, start)
    assert found is not None  # the pattern matches the empty string
    return found.end()


def call_of(value: Any, arguments_key: str = "arguments") -> tuple[str, str]:
    """(name, arguments as JSON text) of a call written as a JSON object.

    Raises:
        MalformedCallError: it is not one.
    """
    if not isinstance(value, dict):
        raise MalformedCallError("the call is not an object")
    name, arguments = value.get("name"), value.get(arguments_key)
    if not isinstance(name, str) or not name:
        raise MalformedCallError("the call has no name")
    if isinstance(arguments, str):  # some models write the arguments as text, as OpenAI's API does
        return name, arguments
    if not isinstance(arguments, dict):
        raise MalformedCallError(f"`{arguments_key}` is not an object")
    return name, json.dumps(arguments)


def take_tagged(
    text: str, opening: str, closing: str, read: Callable[[str, int], tuple[list[tuple[str, str]], int]]
) -> ParsedCalls:
    """Take every `opening … closing` block out of a text.

    Args:
        read: (text, position after the opening tag) → (calls, position after their last character); raises
            MalformedCallError.
    """
    kept: list[str] = []
    calls: list[tuple[str, str]] = []
    malformed: list[str] = []
    position = 0
    while (begin := text.find(opening, position)) >= 0:
        kept.append(text[position:begin])
        inside = begin + len(opening)
        try:
            found, end = read(text, inside)
            end = skip_space(text, end)
            if not text.startswith(closing, end):
                raise MalformedCallError(f"no {closing} after the call")
        except MalformedCallError:
            body, closed, _ = text[inside:].partition(closing)
            end = inside + len(body) + len(closed)
            # A call that was cut off before its closing tag is text like any other.
            if closed:
                malformed.append(body.strip())
            kept.append(text[begin:end])
        else:
            calls.extend(found)
            end += len(closing)
        position = end
    if not calls:
        return ParsedCalls(text, (), tuple(malformed))
    return ParsedCalls("".join([*kept, text[position:]]).strip(), tuple(calls), tuple(malformed))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
