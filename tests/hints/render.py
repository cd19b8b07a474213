"""docs/errors.md from the table of faults: `python -m tests.hints.render` writes it, and a test compares."""

from __future__ import annotations

from pathlib import Path

import nemotron_steps
from tests.hints.faults import FAULTS, Fault
from tests.hints.pasting import WORKS

PAGE = Path(nemotron_steps.__file__).parents[1] / "docs" / "errors.md"
_HEAD = """\
# Errors and their hints

An error has a code, the place, what was expected and found, and hints. `steps explain CODE` says why it is raised and
what mends it, `steps explain SIGNAL` the same of a warning sign of a training run ([signals](signals.md)), `steps
explain` lists all of them.

A hint can be pasted, the first one is the most useful:

- `steps …` is a command of its own.
- `did you mean 'NAME'?` is the name to write in place of one that does not exist.
- A flag or `key=value` goes behind the command, in the place of the override or `--input` that the error is about. `as
  in:` shows the whole command with the first of them, as it was typed (`nemotron super3 …`, `--run PROFILE`).
- Anything else is for the shell; then the same command again.
- Words in capitals are yours to fill in. What follows `   #` says what a hint does.

Each fault below is provoked in `tests/hints`, its hint pasted, and the outcome compared with this table.

| what went wrong | typed | error | hint | pasted |
|---|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    return _HEAD + "".join(_row(fault) for fault in FAULTS)


def _row(fault: Fault) -> str:
    then = "works" if fault.then == WORKS else f"the next thing to say: {fault.then}"
    if fault.again:
        then = "the same command again works"
    if fault.put:
        then += " (with " + ", ".join(f"{_code(value)} for {_code(word)}" for word, value in fault.put.items()) + ")"
    code = "a warning" if fault.code == "warning" else fault.code
    return f"| {fault.name} | {_code('steps ' + fault.command)} | {code} | {_code(fault.hint)} | {then} |\n"


def _code(text: str) -> str:
    text = text.replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
