"""Pasting a hint as a user does: what is a command is run, what belongs to the command is put behind it."""

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher

from tests.cli.conftest import Cli, Result

WORKS = "works"
_CODE = re.compile(r"error\[(E\d{3})\]")
_BEHIND = re.compile(r"-|[\"']?[~+]?[a-z_][\w./-]*=")
"""How a flag or an override begins."""
_RUN = re.compile(r"\d{8}-\d{6}-[\w-]+-[0-9a-f]{4}")


def hints_in(result: Result) -> list[str]:
    """The hints that were printed, in their order."""
    return [line.split("hint: ", 1)[1] for line in (result.err + result.out).splitlines() if "hint: " in line]


def told(result: Result) -> str:
    """`works`, the code of the first error, or `warning` for a run that worked and said that something did not."""
    if found := _CODE.search(result.err):
        return found[1]
    if result.code == 130:
        return "E800"
    assert result.code == 0, result.err
    return "warning" if "the run goes on" in result.out else WORKS


def paste(
    hint: str, typed: Sequence[str], where: str, cli: Cli, put: Mapping[str, str], *, again: bool = False
) -> Result:
    """What the command comes to once a hint was pasted.

    `steps …` is run in the command's place; flags and overrides are put behind the command; anything else is a command
    for the shell, which must work, and the command is run again.

    Args:
        where: the place that the error named.
        put: what a user puts for the words in capitals.
        again: after a hint that is another `steps …`, the command is run again.
    """
    text = hint.split("   #")[0]
    for word, value in put.items():
        assert word in text, (word, text)
        text = text.replace(word, value)
    if text.startswith("steps "):
        result = cli(*shlex.split(text)[1:])
        if again:
            assert result.code == 0, result.err
            return cli(*typed)
        return result
    if names := re.findall("'([^']+)'", text) if text.startswith("did you mean") else []:
        return cli(*_renamed(typed, names[0]))
    if _BEHIND.match(text):
        return cli(*_put_behind(typed, shlex.split(text), where))
    if text.startswith("export "):
        name, _, value = text.removeprefix("export ").partition("=")
        os.environ[name] = value  # the fixture puts the environment back
    else:
        subprocess.run(["bash", "-c", text], check=True, capture_output=True)
    return cli(*typed)


def _renamed(typed: Sequence[str], name: str) -> list[str]:
    """A command with the word, or what a word ends with behind `=`, that is nearest to a name replaced by that."""
    near = max(
        (part for word in typed for part in word.split("=")), key=lambda part: SequenceMatcher(None, name, part).ratio()
    )
    return [word.replace(near, name) if near in word.split("=") else word for word in typed]


def _put_behind(typed: Sequence[str], words: Sequence[str], where: str) -> list[str]:
    """A command with flags or overrides behind it, in the place of what the error is about."""
    override = where.removeprefix("override '").removesuffix("'")
    kept = [word for word in typed if word != override and not word.endswith(f".{override}")]  # or a stage's
    for at in range(len(typed) - 1):
        if where == f"{typed[at]} {typed[at + 1]}" or (words[0] == typed[at] == "--from"):
            kept = [*typed[:at], *typed[at + 2 :]]
    if words[0] == "--input":
        port = words[1].partition("=")[0]
        for at in range(len(kept) - 1, 0, -1):
            if kept[at - 1] == "--input" and kept[at].startswith(f"{port}="):
                del kept[at - 1 : at + 1]
    return [*kept, *words]


def placeless(text: str, places: Mapping[str, str]) -> str:
    """Text without what differs from one machine and one run to another."""
    for place, name in places.items():
        text = text.replace(place, name)
    return _RUN.sub("RUN", text)
