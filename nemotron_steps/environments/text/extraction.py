"""Finding the answer inside a text: answer tags, boxes, fenced blocks. Shared by the environments that grade text."""

from __future__ import annotations

import re
from collections.abc import Iterator

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_FENCED = re.compile(r"^[ \t]*```([^\n`]*)\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


def last_answer_tag(text: str) -> str | None:
    """Stripped content of the last <answer>…</answer>, None when there is none."""
    found = _ANSWER_TAG.findall(text)
    return found[-1].strip() if found else None


def boxed(text: str) -> Iterator[str]:
    r"""Content of every complete \boxed{…}, in order, braces balanced (escaped braces do not count)."""
    for match in _BOX.finditer(text):
        depth = 1
        position = match.end()
        while position < len(text) and depth:
            character = text[position]
            if character == "\\":
                position += 2
                continue
            depth += (character == "{") - (character == "}")
            position += 1
        if depth == 0:
            yield text[match.end() : position - 1]


def last_boxed(text: str) -> str | None:
    r"""Stripped content of the last complete \boxed{…}, None when there is none."""
    last = None
    for content in boxed(text):
        last = content.strip()
    return last


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """(info string, content) of every complete fenced block, in order."""
    return [(info.strip(), content) for info, content in _FENCED.findall(text)]
