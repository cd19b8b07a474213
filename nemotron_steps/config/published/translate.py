"""A config with published keys → the same in this project's, or an error for each that has no such meaning."""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from nemotron_steps.config.compose import origin_of
from nemotron_steps.config.published.table import RESOURCES, TABLE, Published
from nemotron_steps.config.yaml_lines import KeyPath
from nemotron_steps.errors import ConfigError

PAGE = "docs/published_keys.md"


def find(key: str) -> tuple[Published, tuple[str, ...]] | None:
    """The row of a published key, and what each `*` of its pattern stands for; None if it is none."""
    for pattern, row in _patterns():
        match = pattern.fullmatch(key)
        if match is not None:
            return row, match.groups()
    return None


def translate(
    values: dict[str, Any], has_key: Callable[[str], bool], origins: dict[KeyPath, str]
) -> tuple[dict[str, Any], list[ConfigError]]:
    """A config's composed values with every published key that the schema lacks renamed, or left out where it says what
    is always so; and an error for each that is refused. Keys that are neither the schema's nor published stay. The
    values are not changed; origins of renamed keys are added.
    """
    found: list[tuple[KeyPath, Any, Published, tuple[str, ...]]] = []
    for path, value in _leaves(values, ()):
        key = ".".join(path)
        foreign = is_foreign(key, has_key)
        row_and_parts = find(key) if foreign or isinstance(value, str) else None
        # Or the schema has another name for the value.
        if row_and_parts is not None and (foreign or value in row_and_parts[0].values):
            found.append((path, value, *row_and_parts))
    if not found:
        return values, []
    left = copy.deepcopy(values)
    moved: list[tuple[KeyPath, str, Any]] = []
    for path, value, row, parts in found:
        _remove(left, path)
        if row.ours is not None or row.values:
            moved.append((path, (row.ours or row.pattern).format(*parts), _value(row, path, value, values)))
            moved += [(path, key, value if given == "=" else given) for key, given in row.also.items()]
    for path, renamed, value in moved:
        _put(left, tuple(renamed.split(".")), value)
        if origin := origin_of(origins, path):
            origins[tuple(renamed.split("."))] = origin
    problems = []
    for path, value, row, _ in found:
        if row.ours is None and not row.values:
            allowed = [_at(left, each[1:]) if str(each).startswith("=") else each for each in row.holds]
            if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed):
                problems.append(_refusal(path, value, row, allowed, origin_of(origins, path)))
    return left, problems


def _refusal(path: KeyPath, value: Any, row: Published, allowed: list[Any], where: str | None) -> ConfigError:
    key = ".".join(path)
    if not row.holds:
        return ConfigError(f"the key '{key}' has no meaning here: {row.why}", where=where, hints=(PAGE,))
    return ConfigError(
        f"the published key '{key}' can be nothing else here: {row.why}",
        where=where,
        expected=" or ".join("null" if each is None else str(each) for each in allowed),
        found="null" if value is None else str(value),
        hints=(PAGE,),
    )


def _value(row: Published, path: KeyPath, value: Any, values: Mapping[str, Any]) -> Any:
    if ".".join(path).startswith(f"{RESOURCES}."):
        nodes, gpus = (_at(values, f"{RESOURCES}.{key}") for key in ("num_nodes", "gpus_per_node"))
        gpus = gpus if gpus is not None else _at(values, "cluster.gpus_per_node")
        return nodes * gpus if type(nodes) is int and type(gpus) is int else None
    return row.values.get(value, value) if isinstance(value, str | bool | int | float) else value


def is_foreign(key: str, has_key: Callable[[str], bool]) -> bool:
    """Whether a key is none of the schema's, or one that a free-form section would take and that has another name."""
    return not has_key(key) or any(key == row.pattern and row.ours is not None for row in TABLE)


def _leaves(node: Mapping[str, Any], path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, str(name)))
        else:
            yield (*path, str(name)), value


def _at(values: Mapping[str, Any], key: str) -> Any:
    node: Any = values
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _put(values: dict[str, Any], path: KeyPath, value: Any) -> None:
    node = values
    for part in path[:-1]:
        if not isinstance(node.get(part), dict):
            node[part] = {}
        node = node[part]
    node[path[-1]] = value


def _remove(values: dict[str, Any], path: KeyPath) -> None:
    """Take a key out, and every group that is empty then."""
    nodes = [values]
    for part in path[:-1]:
        nodes.append(nodes[-1][part])
    for node, part in zip(reversed(nodes), reversed(path), strict=True):
        del node[part]
        if node:
            break


@lru_cache(maxsize=1)
def _patterns() -> list[tuple[re.Pattern[str], Published]]:
    found = []
    for row in TABLE:
        text = re.escape(row.pattern.removesuffix(".**")).replace(r"\*", r"([^.]*)")
        found.append((re.compile(text + (r"(?:\..+)" if row.pattern.endswith(".**") else "")), row))
    return found
