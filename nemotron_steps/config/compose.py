"""From a config name and overrides to plain values, each knowing which file or override set it.

`compose` finds the config, merges its defaults list, applies the overrides in Hydra's grammar, resolves
interpolations (`${oc.env:NAME,default}` included) and splits off `inputs`, the reserved key that says where a
step's inputs come from. The values become a model in `validation`; secrets are masked in `secrets`.

`${art:NAME}`, `${art:NAME:VERSION}` and `${art:NAME,FIELD}` become a mark that the resolver reads: which input it feeds
follows from the key it stands at. As in the published recipes NAME may be a key of the config's `run` table, which then
names the artifact (`run: {data: super3/data:latest}` and `${art:data,train}`), and FIELD is `path` or a split.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nemotron_steps.config.names import meant, nearest
from nemotron_steps.config.search import SearchPath
from nemotron_steps.config.secrets import note_variables, shown_override
from nemotron_steps.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig
    from pydantic import BaseModel

    from nemotron_steps.config.yaml_lines import KeyPath

INPUTS_KEY = "inputs"
"""Reserved top-level key: port → where its artifact comes from. Not part of a step's config."""
RUN_KEY = "run"
_MARK = "art\0"
_DIGEST = re.compile(r"[0-9a-f]{8,64}")
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*([A-Za-z_]\w*)\s*[,}]")


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


@dataclass(frozen=True)
class ComposedConfig:
    """Composed, resolved values of one step's config.

    Attributes:
        step: the step id.
        values: plain values, without `inputs`.
        inputs: the `inputs` mapping: port → source, as written.
        origins: key path → `file:line` or `override '...'`.
        files: every file that was read.
        variables: dotted key → the environment variables it takes its value from, for those that are set.
        job: see PlannedStep.
    """

    step: str
    values: dict[str, Any]
    inputs: dict[str, Any] = field(default_factory=dict)
    origins: Mapping[KeyPath, str] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    variables: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    job: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """The value at a dotted key, or `default`."""
        node: Any = self.values
        for part in key.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return default
            node = node[part]
        return node

    def origin(self, key: str) -> str | None:
        """What set a dotted key: its own file line or override, or that of the nearest key above it."""
        return origin_of(self.origins, tuple(key.split(".")))


def origin_of(origins: Mapping[KeyPath, str], path: KeyPath) -> str | None:
    """The origin of a key path, or of its nearest ancestor that has one."""
    above = (path[:end] for end in range(len(path), 0, -1))
    return next((origins[each] for each in above if each in origins), None)


def compose(
    config: str | None,
    overrides: Sequence[str] = (),
    *,
    search: SearchPath,
    schema: type[BaseModel] | None = None,
) -> ComposedConfig:
    """Compose one step's config: a config name, a path to a yaml file, or None for `default` (which a step may lack).

    With `schema`, the model that the values will become, `a.b=1` may set a key no file mentions, as long as the model
    has it; without it such a key needs Hydra's `+a.b=1`.

    Raises:
        ConfigError: anything wrong with the files or overrides; `problems` has all of them when there are several.
    """
    from omegaconf import OmegaConf

    from nemotron_steps.config.hydra_loader import compose_mounts, parse_overrides

    name, mounts = search.locate(config)
    parsed, problems = parse_overrides(overrides)
    composition = compose_mounts(name, mounts, search.step, parsed)
    tree, origins = composition.config, composition.origins
    subject = f"the config of '{search.step}'"
    for override in composition.overrides:
        problem = _apply(override, tree, origins, schema, search.step)
        if problem is not None:
            problems.append(problem)
    unresolved = OmegaConf.to_container(tree, resolve=False)
    note_variables(variables_in(unresolved))
    if problems and schema is not None:
        problems += _wrong_values(tree, origins, schema, search.step)
    raise_problems(problems, subject)
    values = _resolve(tree, origins)
    written = [(path, text) for path, text in _nodes(unresolved) if isinstance(text, str)]
    names: Any = values.get(RUN_KEY)
    for _, text in written if isinstance(names, dict) else ():
        if text.startswith("${art:"):  # the names that references use are no keys
            names.pop(text.removeprefix("${art:").partition(",")[0].rstrip("}").strip(), None)
    if isinstance(names, dict) and not names:
        del values[RUN_KEY]
    job = _take_job(values, origins, search.step)
    inputs = values.pop(INPUTS_KEY, None) or {}
    if not isinstance(inputs, dict):
        raise ConfigError(
            f"`{INPUTS_KEY}` maps a step's ports to where their artifacts come from",
            where=origin_of(origins, (INPUTS_KEY,)),
            expected="inputs: {PORT: {step: STEP, config: NAME}} or {PORT: PATH}",
            found=type(inputs).__name__,
        )
    if schema is not None:
        from nemotron_steps.config.published.translate import translate
        from nemotron_steps.config.validation import has_key

        values, problems = translate(values, lambda key: has_key(schema, key), origins)
        raise_problems(problems, subject)
    sources = {str(port): source for port, source in inputs.items()}
    return ComposedConfig(search.step, values, sources, origins, composition.files, _variables(written), job)


def _variables(written: Iterable[tuple[KeyPath, str]]) -> dict[str, tuple[str, ...]]:
    """Dotted key → environment variables, for every value that interpolates some that are set."""
    found: dict[str, list[str]] = {}
    for path, text in written:
        for name in _ENVIRONMENT.finditer(text):
            # An empty one counts where there is no default.
            if os.environ.get(name[1]) or (name[1] in os.environ and not name[0].endswith(",")):
                found.setdefault(".".join(path), []).append(name[1])
    return {key: tuple(names) for key, names in found.items()}


def _take_job(values: dict[str, Any], origins: Mapping[KeyPath, str], step: str) -> dict[str, Sequence[Any]]:
    """ComposedConfig.job, taken out of the values; what else the `run` table has stays, to be refused."""
    job: dict[str, Sequence[Any]] = {}
    for key in ("num_nodes", "gpus_per_node"):
        if ("cluster", key) in origins:
            job[f"cluster.{key}"] = [values["cluster"][key], origins["cluster", key]]
    table = values.get(RUN_KEY)
    if not isinstance(table, dict) or not isinstance(env := table.get("env"), dict):
        return job
    from nemotron_steps.config.profiles import JOB_KEYS, RunTable
    from nemotron_steps.config.validation import validate

    # Misspelt ones as well: the model says what was meant.
    given = {key: env.pop(key) for key in [*env] if key in JOB_KEYS or meant(key, JOB_KEYS)}
    if len({JOB_KEYS.get(key) for key in given}) < len(given):
        where = origin_of(origins, (RUN_KEY, "env", "container"))
        raise ConfigError("'run.env.container' is another name of 'run.env.container_image', which is set", where=where)
    if not env:
        del table["env"]
    if not table:
        del values[RUN_KEY]
    validate(ComposedConfig(step, {RUN_KEY: {"env": given}}, {}, origins), RunTable)
    return job | {JOB_KEYS[key]: [value, origin_of(origins, (RUN_KEY, "env", key))] for key, value in given.items()}


def _wrong_values(
    config: DictConfig, origins: dict[KeyPath, str], schema: type[BaseModel], step: str
) -> list[ConfigError]:
    """What is wrong with the values of the overrides that could be applied, so that all mistakes are told at once.
    Others are left out: an override that could not be applied may have been meant to mend them."""
    from nemotron_steps.config.validation import validate

    try:
        values = _resolve(config, origins)
        values.pop(INPUTS_KEY, None)
        validate(ComposedConfig(step, values, {}, origins), schema)
    except ConfigError as error:
        found = [each for each in error.problems or (error,) if isinstance(each, ConfigError)]
        return [each for each in found if (each.where or "").startswith("override ")]
    return []


def raise_problems(problems: Sequence[ConfigError], subject: str) -> None:
    """Raise nothing, the only problem, or one ConfigError that carries them all."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ConfigError(f"{len(problems)} mistakes in {subject}", problems=problems)


def _apply(
    override: Override, config: DictConfig, origins: dict[KeyPath, str], schema: type[BaseModel] | None, step: str
) -> ConfigError | None:
    """Apply one override as Hydra does; what it cannot apply comes back as an error."""
    from omegaconf import OmegaConf, open_dict
    from omegaconf._utils import split_key
    from omegaconf.errors import OmegaConfBaseException

    key, text = override.key_or_group, override.input_line or ""
    shown = shown_override(text)
    where = f"override '{shown}'"
    *above, last = path = tuple(split_key(key))
    value = override.value()
    exists = _present(config, path)
    if override.package is not None:
        return ConfigError(f"'{key}' is not a config group", where=where, expected="key=value")
    if not exists and path[0] not in (INPUTS_KEY, RUN_KEY):
        adds = override.is_add() or override.is_force_add()
        if not _takes(schema, key) if schema is not None else not adds:
            return _unknown(key, override, config, schema, step)
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
        if override.is_add() and exists and not isinstance(value, dict | list):
            hints = (shown.removeprefix("+"), f"+{shown}")
            return ConfigError(f"`+` adds a key, and '{key}' is already set", where=where, hints=hints)
        with open_dict(config):
            OmegaConf.update(config, key, value, merge=True, force_add=True)
    except OmegaConfBaseException as error:
        reason = f": {str(error).splitlines()[0]}" if shown == text else ""
        return ConfigError(f"override '{shown}' cannot be applied{reason}", where=where)
    if not isinstance(value, dict):
        _forget(origins, path)
    origins.update((below, where) for below, _ in _nodes(value, path))
    return None


def _unknown(
    key: str, override: Override, config: DictConfig, schema: type[BaseModel] | None, step: str
) -> ConfigError:
    from omegaconf import OmegaConf

    if schema is not None:
        from nemotron_steps.config.validation import known_keys

        candidates = set(known_keys(schema))
    else:
        nodes = _nodes(OmegaConf.to_container(config, resolve=False))
        candidates = {".".join(path) for path, _ in nodes} - {""}
    close = nearest(key, candidates)
    # A misspelled `api_key` holds a secret like the one it was meant for.
    text = shown_override(override.input_line or "", *close)
    hints = [text.replace(key, other, 1) for other in meant(key, close)]
    if schema is None and not override.is_delete():
        hints.append(f"to add a new key: +{text}")
    return ConfigError(
        f"unknown key '{key}'",
        where=f"override '{text}'",
        expected=f"one of: {', '.join(close)}" if close else f"a key of '{step}'",
        found=key,
        hints=hints or (f"steps show {step}",),
    )


def _present(config: DictConfig, path: KeyPath) -> bool:
    from omegaconf import DictConfig, ListConfig

    node: Any = config
    for part in path:
        if not isinstance(node, DictConfig | ListConfig):
            return False
        if node._is_none() or node._is_missing() or node._is_interpolation():
            return False
        if isinstance(node, DictConfig):
            node = node._get_node(part)
        else:
            node = node._get_node(int(part)) if part.isdigit() and int(part) < len(node) else None
    return node is not None


def _takes(schema: type[BaseModel], key: str) -> bool:
    """Whether the schema has a key, or published recipes do."""
    from nemotron_steps.config.published.translate import find
    from nemotron_steps.config.validation import has_key

    return has_key(schema, key) or find(key) is not None


def _forget(origins: dict[KeyPath, str], path: KeyPath) -> None:
    for stale in [known for known in origins if known[: len(path)] == path]:
        del origins[stale]


def _resolve(config: DictConfig, origins: Mapping[KeyPath, str]) -> dict[str, Any]:
    """Plain values with every interpolation resolved; every one that cannot be is named."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from omegaconf.resolvers import oc

    def environment(name: str, *default: Any) -> str | None:
        # An empty variable does not stand before the default, as in a shell's `${NAME:-DEFAULT}`; none is called "".
        return oc.env(name if os.environ.get(name) or not default else "", *default)

    OmegaConf.register_new_resolver("oc.env", environment, replace=True)
    OmegaConf.register_new_resolver("mul", lambda a, b: a * b, replace=True)  # NeMo-RL's files multiply sizes with it
    OmegaConf.register_new_resolver("art", _marked, replace=True)
    try:
        values = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException:
        raise_problems([*_broken(config, (), origins)], "the interpolations")
        raise
    assert isinstance(values, dict)
    problems = []
    for path, value in _nodes(values):
        if value == "???":
            key, where = ".".join(path), origin_of(origins, path)
            what = f"'{key}' must be given a value"
            problems.append(ConfigError(what, where=where, found="???", hints=(f"{key}=VALUE",)))
    raise_problems(problems, "the config")
    return {str(key): value for key, value in values.items()}


def _broken(node: Any, path: KeyPath, origins: Mapping[KeyPath, str]) -> Iterator[ConfigError]:
    """The interpolations that do not resolve."""
    from omegaconf import DictConfig, ListConfig
    from omegaconf.errors import OmegaConfBaseException

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
        key, reason = ".".join(path), str(error).splitlines()[0]
        hints = [f"{key}=VALUE"]
        if unset := re.search(r"Environment variable '(\w+)' not found", str(error)):
            hints.insert(0, f"export {unset[1]}=VALUE")
            reason = f"environment variable {unset[1]} is not set"
        what, where = f"'{key}' does not resolve: {reason}", origin_of(origins, path)
        yield ConfigError(what, where=where, found=str(node._value()), hints=hints)


def _nodes(node: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every value in plain ones with its path, sections and lists included."""
    yield path, node
    for key, item in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from _nodes(item, (*path, str(key)))


def variables_in(node: Any) -> set[str]:
    """The environment variables that a config file's text, or unresolved values, interpolate."""
    return set(_ENVIRONMENT.findall(str(node)))


def _marked(name: Any, field: Any = "path", *, _root_: DictConfig) -> str:
    from omegaconf import DictConfig, OmegaConf

    names = OmegaConf.select(_root_, RUN_KEY)
    given = names.get(str(name)) if isinstance(names, DictConfig) else None
    ref = given if isinstance(given, str) else str(name)
    # A version keeps it from being taken for a path of that name.
    versioned = ref if ":" in ref or _DIGEST.fullmatch(ref) else f"{ref}:latest"
    return f"{_MARK}{versioned}\0{field}"
