"""`steps explain CODE`: why an error is raised, a command that raises it, and what mends it."""

from __future__ import annotations

import textwrap
import tomllib
from importlib.resources import files
from typing import TYPE_CHECKING

from nemotron_steps.cli.errors import print_json
from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.config.names import nearest
from nemotron_steps.errors import UnknownNameError

if TYPE_CHECKING:
    import argparse


def explanations() -> dict[str, dict[str, str]]:
    """Code → title, cause, mend, and for most example, setup and then (nemotron_steps/errors/explanations.toml)."""
    return tomllib.loads((files("nemotron_steps.errors") / "explanations.toml").read_text(encoding="utf-8"))


def explain(arguments: argparse.Namespace) -> int:
    """`steps explain [CODE]`: one code, or the titles of all."""
    known = explanations()
    if arguments.code is None:
        if arguments.as_json:
            print_json([{"code": code, **entry} for code, entry in known.items()])
            return 0
        terminal = Terminal.of()
        terminal.table([[terminal.style(code, "bold"), entry["title"]] for code, entry in known.items()])
        return 0
    code = arguments.code.upper().removeprefix("ERROR[").removesuffix("]")
    if code not in known:
        raise UnknownNameError(
            f"there is no error '{arguments.code}'",
            expected="a code like E303, as it stands in error[E303]",
            found=arguments.code,
            hints=(*(f"steps explain {close}" for close in nearest(code, known)[:2]), "steps explain"),
        )
    entry = known[code]
    if arguments.as_json:
        print_json({"code": code, **entry})
        return 0
    terminal = Terminal.of()
    terminal.print(f"{terminal.style(code, 'bold')}  {entry['title']}")
    terminal.print()
    _paragraph(terminal, entry["cause"])
    if "example" in entry:
        terminal.print()
        terminal.print(terminal.style("For example", "dim"))
        for line in (entry.get("setup"), entry["example"]):
            if line is not None:
                terminal.print(f"  {line.encode('unicode_escape').decode()}")
    terminal.print()
    terminal.print(terminal.style("What mends it", "dim"))
    _paragraph(terminal, entry["mend"], "  ")
    if "then" in entry:
        terminal.print(f"  {terminal.style(entry['then'], 'cyan')}")
    return 0


def _paragraph(terminal: Terminal, text: str, indent: str = "") -> None:
    for line in textwrap.wrap(
        text,
        min(terminal.width or 100, 100),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ):
        terminal.print(line)
