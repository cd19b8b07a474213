"""What `${…}` in a config names: the variables of `${oc.env:NAME}`, and of `${art:NAME}` an artifact of the home.

`${art:NAME}`, `${art:NAME:VERSION}` and `${art:NAME,FIELD}` become a mark that the resolver reads: which input it feeds
follows from the key it stands at. As in the published recipes NAME may be a key of the config's `run` table, which then
names the artifact (`run: {data: super3/data:latest}` and `${art:data,train}`), and FIELD is `path` or a split.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from omegaconf import DictConfig

_MARK = "art\0"
_DIGEST = re.compile(r"[0-9a-f]{8,64}")
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*([A-Za-z_]\w*)\s*[,}]")
RUN_KEY = "run"


class Reference(NamedTuple):
    """What `${art:…}` stands for."""

    ref: str
    """NAME:VERSION, or a digest."""
    field: str
    """`path`, or a split of a data set."""

    def __str__(self) -> str:
        """As it is written in a config."""
        return f"${{art:{self.ref}{'' if self.field == 'path' else ',' + self.field}}}"


def read_reference(value: Any) -> Reference | None:
    """The reference that a resolved value is; None for any other value."""
    if not isinstance(value, str) or not value.startswith(_MARK):
        return None
    ref, _, field = value.removeprefix(_MARK).partition("\0")
    return Reference(ref, field)


def register() -> None:
    """Make `art` known to OmegaConf, and `mul`, which NeMo-RL's files multiply sizes with; an empty variable does not
    stand before the default of `oc.env`, as in a shell's `${NAME:-DEFAULT}`."""
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    def environment(name: str, *default: Any) -> str | None:
        return oc.env(name if os.environ.get(name) or not default else "", *default)  # there is no variable ""

    OmegaConf.register_new_resolver("oc.env", environment, replace=True)
    OmegaConf.register_new_resolver("mul", lambda a, b: a * b, replace=True)
    OmegaConf.register_new_resolver("art", _resolve, replace=True)


def set_variables(node: Any, prefix: str = "") -> dict[str, tuple[str, ...]]:
    """Dotted key → environment variables, for every value that interpolates some that are set."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(node, Mapping):
        items = node.items()
    elif isinstance(node, list | tuple):
        items = enumerate(node)
    elif isinstance(node, str) and "${" in node:
        found = ((name[1], "" if name[0].endswith(",") else None) for name in _ENVIRONMENT.finditer(node))
        names = tuple(name for name, unset in found if os.environ.get(name) not in (None, unset))
        return {prefix[:-1]: names} if names else {}
    return {key: names for at, item in items for key, names in set_variables(item, f"{prefix}{at}.").items()}


def variables_in(node: Any) -> set[str]:
    """The environment variables that a config file's text, or unresolved values, interpolate."""
    return set(_ENVIRONMENT.findall(str(node)))


def drop_names(values: dict[str, Any], unresolved: Any) -> None:
    """Take the names that references use out of the `run` table, and the table with the last of them."""
    names = values.get(RUN_KEY)
    if not isinstance(names, dict):
        return
    for name in _used(unresolved):
        names.pop(name, None)
    if not names:
        del values[RUN_KEY]


def _resolve(name: Any, field: Any = "path", *, _root_: DictConfig) -> str:
    from omegaconf import DictConfig, OmegaConf

    names = OmegaConf.select(_root_, RUN_KEY)
    given = names.get(str(name)) if isinstance(names, DictConfig) else None
    ref = given if isinstance(given, str) else str(name)
    # A version keeps it from being taken for a path of that name.
    versioned = ref if ":" in ref or _DIGEST.fullmatch(ref) else f"{ref}:latest"
    return f"{_MARK}{versioned}\0{field}"


def _used(node: Any) -> set[str]:
    if isinstance(node, Mapping):
        return set[str]().union(*(_used(item) for item in node.values()))
    if isinstance(node, list | tuple):
        return set[str]().union(*(_used(item) for item in node))
    if isinstance(node, str) and node.startswith("${art:"):
        return {node.removeprefix("${art:").partition(",")[0].rstrip("}").strip()}
    return set()
