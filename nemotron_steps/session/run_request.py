"""What a command line or a Python call requests, as plain values: kept in a run's folder, printed as a command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nemotron_steps.errors import RequestError


class UsageError(RequestError, ValueError):
    """The command line itself is wrong: an unknown command or flag, a missing argument."""

    code = "E120"


@dataclass(frozen=True)
class RunRequest:
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
    def from_dict(data: Mapping[str, Any]) -> RunRequest:
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
        return RunRequest(
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

    def redacted(self) -> RunRequest:
        """The same without secrets, for files and print."""
        from nemotron_steps.config.secrets import redact, redact_text

        return replace(
            self,
            overrides=tuple(redact_text(text) for text in self.overrides),
            inputs={port: redact_text(ref) for port, ref in self.inputs.items()},
            passthrough=tuple(redact(list(self.passthrough))),
            over=tuple(redact_text(text) for text in self.over),
        )

    def taking(self, taken: Mapping[str, str]) -> RunRequest:
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
