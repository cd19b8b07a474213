"""What a command line asks for, as plain values: kept in a run's folder, printed as a command, read back.

And the one place that puts a command together for a hint (`Typed`): errors say what to change, or name a command of
their own; in which form it is typed here, they do not know.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nemotron_steps.cli.parser import UsageError

if TYPE_CHECKING:
    import argparse


_CHANGE = re.compile(r"-[a-z]|--[a-z]|[+~]*[A-Za-z_][\w./-]*=")
"""How a hint begins that belongs to the command that was typed: with a flag or an override."""
_OF_A_HOME = re.compile(r"steps (?:run|plan|runs|watch|logs|status|cancel|report|index|artifacts)\b")
_ALIKE = {"--config": "-c", "--run": "-r", "--batch": "-r", "-b": "-r"}
"""Flags, and those that they stand in place of."""
SWITCHES = {"-h", "--help", "--version", "--force", "--force-squash", "-d", "--dry-run", "--json", "--why", "--tree"}
SWITCHES |= {"--once", "--samples", "-f", "--follow"}
"""Flags that take no value."""
_REPEATED = ("--input", "--over", "--ignore-checks", "--accept", "--judge", "--tag")


@dataclass(frozen=True)
class Typed:
    """A command line as it was typed.

    Attributes:
        prog: `steps`, `nemotron` or `nemotron steps`; `bash` where a script was typed.
        words: what followed.
    """

    prog: str
    words: tuple[str, ...]

    @staticmethod
    def of(prog: str, arguments: Sequence[str]) -> Typed:
        """A command line, or the script that made it: STEPS_TYPED_AS says how many of the last words are those typed
        after it, and its name. Not left to a job, whose command is its own."""
        last, _, script = os.environ.pop("STEPS_TYPED_AS", "").partition(" ")
        words = (script, *arguments[len(arguments) - int(last) :]) if script else (*arguments,)
        return Typed("bash" if script else prog, words)

    def hint(self, hint: str) -> str:
        """A hint that is a command of `steps`, as it is called here and with the home that was named."""
        if not hint.startswith("steps "):
            return hint
        command, mark, comment = hint.partition("   #")
        home = self._value("--home")
        if home is not None and "--home" not in command and _OF_A_HOME.match(command):
            command += f" --home {shlex.quote(home)}"
        name = "steps" if self.prog == "steps" else "nemotron steps"
        return f"{_uv()}{name}{command.removeprefix('steps')}{mark}{comment}"

    def with_change(self, hint: str, where: str | None) -> str | None:
        """The whole command as `changed` has it."""
        changed = self.changed(hint, where)
        module = ("cli", "main.py")
        by_module = tuple(sys.argv[0].replace("\\", "/").split("/")[-2:]) == module
        prog = "python -m nemotron_steps.cli.main" if by_module else self.prog
        return f"{_uv()}{prog} {shlex.join(changed.words)}" if changed is not None else None

    def changed(self, hint: str, where: str | None) -> Typed | None:
        """With the flags or overrides of a hint in it, in the place of what they replace; None for a hint that is not
        of this kind, and where a word may hold a secret.

        Args:
            where: what the error is about: `override 'KEY=VALUE'`, or `FLAG VALUE`.
        """
        from nemotron_steps.config.secrets import redact_text

        if not self.words or not _CHANGE.match(hint) or any(redact_text(word) != word for word in self.words):
            return None
        try:
            change = shlex.split(hint.partition("   #")[0])
        except ValueError:
            return None
        at = self.words.index("--") if "--" in self.words else len(self.words)
        kept, rest = _units(self.words[:at]), self.words[at:]
        wrong = (where or "").removeprefix("override '").removesuffix("'")
        for unit in kept:
            blamed = unit[0] == wrong or unit[0].endswith(f".{wrong}")
            if " ".join(unit) == where or (wrong not in ("", where) and len(unit) == 1 and blamed):
                kept.remove(unit)
                break
        for unit in _units(change):
            same = [each for each in kept if _what(each) == _what(unit)]
            if len(same) == 1 and len(unit) == len(same[0]) and unit[0].startswith("-"):
                same[0][1:] = unit[1:]
            else:
                kept = [each for each in kept if each not in same] + [unit]
        return replace(self, words=(*(word for unit in kept for word in unit), *rest))

    def _value(self, flag: str) -> str | None:
        for place, word in enumerate(self.words[:-1]):
            if word == flag:
                return self.words[place + 1]
        return next((word.partition("=")[2] for word in self.words if word.startswith(f"{flag}=")), None)


def _units(words: Sequence[str]) -> list[list[str]]:
    """Words of a command line: a flag with its value, or any other word."""
    units: list[list[str]] = []
    for word in words:
        last = units[-1] if units else [""]
        waits = len(last) == 1 and last[0].startswith("-") and last[0] not in SWITCHES and "=" not in last[0]
        if waits and not word.startswith("-"):
            last.append(word)
        else:
            units.append([word])
    return units


def _what(unit: Sequence[str]) -> tuple[str, ...]:
    """What a unit sets: two that set the same cannot stand beside each other."""
    flag, equals, value = unit[0].partition("=")
    if not flag.startswith("-"):
        return (flag.lstrip("+~"),) if equals else tuple(unit)
    value = unit[1] if len(unit) > 1 else value
    flag = _ALIKE.get(flag, flag)
    return (flag, value.partition("=")[0] if flag == "--input" else value) if flag in _REPEATED else (flag,)


def _uv() -> str:
    """How commands begin in a project whose environment `uv run` finds."""
    return "uv run " if "UV_RUN_RECURSION_DEPTH" in os.environ else ""


typed = [Typed("steps", ())]
"""The command line of this process."""


@dataclass(frozen=True)
class Asked:
    """What was asked for on the command line, as plain values that can be kept in a run folder."""

    targets: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    config: str | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)
    profile: str | None = None
    passthrough: tuple[str, ...] = ()
    first: str | None = None
    """`--from`: the pipeline's stage to begin with."""
    until: str | None = None
    """`--until`: the last one."""
    over: tuple[str, ...] = ()
    """`--over`: what to fan out over, each KEY=V1,V2,…"""
    ignore_checks: tuple[str, ...] = ()
    """`--ignore-checks`: stages whose failed checks block nothing."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return {
            "targets": list(self.targets),
            "overrides": list(self.overrides),
            "config": self.config,
            "inputs": dict(self.inputs),
            "profile": self.profile,
            "passthrough": list(self.passthrough),
            "from": self.first,
            "until": self.until,
            "over": list(self.over),
            "ignore_checks": list(self.ignore_checks),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Asked:
        """The inverse of to_dict. ValueError, naming the field, for what to_dict would not write."""

        def texts(name: str) -> tuple[str, ...]:
            found = data.get(name, ())
            if not isinstance(found, list | tuple) or not all(isinstance(text, str) for text in found):
                raise ValueError(f"`{name}` must be a list of strings")
            return tuple(found)

        def text(name: str) -> str | None:
            found = data.get(name)
            if not isinstance(found, str | None):
                raise ValueError(f"`{name}` must be a string")
            return found

        inputs = data.get("inputs", {})
        if not isinstance(inputs, Mapping) or not all(isinstance(ref, str) for ref in inputs.values()):
            raise ValueError("`inputs` must be an object of strings")
        if not (targets := texts("targets")):
            raise ValueError("`targets` names no step")
        return Asked(
            targets,
            texts("overrides"),
            text("config"),
            dict(inputs),
            text("profile"),
            texts("passthrough"),
            text("from"),
            text("until"),
            texts("over"),
            texts("ignore_checks"),
        )

    def redacted(self) -> Asked:
        """The same without secrets, for files and print."""
        from nemotron_steps.config.secrets import redact, redact_text

        return replace(
            self,
            overrides=tuple(redact_text(text) for text in self.overrides),
            inputs={port: redact_text(ref) for port, ref in self.inputs.items()},
            passthrough=tuple(redact(list(self.passthrough))),
            over=tuple(redact_text(text) for text in self.over),
        )

    def taking(self, taken: Mapping[str, str]) -> Asked:
        """The request with what its plan took from the home named: planned again later, it takes the same."""
        return self if self.over else replace(self, inputs={**taken, **self.inputs})

    @property
    def command(self) -> str:
        """The request as one would type it after `steps run`."""
        words = [*self.targets]
        for flag, value in (("-c", self.config), ("--from", self.first), ("--until", self.until)):
            words += [flag, value] if value is not None else []
        words += [part for text in self.over for part in ("--over", text)]
        words += [part for stage in self.ignore_checks for part in ("--ignore-checks", stage)]
        words += [part for port, ref in self.inputs.items() for part in ("--input", f"{port}={ref}")]
        words += self.overrides
        words += ["--", *self.passthrough] if self.passthrough else []
        return shlex.join(words)

    @property
    def typed(self) -> str:
        """The same with its profile: what one would type to have it run there."""
        return self.command if self.profile is None else f"-r {shlex.quote(self.profile)} {self.command}"


def asked_from(arguments: argparse.Namespace) -> Asked:
    """The request in parsed arguments.

    Raises:
        UsageError: no step is named, or an `--input` is not PORT=REF or names a port twice.
    """
    targets = tuple(word for word in arguments.words if not _is_override(word))
    overrides = tuple(word for word in arguments.words if _is_override(word))
    if not targets:
        command = f"{arguments.prog} {arguments.command}"
        raise UsageError("name a step or a pipeline", hints=(f"{command} STEP", "steps list"))
    inputs: dict[str, str] = {}
    for text in arguments.input:
        port, equals, ref = text.partition("=")
        if not equals or not port or not ref:
            raise UsageError("an input is PORT=REF", where=f"--input {text}", hints=("--input policy=PATH",))
        if port in inputs:
            raise UsageError(f"input '{port}' is given twice", where=f"--input {text}", found=inputs[port])
        inputs[port] = ref
    passthrough = tuple(getattr(arguments, "passthrough", ()))
    batch = getattr(arguments, "batch", None)
    profile = arguments.run or batch
    first, until = arguments.first, arguments.until
    over, ignored = tuple(arguments.over), tuple(arguments.ignore_checks)
    return Asked(targets, overrides, arguments.config, inputs, profile, passthrough, first, until, over, ignored)


def _is_override(word: str) -> bool:
    return "=" in word or word.startswith(("~", "+"))
