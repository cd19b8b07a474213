"""Finding the answer inside a text: answer tags, boxes, fenced blocks, JSON. Shared by environments that grade text.

Every function takes time linear in the text: what it reads is written by a model, which may repeat itself for ever.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from nemotron_steps.environments.responses import finite

_ANSWER_OPEN, _ANSWER_CLOSE = "<answer>", "</answer>"
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_FENCED = re.compile(r"^[ \t]*```([^\n`]*)\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)

_JSON_BEGINNING = {
    "{": re.compile(r"\{(?=\s*[\"}])"),
    "[": re.compile(r"\[(?=\s*(?:[\[{\"\]\d-]|true|false|null))"),
}
MOST_IN_VAIN = 100
"""Places where no JSON begins after all, in the search for it in one text; each may be read to the end."""


def last_answer_tag(text: str) -> str | None:
    """Stripped content of the last <answer>…</answer>, None when there is none."""
    found, end = None, 0
    while (begin := text.find(_ANSWER_OPEN, end)) != -1:
        begin += len(_ANSWER_OPEN)
        close = text.find(_ANSWER_CLOSE, begin)
        if close == -1:
            break
        found, end = (begin, close), close + len(_ANSWER_CLOSE)
    return None if found is None else text[slice(*found)].strip()


def last_boxed(text: str) -> str | None:
    r"""Stripped content of the last complete \boxed{…}, braces balanced (escaped ones do not count); None without."""
    limit = len(text)
    for box in reversed([match.end() for match in _BOX.finditer(text)]):
        depth = 1
        for token in _BRACE.finditer(text, box, limit):
            depth += (token.group() == "{") - (token.group() == "}")
            if depth == 0:
                return text[box : token.start()].strip()
        # This box is never closed, so none before it can be closed after its beginning.
        limit = box - 1
    return None


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """(info string, content) of every complete fenced block, in order."""
    return [(info.strip(), content) for info, content in _FENCED.findall(text)]


def json_values(text: str, opener: Literal["[", "{"]) -> Iterator[tuple[str, Any]]:
    """(source, value) of every outermost JSON value that begins with `opener`, from left to right."""
    beginning = _JSON_BEGINNING[opener]
    decoder = json.JSONDecoder()
    left = MOST_IN_VAIN
    found = beginning.search(text)
    while found is not None and left > 0:
        position = found.start()
        try:
            value, end = decoder.raw_decode(text, position)
            finite(value)
        except RecursionError:
            return
        except ValueError:  # also a number with too many digits, or not finite
            left -= 1
            end = position + 1
        else:
            yield text[position:end], value
        found = beginning.search(text, end)


def output_regexes(row: Mapping[str, Any]) -> list[str]:
    """The regular expressions of a row's `template_metadata.output_regex`, which may be one, a list, or absent."""
    metadata = row.get("template_metadata")
    given = metadata.get("output_regex") if isinstance(metadata, Mapping) else None
    return [str(pattern) for pattern in (given if isinstance(given, list) else [given]) if pattern]


def regex_problem(patterns: Sequence[str]) -> str | None:
    """Why one of them is not a regular expression, or None."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            return f"{pattern!r}: {error}"
    return None


def last_captures(text: str, patterns: Sequence[str], flags: int = 0) -> list[str | None]:
    """What each pattern captures where it matches last: the first group with text, else the whole match; None where it
    matches nowhere. The patterns come from data, so nothing bounds their time: call it in a helper process."""
    captures: list[str | None] = []
    for pattern in patterns:
        last = None
        for last in re.finditer(pattern, text, flags):  # noqa: B007
            pass
        groups = [group for group in last.groups() if group and group.strip()] if last is not None else []
        captures.append(None if last is None else (groups[0] if groups else last.group(0)).strip())
    return captures
