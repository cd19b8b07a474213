"""YAML in OmegaConf's dialect, with the line that set every key.

OmegaConf reads `1e-6` as a number, keeps dates as text and refuses a key written twice; so does this. What it adds
is the line of each key, which errors point at. Parsing is libyaml's where PyYAML has it.
"""

import re
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from nemotron_steps.errors import ConfigError

KeyPath = tuple[str, ...]
"""Path of a key from the root; list indices are written as decimal strings."""

_MOST_VALUES = 100_000
"""Values of a config with its aliases written out; the largest recipe has a few hundred."""

_DEEPEST = 100

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]
    """PyYAML's safe loader with OmegaConf's scalar rules."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Base.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"""^(?:
         [-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
        |\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?
        |[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*
        |[-+]?\.(?:inf|Inf|INF)
        |\.(?:nan|NaN|NAN))$""",
        re.VERBOSE,
    ),
    list("-+0123456789."),
)


def load_yaml(path: Path) -> tuple[dict[str, Any], dict[KeyPath, int], str]:
    """One config file: the mapping, the line (from 1) of each key path, and the file's text.

    Raises:
        ConfigError: not readable, not YAML, not a mapping at the top, or a key written twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read config file: {error}", where=str(path)) from error
    _refuse_depth(text, path)
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}, {}, text
        _size(node, path, {})
        lines: dict[KeyPath, int] = {}
        _walk(node, (), path, lines)
        data = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(f"not valid YAML: {error.problem or error.context}", where=where) from error
    # Those but the first are of scalars that are not what they begin like, `0x_`, or what their tag says, `!!int ""`.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"not valid YAML: {error}", where=str(path)) from error
    finally:
        loader.dispose()
    if not isinstance(data, dict):
        raise ConfigError(
            "a config file holds keys and values at its top level",
            where=f"{path}:1",
            expected="a mapping (`key: value`)",
            found=type(data).__name__,
        )
    return data, lines, text


def _refuse_depth(text: str, path: Path) -> None:
    """ConfigError for nesting that would overflow the stack of the C library, which ends the process."""
    depth = 0
    with suppress(yaml.YAMLError):  # said where the file is read for good
        for event in yaml.parse(text, Loader=_Base):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                where = _line(event, path)
                raise ConfigError("the file is nested too deeply", where=where, expected=f"at most {_DEEPEST} levels")


def _line(node: Any, path: Path) -> str:
    return f"{path}:{node.start_mark.line + 1}"


def _size(node: Any, path: Path, sizes: dict[int, int | None]) -> int:
    """Values that a node stands for; ConfigError for many more than the file holds: aliases of aliases, or an alias of
    what it is in."""
    where = _line(node, path)
    if id(node) in sizes:
        size = sizes[id(node)]
        if size is None:
            raise ConfigError("an alias stands inside of what it names", where=where)
        return size
    sizes[id(node)] = None
    below = node.value if isinstance(node, yaml.CollectionNode) else ()
    below = chain.from_iterable(below) if isinstance(node, yaml.MappingNode) else below
    sizes[id(node)] = size = 1 + sum(_size(each, path, sizes) for each in below)
    if size > _MOST_VALUES:
        raise ConfigError(
            "the file's aliases stand for too many values",
            where=where,
            expected=f"at most {_MOST_VALUES:,} values, aliases written out",
            found=f"{size:,}",
        )
    return size


def _walk(node: Any, at: KeyPath, path: Path, lines: dict[KeyPath, int]) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            line = key_node.start_mark.line + 1
            if key_node.value in seen:
                raise ConfigError(
                    f"key '{'.'.join((*at, key_node.value))}' is written twice",
                    where=f"{path}:{line}",
                    found=f"first on line {seen[key_node.value]}",
                )
            seen[key_node.value] = line
            child = (*at, key_node.value)
            lines[child] = line
            _walk(value_node, child, path, lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            child = (*at, str(index))
            lines[child] = item.start_mark.line + 1
            _walk(item, child, path, lines)
