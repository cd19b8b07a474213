"""Plain text with colour, fitted to the terminal (NO_COLOR, FORCE_COLOR and TERM=dumb are honoured): styles, tables,
trees. Text that goes to a pipe is never cut short."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO
from unicodedata import east_asian_width

from nemotron_steps.errors import InterruptedRunError
from nemotron_steps.runs import log_format

_CODES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "blue": 34, "cyan": 36}
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Terminal:
    """Where text goes, and how it may look."""

    stream: TextIO
    color: bool
    width: int | None
    """Columns to fit into; None for a pipe: no limit."""

    @staticmethod
    def of(stream: TextIO | None = None) -> Terminal:
        """The terminal behind a stream (default: stdout)."""
        out = sys.stdout if stream is None else stream
        tty = out.isatty()
        forced = bool(os.environ.get("FORCE_COLOR"))
        plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
        if hasattr(out, "reconfigure"):  # a terminal of another encoding shows ? for what it lacks
            out.reconfigure(errors="replace")
        return Terminal(
            out,
            color=(tty or forced) and not plain,
            width=shutil.get_terminal_size((100, 24)).columns if tty else None,
        )

    def style(self, text: str, *names: str) -> str:
        """`text` in a style (`bold`, `dim`, `cyan`, ...), or unchanged where there is no colour."""
        if not self.color or not names or not text:
            return text
        return f"\x1b[{';'.join(str(_CODES[name]) for name in names)}m{text}\x1b[0m"

    def print(self, text: str = "") -> None:
        """Write one or more lines."""
        self.stream.write(text + "\n")

    def confirm(self, question: str, refused: str) -> bool:
        """Ask; False where nobody can be asked. InterruptedRunError saying `refused` for any answer but yes."""
        if self.width is None or not sys.stdin.isatty():
            return False
        self.stream.write(f"{question} [y/N] ")
        self.stream.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise InterruptedRunError(refused)
        return True

    def table(
        self, rows: Iterable[Sequence[str]], *, indent: int = 0, flexible: int = -1, below: int | None = None
    ) -> None:
        """Aligned columns; `flexible` gives way on a narrow terminal, a wide last cell goes `below`, so far in."""
        cells = [list(row) for row in rows]
        if not cells:
            return
        count = max(len(row) for row in cells)
        for row in cells:
            row.extend([""] * (count - len(row)))
        flexible %= count
        widths = [max(visible_width(row[column]) for row in cells) for column in range(count)]
        if self.width is not None:
            used = indent + 2 * (count - 1) + sum(widths) - widths[flexible]
            widths[flexible] = max(min(widths[flexible], self.width - used), 12)
        for row in cells:
            under = ""
            if below is not None and visible_width(row[-1]) > widths[-1]:
                under, row[-1] = row[-1], ""
            parts = []
            for column, cell in enumerate(row):
                if column == flexible and self.width is not None:
                    cell = shorten(cell, widths[column])
                parts.append(cell + " " * (widths[column] - visible_width(cell)))
            line = (" " * indent + "  ".join(parts)).rstrip()
            self.print(line if self.width is None else shorten(line, self.width))
            if under and below is not None:
                self.print(" " * below + under)

    def tree(self, node: Mapping[str, Any], prefix: str = "") -> None:
        """A nested mapping as a tree; keys are labels, empty mappings are leaves."""
        entries = list(node.items())
        for index, (label, below) in enumerate(entries):
            last = index == len(entries) - 1
            self.print(self.style(prefix + ("└── " if last else "├── "), "dim") + label)
            if below:
                self.tree(below, prefix + ("    " if last else "│   "))

    def wrap(self, text: str, *, indent: int = 0) -> None:
        """A paragraph, filled to the terminal's width (at most 100 columns)."""
        import textwrap

        wrapper = textwrap.TextWrapper(min(self.width or 100, 100), break_long_words=False, break_on_hyphens=False)
        wrapper.initial_indent = wrapper.subsequent_indent = " " * indent
        self.print(wrapper.fill(" ".join(text.split())))


def visible_width(text: str) -> int:
    """Columns a text takes, escapes not counted."""
    plain = _ESCAPE.sub("", text)
    if plain.isascii():
        return len(plain)
    return sum(2 if east_asian_width(c) in "WF" else 1 for c in plain)


def shorten(text: str, width: int) -> str:
    """`text` cut to `width` columns with …; escapes are kept whole."""
    if visible_width(text) <= width:
        return text
    kept, used = "", 0
    for piece in re.findall(r"\x1b\[[0-9;]*m|.", text, re.DOTALL):
        used += visible_width(piece)
        if used > width - 1:
            break
        kept += piece
    cut = kept.rstrip() + "…"
    return cut + "\x1b[0m" if "\x1b[" in cut else cut


def first_sentence(text: str) -> str:
    """The first sentence of a description, on one line, without its full stop."""
    return re.split(r"(?<=[.!?])\s", " ".join(text.split()), maxsplit=1)[0].rstrip(".")


def duration(seconds: float) -> str:
    """`850 ms`, `12.3 s`, `4 min 05 s`, `3 h 12 min`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def number(value: Any) -> str:
    """A number for reading: `0.8125`, `1,024`."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else log_format.number(value)
