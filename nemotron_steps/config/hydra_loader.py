"""Hydra's defaults lists and override grammar, without its global state and without its own job settings.

`hydra.compose` goes through a process-wide singleton and merges Hydra's launcher, sweeper and logging configs into
every composition, which costs more than everything else a dry run does. This module calls the same parts beneath
it: the grammar, the defaults-list resolution and OmegaConf's merge. That they agree with `hydra.compose` is tested.

Importing this module imports Hydra.
"""

import json
import posixpath
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemotron_steps.config.names import nearest
from nemotron_steps.config.search import Mount, first_file
from nemotron_steps.config.secrets import MASK, may_be_secret, shown_override
from nemotron_steps.config.yaml_lines import KeyPath, load_yaml
from nemotron_steps.errors import ConfigError, first_line

_GRAMMAR = "https://hydra.cc/docs/1.3/advanced/override_grammar/basic"

_ITEM = re.compile(r"(?:\[[^\]]*\]|\{[^}]*\}|[^,])+")
"""An item of a list as it was typed: commas within its own brackets do not end it."""


@dataclass
class Composition:
    """A composed config before overrides: the merged node, `file:line` of the last config that set each key, the value
    overrides left to apply (those that chose a config group are in `config` already), and every file that was read."""

    config: DictConfig
    origins: dict[KeyPath, str]
    overrides: list[Override]
    files: tuple[Path, ...] = ()


class MountRepository(ConfigRepository):
    """Configs read from mounts. Each file is read once."""

    def __init__(self, mounts: Sequence[Mount], home: str) -> None:
        """`home` is the group whose configs are global without saying so: the step's own."""
        self.sources = []
        self._mounts = tuple(mounts)
        self._home = home
        self._loaded: dict[str, ConfigResult | None] = {}
        self.lines: dict[str, dict[KeyPath, int]] = {}

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file read."""
        return tuple(dict.fromkeys(Path(result.path) for result in self._loaded.values() if result is not None))

    def file(self, config_path: str) -> Path | None:
        """The file of a config name: the first mount that has it."""
        return first_file(self._mounts, config_path.removesuffix(".yaml").strip("/"))

    # What Hydra asks of a repository.

    def initialize_sources(self, config_search_path: Any) -> None:
        """The mounts are fixed; Hydra's search path plays no part."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        """The parsed file, its package header and its defaults list; None when no mount has it."""
        if config_path not in self._loaded:
            self._loaded[config_path] = self._load(config_path)
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

    def _load(self, config_path: str) -> ConfigResult | None:
        file = self.file(config_path)
        if file is None:
            return None
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
        hints: tuple[str, ...] = ()
        what, expected = f"override '{shown}' has no key", "key=value, +key=value or ~key"
        if not text.startswith("="):  # Hydra takes it for one of the defaults list
            try:
                override = parser.parse_override(text)
            except HydraException as error:
                # Hydra's reason quotes the value.
                what = f"override '{shown}' does not parse" + (f": {first_line(error)}" if shown == text else "")
                hints = (f"{_quoted(shown)}   # quotes special characters", f"the grammar: {_GRAMMAR}")
            else:
                if not override.is_sweep_override():
                    parsed.append(override)
                    continue
                what, expected = f"override '{shown}' is a sweep, and a run has one value a key", "one value"
                key, _, value = shown.partition("=")
                hints = (f"'{key}=[{value}]'   # a list", f"\"{key}='{value}'\"   # text with commas")
                if re.fullmatch(r"\d{1,3}(,\d{3})+", value):
                    hints = (f"{key}={value.replace(',', '')}", *hints)
        problems.append(ConfigError(what, where=f"override '{shown}'", expected=expected, hints=hints))
    return parsed, problems


def compose_mounts(name: str | None, mounts: Sequence[Mount], home: str, overrides: Sequence[Override]) -> Composition:
    """Resolve the defaults list of a config (None: an empty one) and merge it. Mounts go in order of precedence,
    configs of the group `home` are global, and overrides that name a config group choose among its configs.

    Raises:
        ConfigError: a named config is missing, or its defaults list or values cannot be merged.
    """
    if name is None:
        return Composition(OmegaConf.create({}), {}, list(overrides))
    repository = MountRepository(mounts, home)
    version.setbase("1.3")
    try:
        resolved = create_defaults_list(
            repo=repository,
            config_name=name,
            overrides_list=list(overrides),
            prepend_hydra=False,
            skip_missing=False,
        )
        config = OmegaConf.create({})
        origins: dict[KeyPath, str] = {}
        for default in resolved.defaults:
            config_path = default.config_path or ""
            result = repository.load_config(config_path)
            assert result is not None, f"the defaults list was resolved but {config_path} has no file"
            config.merge_with(ConfigLoaderImpl._embed_result_config(result, default.package).config)
            prefix = tuple(default.package.split(".")) if default.package else ()
            _record(origins, prefix, repository.lines[config_path], result.path)
    except RecursionError as error:
        raise ConfigError(f"the defaults lists of '{name}' go in a circle", where=str(repository.file(name))) from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        file = repository.file(name)
        if isinstance(error, MissingConfigException) and error.missing_cfg_file:
            raise _missing_base(name, repository, str(error.missing_cfg_file)) from error
        lines = [line for line in str(error).strip().splitlines() if line.strip()]
        raise ConfigError(
            f"config '{name}' does not compose: {lines[0].strip() if lines else type(error).__name__}",
            where=str(file) if file else None,
            found="; ".join(line.strip() for line in lines[1:4]) or None,
        ) from error
    return Composition(config, origins, list(resolved.config_overrides), repository.files)


def _missing_base(name: str, repository: MountRepository, missing: str) -> ConfigError:
    """The error for a defaults list that names a config nobody has."""
    group, _, asked = posixpath.normpath(missing).rpartition("/")
    file = repository.file(name)
    there = sorted({*repository.get_group_options(group)} - {file.stem if file is not None else ""})
    own = group == name.rpartition("/")[0]
    return ConfigError(
        f"the defaults of '{name.removesuffix('.file')}' name a config that does not exist: '{missing}'",
        where=str(file) if file else None,
        expected=", ".join(there) or None,
        found=asked,
        hints=tuple(f"defaults: [{close}]" for close in nearest(asked, there)) if own else (),
    )


def _record(origins: dict[KeyPath, str], prefix: KeyPath, lines: dict[KeyPath, int], file: str) -> None:
    for path, line in lines.items():
        if path[0] == "defaults":
            continue
        full = prefix + path
        if path[-1] == "0":
            # A list replaces the one below it: its old items' origins would be wrong.
            for stale in [key for key in origins if key[: len(full) - 1] == full[:-1] and len(key) >= len(full)]:
                del origins[stale]
        origins[full] = f"{file}:{line}"


def _quoted(text: str) -> str:
    """A malformed override, quoted for the shell and for Hydra. A list stays one: only its items are quoted."""
    key, equals, value = text.partition("=")
    if equals and value.startswith("[") and value.endswith("]"):
        items = (item.strip() for item in _ITEM.findall(value[1:-1]))
        return shlex.quote(f"{key}=[{','.join(item if _parses(item) else json.dumps(item) for item in items)}]")
    return f"\"{key}='{value}'\"" if equals else f"'{text}'"


def _parses(item: str) -> bool:
    try:
        OverridesParser.create().parse_override(f"key=[{item}]")
    except HydraException:
        return False
    return True
