"""Where in a TOML file a key stands. Lines are found only when an error has to name one; parsing is `tomllib`'s."""

import re
from collections.abc import Iterator, Sequence
from functools import cached_property

_HEADER = re.compile(r"\s*(\[\[?)([^\[\]]+)\]\]?\s*(#.*)?$")
_KEY = re.compile(
    r"""\s*((?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*'))*)\s*="""
)
_PART = re.compile(r"""[A-Za-z0-9_-]+|"([^"\n]*)"|'([^'\n]*)'""")
_INLINE_KEY = re.compile(r"""[{,]\s*([A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')\s*=""")
_STRING_OR_BRACKET = re.compile(r"""\"\"\"|'''|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|\#[^\n]*|[\[\]{}]""")


class SourceText:
    """The text of one TOML file, able to say on which line a key stands."""

    def __init__(self, text: str) -> None:
        self.text = text

    def line(self, path: Sequence[str | int]) -> int:
        """Line (from 1) of the key at `path` (keys, and indices of arrays of tables), else of its nearest parent."""
        parts = tuple(path)
        for length in range(len(parts), 0, -1):
            found = self._lines.get(parts[:length])
            if found is not None:
                return found
        return 1

    @cached_property
    def _lines(self) -> dict[tuple[str | int, ...], int]:
        lines: dict[tuple[str | int, ...], int] = {}
        counts: dict[tuple[str | int, ...], int] = {}
        table: tuple[str | int, ...] = ()
        for number, text in _statements(self.text):
            header = _HEADER.match(text)
            if header is not None:
                names = _parts(header[2])
                table = _enter(names, counts, array=header[1] == "[[")
                for length in range(1, len(table) + 1):
                    lines.setdefault(table[:length], number)
                continue
            key = _KEY.match(text)
            if key is not None:
                full = table + _parts(key[1])
                for length in range(len(table) + 1, len(full) + 1):
                    lines.setdefault(full[:length], number)
                for nested, offset in _inline_keys(text[key.end() :]):
                    lines.setdefault((*full, nested), number + offset)
        return lines


def _enter(names: tuple[str, ...], counts: dict[tuple[str | int, ...], int], *, array: bool) -> tuple[str | int, ...]:
    """The full path of a table header: array-of-tables names get the index of their latest element."""
    path: tuple[str | int, ...] = ()
    for position, name in enumerate(names):
        path = (*path, name)
        if array and position == len(names) - 1:
            counts[path] = counts.get(path, -1) + 1
            return (*path, counts[path])
        if path in counts:
            path = (*path, counts[path])
    return path


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(m[1] if m[1] is not None else m[2] if m[2] is not None else m[0] for m in _PART.finditer(dotted))


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """(line, statement) pairs; a statement that spans lines (multi-line string or array) comes whole."""
    lines = text.split("\n")
    index = 0
    while index < len(lines):
        start, statement = index, lines[index]
        index += 1
        if _HEADER.match(statement) is None:
            while not _closed(statement) and index < len(lines):
                statement += "\n" + lines[index]
                index += 1
        yield start + 1, statement


def _closed(statement: str) -> bool:
    """Whether every bracket and multi-line string opened in the statement is closed in it."""
    depth, position = 0, 0
    while (match := _STRING_OR_BRACKET.search(statement, position)) is not None:
        token, position = match[0], match.end()
        if token in ('"""', "'''"):
            end = statement.find(token, position)
            if end < 0:
                return False
            position = end + 3
        elif token in "[{":
            depth += 1
        elif token in "]}":
            depth -= 1
    return depth <= 0


def _inline_keys(value: str) -> Iterator[tuple[str, int]]:
    """(key, line offset) of the keys of an inline table."""
    if not value.lstrip().startswith("{"):
        return
    for match in _INLINE_KEY.finditer(value):
        yield _parts(match[1])[0], value.count("\n", 0, match.start(1))
