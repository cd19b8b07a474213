"""Where in a TOML file a key stands, for errors. A key of an inline table stands where its table begins."""

import re
from collections.abc import Sequence
from functools import cached_property

_NAME = r"""[\w-]+|"[^"\n]*"|'[^'\n]*'"""
_LINE = re.compile(rf"\s*(\[\[?)?\s*((?:{_NAME})(?:\s*\.\s*(?:{_NAME}))*)\s*(\]|=)")


class SourceText:
    """The text of one TOML file, able to say on which line a key stands."""

    def __init__(self, text: str) -> None:
        self.text = text

    def line(self, path: Sequence[str | int]) -> int:
        """Line (from 1) of the key at `path` (keys, and indices of arrays of tables), else of its nearest parent."""
        parts = tuple(path)
        lengths = range(len(parts), 0, -1)
        return next((self._lines[parts[:n]] for n in lengths if parts[:n] in self._lines), 1)

    @cached_property
    def _lines(self) -> dict[tuple[str | int, ...], int]:
        lines: dict[tuple[str | int, ...], int] = {}
        latest: dict[tuple[str | int, ...], int] = {}  # array of tables → index of its newest
        table: tuple[str | int, ...] = ()
        for number, text in enumerate(self.text.split("\n"), 1):
            match = _LINE.match(text)
            if match is None or (match[1] is None) != (match[3] == "="):
                continue
            names = [name.strip("\"'") for name in re.findall(_NAME, match[2])]
            path = () if match[1] else table
            for position, name in enumerate(names, 1):
                path = (*path, name)
                lines.setdefault(path, number)
                if match[1] == "[[" and position == len(names):
                    latest[path] = latest.get(path, -1) + 1
                if match[1] and path in latest:
                    path = (*path, latest[path])
                    lines.setdefault(path, number)
            table = path if match[1] else table
        return lines
