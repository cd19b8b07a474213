"""The values of a config.json, checked where they are read: an error says what key holds what, and what mends it."""

import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemotron_steps.config.families import LARGEST
from nemotron_steps.errors import ArtifactError


class ConfigValues:
    """Reads a parsed config.json, or what is `within` a key of it."""

    def __init__(self, config: Mapping[str, Any], where: str, within: str = "") -> None:
        self._config, self._where = config, where
        self._prefix = f"{within}." if within else ""

    def count(self, *names: str, least: int = 1, most: int = LARGEST, default: int | None = None) -> int:
        """The whole number under the first of these keys that is there and not null; ArtifactError for any other."""
        name = next((name for name in names if self._config.get(name) is not None), None)
        if name is None and default is not None:
            return default
        if name is None:
            found = "null" if any(name in self._config for name in names) else "no such key"
            raise self.refusal(f"config.json lacks {self._prefix}{names[0]}", names[0], found)
        value = self._config[name]
        if type(value) is not int or value < least:
            raise self.refusal(
                f"{self._prefix}{name} must be a whole number", f"a whole number of at least {least}", written(value)
            )
        if value > most:
            raise self.refusal(f"{self._prefix}{name} is larger than any model's", f"at most {most}", written(value))
        return value

    def flag(self, *names: str, default: bool) -> bool:
        """The truth value under the first of these keys that is there, null being false; ArtifactError for others."""
        name = next((name for name in names if name in self._config), None)
        value = default if name is None else self._config[name]
        if not isinstance(value, bool | None):
            raise self.refusal(f"{self._prefix}{name} must be true or false", "true or false", written(value))
        return bool(value)

    def number(
        self,
        name: str,
        default: float,
        *,
        least: float = -math.inf,
        most: float = sys.float_info.max,
        nullable: bool = True,
    ) -> float:
        """The number under a key, above `least` and up to `most`, `default` where it is missing, or null and
        `nullable`; ArtifactError for anything else."""
        value: Any = self._config.get(name)
        if value is None and (nullable or name not in self._config):
            return default
        floats = sys.float_info.max
        if type(value) not in (int, float) or not least < value <= most or value < -floats:
            bounds = "" if least == -math.inf else f" above {least:g}"
            bounds += "" if most == floats else f", at most {most:g}"
            raise self.refusal(f"{self._prefix}{name} is out of range", f"a number{bounds}", written(value))
        return float(value)

    def listed(self, name: str) -> Sequence[Any]:
        """The list under a key, empty where that is missing or null; ArtifactError for anything else."""
        return self._of(name, list | tuple, "a list") or ()

    def under(self, name: str) -> Mapping[str, Any]:
        """The keys under a key, none where that is missing or null; ArtifactError for anything else."""
        return self._of(name, Mapping, "an object") or {}

    def _of(self, name: str, kind: Any, called: str) -> Any:
        value = self._config.get(name)
        if not isinstance(value, kind | None):
            raise self.refusal(f"{self._prefix}{name} is malformed", called, written(value))
        return value

    def refusal(self, what: str, expected: str, found: str, *mends: str) -> ArtifactError:
        """The error for values that a model cannot have."""
        folder = shlex.quote(str(Path(self._where).parent))
        published = f"hf download MODEL config.json --local-dir {folder}   # as it was published"
        hints = (*(f"{mend} in {self._where}" for mend in mends), published)
        return ArtifactError(what, where=self._where, expected=expected, found=found, hints=hints)


def written(value: Any) -> str:
    """A value as the file has it, or how long that is."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:20]}… ({len(text)} characters)"
