"""How each family's config.json is read, and which parameters it has: a module for families that are alike, with
`read(config, where) -> Architecture`, `parameters(architecture) -> Iterator[Parameter]` in the order of the layers, and
CARRIED, the prefix of tensors that travel along, unread ("" for none)."""

import json
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from nemotron_steps.config.families import FAMILIES, LARGEST
from nemotron_steps.errors import ArtifactError


def module_of(family: str) -> Any:
    """The module of a family of the table."""
    return import_module(f"{__name__}.{FAMILIES[family].module}")


class ConfigValues:
    """Reads a parsed config.json, or what is `within` a key of it; ArtifactError for what a model cannot have."""

    def __init__(self, config: Mapping[str, Any], where: str, within: str = "") -> None:
        self._config, self._where = config, where
        self._prefix = f"{within}." if within else ""

    def count(self, *names: str, least: int = 1, most: int = LARGEST, default: int | None = None) -> int:
        """The whole number under the first of these keys that is there and not null."""
        name = next((name for name in names if self._config.get(name) is not None), None)
        if name is None and default is not None:
            return default
        if name is None:
            found = "null" if any(name in self._config for name in names) else "no such key"
            raise self.refusal(f"config.json lacks {self._prefix}{names[0]}", names[0], found)
        wanted = f"a whole number from {least} to {most}"
        return int(self._checked(name, lambda value: type(value) is int and least <= value <= most, wanted))

    def flag(self, *names: str, default: bool) -> bool:
        """The truth value under the first of these keys that is there, null being false."""
        name = next((name for name in names if name in self._config), None)
        if name is None:
            return default
        return bool(self._checked(name, lambda value: value in (None, True, False), "true or false"))

    def number(self, name: str, default: float, *, least: float = -math.inf, nullable: bool = True) -> float:
        """The number under a key, above `least`; `default` where it is missing, or null and `nullable`."""
        if self._config.get(name) is None and (nullable or name not in self._config):
            return default

        def fits(value: Any) -> bool:
            return type(value) in (int, float) and least < value <= sys.float_info.max

        return float(self._checked(name, fits, "a number" if least == -math.inf else f"a number above {least:g}"))

    def listed(self, name: str) -> Sequence[Any]:
        """The list under a key, empty where that is missing or null."""
        return self._checked(name, lambda value: isinstance(value, list | tuple | None), "a list") or ()

    def under(self, name: str) -> Mapping[str, Any]:
        """The keys under a key, none where that is missing or null."""
        return self._checked(name, lambda value: isinstance(value, Mapping | None), "an object") or {}

    def _checked(self, name: str, fits: Callable[[Any], bool], expected: str) -> Any:
        value = self._config.get(name)
        if not fits(value):
            text = json.dumps(value)
            raise self.refusal(f"{self._prefix}{name} cannot be a model's", expected, text[:60])
        return value

    def refusal(self, what: str, expected: str, found: str) -> ArtifactError:
        """The error for values that a model cannot have."""
        folder = shlex.quote(str(Path(self._where).parent))
        published = f"hf download MODEL config.json --local-dir {folder}   # as it was published"
        return ArtifactError(what, where=self._where, expected=expected, found=found, hints=(published,))
