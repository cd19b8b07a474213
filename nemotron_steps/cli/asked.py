"""What a command line asks for, as plain values: kept in a run's folder, printed as a command, read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nemotron_steps.cli.parser import UsageError

if TYPE_CHECKING:
    import argparse


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
                raise ValueError(f"`{name}` is no list of strings")
            return tuple(found)

        def text(name: str) -> str | None:
            found = data.get(name)
            if not isinstance(found, str | None):
                raise ValueError(f"`{name}` is no string")
            return found

        inputs = data.get("inputs", {})
        if not isinstance(inputs, Mapping) or not all(isinstance(ref, str) for ref in inputs.values()):
            raise ValueError("`inputs` is no object of strings")
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
        from nemotron_steps.config.redaction import redact, redact_text

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
        import shlex

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
        import shlex

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
