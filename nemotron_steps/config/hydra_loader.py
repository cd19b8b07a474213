"""Hydra's defaults lists and override grammar, without its global state and its own job settings.

`hydra.compose` goes through a process-wide singleton and merges Hydra's launcher, sweeper and logging configs into
every composition, which costs more than everything else a dry run does. This module calls the same parts beneath it,
and knows the line of every key; that they agree with `hydra.compose` is tested. Importing it imports Hydra.
"""

import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.default_element import ConfigDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf._impl import select_node
from omegaconf._utils import get_yaml_loader, split_key
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from nemotron_steps.config.compose import (
    ENVIRONMENT,
    INPUTS_KEY,
    RUN_KEY,
    KeyPath,
    Mount,
    SearchPath,
    first_file,
    marked,
    nodes,
    origin_of,
)
from nemotron_steps.config.names import nearest
from nemotron_steps.config.secrets import MASK, may_be_secret, note_variables, shown_override
from nemotron_steps.errors import ConfigError, first_line, raise_problems

_GRAMMAR = "https://hydra.cc/docs/1.3/advanced/override_grammar/basic"
_MOST_VALUES = 100_000
"""Values of a config with its aliases written out; the largest recipe has a few hundred."""
_TOO_DEEP = re.compile(r"(?:[\[{]\s*){100}|^ {300}", re.MULTILINE)
"""Nesting that overflows the stack of libyaml, which ends the process."""

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]
    """PyYAML's safe loader with OmegaConf's scalar rules: `1e-6` is a number, a date a text."""

    yaml_implicit_resolvers = get_yaml_loader().yaml_implicit_resolvers


def load_yaml(path: Path) -> tuple[dict[str, Any], dict[KeyPath, int], str]:
    """One config file: its mapping, the line (from 1) of each key path, and its text."""
    lines: dict[KeyPath, int] = {}
    try:
        text = path.read_text(encoding="utf-8")
        if _TOO_DEEP.search(text):
            raise RecursionError
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return {}, {}, text
            _note_lines(node, (), path, lines)
            data = loader.construct_document(node)
        finally:
            loader.dispose()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read config file: {error}", where=str(path)) from error
    except RecursionError as error:
        raise ConfigError("the file is nested too deeply, or an alias is inside of itself", where=str(path)) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(f"not valid YAML: {error.problem or error.context}", where=where) from error
    # Those but the first are of scalars that are not what they begin like, `0x_`, or what their tag says, `!!int ""`.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"not valid YAML: {error}", where=str(path)) from error
    if not isinstance(data, dict):
        what, found = "a config file holds keys and values at its top level", type(data).__name__
        raise ConfigError(what, where=f"{path}:1", expected="a mapping (`key: value`)", found=found)
    return data, lines, text


def _note_lines(node: Any, at: KeyPath, path: Path, lines: dict[KeyPath, int]) -> None:
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[*at, str(index)] = item.start_mark.line + 1
            _note_lines(item, (*at, str(index)), path, lines)
    for key_node, value_node in node.value if isinstance(node, yaml.MappingNode) else ():
        if not isinstance(key_node, yaml.ScalarNode):
            continue
        child, line = (*at, key_node.value), key_node.start_mark.line + 1
        if child in lines and key_node.tag != "tag:yaml.org,2002:merge":
            what, found = f"key '{'.'.join(child)}' is written twice", f"first on line {lines[child]}"
            raise ConfigError(what, where=f"{path}:{line}", found=found)
        lines[child] = line
        _note_lines(value_node, child, path, lines)
    if len(lines) > _MOST_VALUES:
        what = f"the file's aliases stand for too many values, more than {_MOST_VALUES:,}"
        raise ConfigError(what, where=f"{path}:{node.start_mark.line + 1}")


class MountRepository(ConfigRepository):
    """Configs read from mounts, as Hydra asks for them. Each file is read once."""

    def __init__(self, mounts: Sequence[Mount], home: str) -> None:
        """`home` is the group whose configs are global without saying so: the step's own."""
        self.sources = []
        self._mounts = tuple(mounts)
        self._home = home
        self._loaded: dict[str, ConfigResult | None] = {}
        self.lines: dict[str, dict[KeyPath, int]] = {}

    def file(self, config_path: str) -> Path | None:
        """The file of a config name: the first mount that has it."""
        return first_file(self._mounts, config_path.removesuffix(".yaml").strip("/"))

    def initialize_sources(self, config_search_path: Any) -> None:
        """The mounts are fixed; Hydra's search path plays no part."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        """The parsed file, its package header and its defaults list; None when no mount has it."""
        if config_path not in self._loaded:
            file = self.file(config_path)
            self._loaded[config_path] = None if file is None else self._load(config_path, file)
        return self._loaded[config_path]

    def group_exists(self, config_path: str) -> bool:
        """Whether a folder of that name exists under a mount."""
        return bool(self._folders(config_path))

    def config_exists(self, config_path: str) -> bool:
        """Whether a config of that name exists under a mount."""
        return self.file(config_path) is not None

    def get_group_options(self, group_name: str, results_filter: Any = ObjectType.CONFIG) -> list[str]:
        """Names of the configs in a group, for the error that names them."""
        return sorted({file.stem for folder in self._folders(group_name) for file in folder.glob("*.yaml")})

    def _folders(self, group: str) -> list[Path]:
        folders = [mount.group(group) for mount in self._mounts]
        return [folder for folder in folders if folder is not None and folder.is_dir()]

    def _load(self, config_path: str, file: Path) -> ConfigResult:
        data, lines, text = load_yaml(file)
        self.lines[config_path] = lines
        try:
            header = ConfigSource._get_header_dict(text)
        except ValueError as error:
            raise ConfigError(f"malformed `# @package` header: {error}", where=f"{file}:1") from error
        if header["package"] is None and config_path.rpartition("/")[0] == self._home:
            header["package"] = "_global_"
        try:
            config = OmegaConf.create(data)
            raw_defaults = self._extract_defaults_list(config_path, config)
            defaults = self._create_defaults_list(config_path, raw_defaults)
            if defaults and not any(default.is_self() for default in defaults):
                # What Hydra does too, after a warning: a file overrides the bases it names.
                defaults.append(ConfigDefault(path="_self_"))
        except (ValueError, OmegaConfBaseException) as error:
            raise ConfigError(first_line(error), where=f"{file}:{lines.get(('defaults',), 1)}") from error
        return ConfigResult(provider="mount", path=str(file), config=config, header=header, defaults_list=defaults)


def parse_overrides(overrides: Sequence[str]) -> tuple[list[Override], list[ConfigError]]:
    """Parse each override by Hydra's grammar; every malformed one is an error of its own."""
    parser = OverridesParser.create()
    parsed: list[Override] = []
    problems: list[ConfigError] = []
    for before, text in zip(("", *overrides), overrides, strict=False):
        key, _, value = before.partition("=")
        # What stands after `["hf_token", ` may be its value.
        of_secret = not value and may_be_secret(key.strip("+~-: ")) and not re.match(r"[^=]+=[^=]", text)
        shown = MASK if of_secret else shown_override(text)
        key, equals, value = shown.partition("=")
        hints: tuple[str, ...] = ()
        what, expected = f"override '{shown}' has no key", "key=value, +key=value or ~key"
        if not text.startswith("="):  # Hydra takes it for one of the defaults list
            try:
                override = parser.parse_override(text)
            except HydraException as error:
                # Hydra's reason quotes the value.
                what = f"override '{shown}' does not parse" + (f": {first_line(error)}" if shown == text else "")
                quoted = f"\"{key}='{value}'\"" if equals else f"'{shown}'"
                hints = (f"{quoted}   # quotes special characters", f"the grammar: {_GRAMMAR}")
            else:
                if not override.is_sweep_override():
                    parsed.append(override)
                    continue
                what, expected = f"override '{shown}' is a sweep, and a run has one value a key", "one value"
                hints = (f"'{key}=[{value}]'   # a list", f"\"{key}='{value}'\"   # text with commas")
                if re.fullmatch(r"\d{1,3}(,\d{3})+", value):
                    hints = (f"{key}={value.replace(',', '')}", *hints)
        problems.append(ConfigError(what, where=f"override '{shown}'", expected=expected, hints=hints))
    return parsed, problems


def load_config(
    config: str | None, overrides: Sequence[str], search: SearchPath, any_key: bool
) -> tuple[dict[str, Any], Any, dict[KeyPath, str], str | None]:
    """Find a config, merge its defaults list and apply overrides; those that name a config group choose among its
    configs. `any_key`: they may set keys that no file mentions, without Hydra's `+`. Values with interpolations
    resolved and without, what set each key, and the config's file."""
    name, mounts = search.locate(config)
    parsed, problems = parse_overrides(overrides)
    tree, origins, file = OmegaConf.create({}), dict[KeyPath, str](), None
    if name is not None:
        repository = MountRepository(mounts, search.step)
        tree, parsed = _merged(name, repository, parsed, origins)
        file = str(repository.file(name))
    for override in parsed:
        problem = _apply(override, tree, origins, any_key)
        problems += [] if problem is None else [problem]
    unresolved = OmegaConf.to_container(tree, resolve=False)
    note_variables(ENVIRONMENT.findall(str(unresolved)))
    raise_problems(problems, f"the config of '{search.step}'")
    return _resolve(tree, unresolved, origins), unresolved, origins, file


def _merged(
    name: str, repository: MountRepository, overrides: list[Override], origins: dict[KeyPath, str]
) -> tuple[DictConfig, list[Override]]:
    """A config with its bases, and the overrides that are left to apply."""
    version.setbase("1.3")
    file = repository.file(name)
    where = str(file) if file else None
    config = OmegaConf.create({})
    try:
        resolved = create_defaults_list(
            repo=repository, config_name=name, overrides_list=overrides, prepend_hydra=False, skip_missing=False
        )
        for default in resolved.defaults:
            config_path = default.config_path or ""
            result = repository.load_config(config_path)
            assert result is not None, f"the defaults list was resolved but {config_path} has no file"
            config.merge_with(ConfigLoaderImpl._embed_result_config(result, default.package).config)
            prefix = tuple(default.package.split(".")) if default.package else ()
            for path, line in repository.lines[config_path].items():
                if path[-1] == "0":  # a list replaces the one below it
                    _forget(origins, prefix + path[:-1], below=True)
                if path[0] != "defaults":
                    origins[prefix + path] = f"{result.path}:{line}"
    except RecursionError as error:
        raise ConfigError(f"the defaults lists of '{name}' go in a circle", where=where) from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        if isinstance(error, MissingConfigException) and error.missing_cfg_file:
            group, _, asked = posixpath.normpath(str(error.missing_cfg_file)).rpartition("/")
            what = f"the defaults of '{name}' name a config that does not exist: '{error.missing_cfg_file}'"
            there = ", ".join(repository.get_group_options(group))
            raise ConfigError(what, where=where, expected=there or None, found=asked) from error
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        what = f"config '{name}' does not compose: {lines[0]}"
        raise ConfigError(what, where=where, found="; ".join(lines[1:4]) or None) from error
    return config, list(resolved.config_overrides)


def _apply(override: Override, config: DictConfig, origins: dict[KeyPath, str], any_key: bool) -> ConfigError | None:
    """Apply one override as Hydra does; what it cannot apply comes back as an error."""
    key, text = override.key_or_group, override.input_line or ""
    shown = shown_override(text)
    where = f"override '{shown}'"
    *above, last = path = tuple(split_key(key))
    value = override.value()
    if override.package is not None:
        return ConfigError(f"'{key}' is not a config group", where=where, expected="key=value")
    try:
        exists = select_node(config, key, throw_on_resolution_failure=False) is not None
    except OmegaConfBaseException:  # something above it has no keys
        exists = False
    adds = override.is_add() or override.is_force_add()
    try:
        if override.is_delete():
            if not exists:
                return ConfigError(f"'{key}' is not set, so `~` cannot delete it", where=where)
            current = OmegaConf.select(config, key, throw_on_missing=False)
            if value is not None and value != current:
                what = f"`~{key}` names another value than the config has"
                return ConfigError(what, where=where, expected=str(current))
            parent = OmegaConf.select(config, ".".join(above)) if above else config
            with open_dict(config):
                del parent[int(last) if last.isdigit() and OmegaConf.is_list(parent) else last]
            _forget(origins, path)
            return None
        if not (exists or adds or any_key or path[0] in (INPUTS_KEY, RUN_KEY)):
            candidates = {".".join(known) for known in origins}
            close = nearest(key, candidates)
            hints = (*(shown.replace(key, other, 1) for other in close), f"to add a new key: +{shown}")
            return ConfigError(f"unknown key '{key}'", where=where, expected=" or ".join(close) or None, hints=hints)
        if override.is_add() and exists and not isinstance(value, dict | list):
            hints = (shown.removeprefix("+"), f"+{shown}")
            return ConfigError(f"`+` adds a key, and '{key}' is already set", where=where, hints=hints)
        with open_dict(config):
            OmegaConf.update(config, key, value, merge=True, force_add=True)
    except OmegaConfBaseException as error:
        reason = f": {first_line(error)}" if shown == text else ""
        return ConfigError(f"override '{shown}' cannot be applied{reason}", where=where)
    if not isinstance(value, dict):
        _forget(origins, path)
    origins.update((below, where) for below, _ in nodes(value, path))
    return None


def _forget(origins: dict[KeyPath, str], path: KeyPath, *, below: bool = False) -> None:
    for stale in [known for known in origins if known[: len(path)] == path and len(known) >= len(path) + below]:
        del origins[stale]


def _resolve(config: DictConfig, unresolved: Any, origins: Mapping[KeyPath, str]) -> dict[str, Any]:
    """Plain values with every interpolation resolved; every one that cannot be is named."""

    def environment(name: str, *default: Any) -> str | None:
        # An empty variable does not stand before the default, as in a shell's `${NAME:-DEFAULT}`; none is called "".
        return oc.env(name if os.environ.get(name) or not default else "", *default)

    OmegaConf.register_new_resolver("oc.env", environment, replace=True)
    OmegaConf.register_new_resolver("mul", lambda a, b: a * b, replace=True)  # NeMo-RL's files multiply sizes with it
    OmegaConf.register_new_resolver("art", marked, replace=True)
    try:
        values = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException:
        raise_problems([*_broken(config, (), origins)], "the interpolations")
        raise
    assert isinstance(values, dict)
    problems = []
    for path, value in nodes(values):
        if value == "???":
            key, where = ".".join(path), origin_of(origins, path)
            what = f"'{key}' must be given a value"
            problems.append(ConfigError(what, where=where, found="???", hints=(f"{key}=VALUE",)))
    raise_problems(problems, "the config")
    return {str(key): value for key, value in values.items()}


def _broken(node: Any, path: KeyPath, origins: Mapping[KeyPath, str]) -> Iterator[ConfigError]:
    """The interpolations that do not resolve."""
    if isinstance(node, DictConfig | ListConfig) and not node._is_interpolation():
        if node._is_none() or node._is_missing():
            return
        keys: list[Any] = list(node.keys()) if isinstance(node, DictConfig) else list(range(len(node)))
        for key in keys:
            yield from _broken(node._get_node(key), (*path, str(key)), origins)
        return
    try:
        node._maybe_dereference_node(throw_on_resolution_failure=True)
    except OmegaConfBaseException as error:
        key, reason = ".".join(path), first_line(error)
        hints = [f"{key}=VALUE"]
        if unset := re.search(r"Environment variable '(\w+)' not found", str(error)):
            hints.insert(0, f"export {unset[1]}=VALUE")
            reason = f"environment variable {unset[1]} is not set"
        what, where = f"'{key}' does not resolve: {reason}", origin_of(origins, path)
        yield ConfigError(what, where=where, found=str(node._value()), hints=hints)
