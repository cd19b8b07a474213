"""What a command line or a Python call requests, as plain values: kept in a run's folder, printed as a command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from nemotron_steps.errors import RequestError

RUN_NAME = re.compile(r"(?!-|latest$)[A-Za-z0-9._-]{1,64}")
"""What a run may be called."""


class UsageError(RequestError, ValueError, code="E120"):
    """The command line itself is wrong: an unknown command or flag, a missing argument."""


@dataclass(frozen=True)
class RunRequest:
    """What was asked for, as plain values that can be kept in a run folder."""

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
    name: str | None = None
    """`--name`: what the run goes by beside its id."""

    def __post_init__(self) -> None:
        if self.name is None:
            return
        from nemotron_steps.config.secrets import redact_text

        shown = redact_text(self.name)
        if shown != self.name or not RUN_NAME.fullmatch(shown):
            expected = "at most 64 letters, digits, `.`, `_` and `-`; not `latest`, no secret, no `-` first"
            raise UsageError(
                "this cannot name a run", where="--name", expected=expected, found=shown, hints=("--name NAME",)
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        fields = {"from" if name == "first" else name: value for name, value in asdict(self).items()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> RunRequest:
        """The inverse of to_dict. ValueError, naming the field, for what to_dict would not write."""
        from pydantic import TypeAdapter, ValidationError

        values = {"first" if name == "from" else name: value for name, value in data.items()}
        try:
            found: RunRequest = TypeAdapter(RunRequest).validate_python(values)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"`{(*first['loc'], 'name')[0]}`: {first['msg']}") from error
        if not found.targets:
            raise ValueError("`targets` names no step")
        return found

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
        inputs = [f"{port}={ref}" for port, ref in self.inputs.items()]
        for flag, values in (("--over", self.over), ("--ignore-checks", self.ignore_checks), ("--input", inputs)):
            words += [part for value in values for part in (flag, value)]
        words += self.overrides
        words += ["--", *self.passthrough] if self.passthrough else []
        return shlex.join(words)

    @property
    def typed(self) -> str:
        """The same with its profile and name: what one would type to have it run there."""
        flags = (("-r", self.profile), ("--name", self.name))
        return " ".join([*(f"{flag} {shlex.quote(value)}" for flag, value in flags if value), self.command])
