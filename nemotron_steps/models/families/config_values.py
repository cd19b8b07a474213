"""The values of a config.json, checked where they are read: an error says what key holds what, and what mends it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemotron_steps.config.hybrid_layers import LARGEST
from nemotron_steps.errors import ArtifactError

LISTED = 2**14
"""At most so many layers, or experts, each of which has tensors with names of its own."""


class ConfigValues:
    """Reads a parsed config.json.

    Args:
        config: its keys.
        where: of the file, for errors.
    """

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config, self._where = config, where

    def count(self, *names: str, least: int = 1, most: int = LARGEST, default: int | None = None) -> int:
        """The whole number under the first of these keys that is there and not null; ArtifactError for any other."""
        name = self._first(names, required=default is None)
        if name is None:
            assert default is not None
            return default
        value = self._config[name]
        if type(value) is not int or value < least:
            raise self.refusal(f"{name} is no count", f"a whole number of at least {least}", written(value))
        if value > most:
            raise self.refusal(f"{name} is larger than any model's", f"at most {most}", written(value))
        return value

    def flag(self, *names: str, default: bool) -> bool:
        """The truth value under the first of these keys that is there, null being false; ArtifactError for others."""
        name = next((name for name in names if name in self._config), None)
        value = default if name is None else self._config[name]
        if not isinstance(value, bool | None):
            raise self.refusal(f"{name} is no truth value", "true or false", written(value))
        return bool(value)

    def number(self, name: str, default: float, *, least: float = -math.inf) -> float:
        """The number under a key, above `least`; ArtifactError for anything else."""
        value = self._config.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not least < value <= sys.float_info.max:
            above = "" if least == -math.inf else f" above {least:g}"
            raise self.refusal(f"{name} is out of range", f"a number{above}", written(value))
        return float(value)

    def refusal(self, what: str, expected: str, found: str, *mends: str) -> ArtifactError:
        """The error for values that a model cannot have.

        Args:
            mends: what to do; without any the published file is the mend.
        """
        published = f"hf download MODEL config.json --local-dir {Path(self._where).parent}   # as it was published"
        hints = (*(f"{mend} in {self._where}" for mend in mends), published)
        return ArtifactError(what, where=self._where, expected=expected, found=found, hints=hints)

    def _first(self, names: tuple[str, ...], *, required: bool) -> str | None:
        name = next((name for name in names if self._config.get(name) is not None), None)
        if name is None and required:
            raise self.refusal(f"config.json lacks {names[0]}", names[0], "no such key")
        return name


def written(value: Any) -> str:
    """A value as the file has it, or how long that is."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:20]}… ({len(text)} characters)"
