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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from nemotron_steps.config.names import meant, nearest
from nemotron_steps.config.search import SearchPath
from nemotron_steps.config.secrets import note_variables, shown_override
from nemotron_steps.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig
    from pydantic import BaseModel

    from nemotron_steps.config.yaml_lines import KeyPath

    ModelT = TypeVar("ModelT", bound=BaseModel)

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
        name: config name or path as asked for; None when the step has no default config and none was asked for.
        values: plain values, without `inputs`.
        inputs: the `inputs` mapping: port → source, as written.
        origins: key path → `file:line` or `override '...'`.
        files: every file that was read.
        overrides: the overrides, as given.
        variables: dotted key → the environment variables it takes its value from, for those that are set.
        job: see PlannedStep.
    """

    step: str
    name: str | None
    values: dict[str, Any]
    inputs: dict[str, Any]
    origins: Mapping[KeyPath, str]
    files: tuple[Path, ...] = ()
    overrides: tuple[str, ...] = field(default=())
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

    def model(self, schema: type[ModelT]) -> ModelT:
        """The values as a frozen model; ConfigError with every mistake (see `validation.validate`)."""
        from nemotron_steps.config.validation import validate

        return validate(self, schema)


def origin_of(origins: Mapping[KeyPath, str], path: KeyPath) -> str | None:
    """The origin of a key path, or of its nearest ancestor that has one."""
    for end in range(len(path), 0, -1):
        if path[:end] in origins:
            return origins[path[:end]]
    return None


def compose(
    config: str | None,
    overrides: Sequence[str] = (),
    *,
    search: SearchPath,
    schema: type[BaseModel] | None = None,
) -> ComposedConfig:
    """Compose one step's config.

    Args:
        config: a config name, a path to a yaml file, or None for `default` (which a step may lack).
        overrides: Hydra overrides, applied in order.
        search: where the step's configs and their bases are.
        schema: the model the values will become. With it, `a.b=1` may set a key no file mentions, as long as the
            model has it; without it such a key needs Hydra's `+a.b=1`.

    Raises:
        ConfigError: anything wrong with the files or overrides; `problems` has all of them when there are several.
    """
    from omegaconf import OmegaConf

    from nemotron_steps.config.hydra_loader import compose_mounts, parse_overrides

    name, mounts = search.locate(config)
    parsed, problems = parse_overrides(overrides)
    composition = compose_mounts(name, mounts, search.step, parsed)
    origins = dict(composition.origins)
    subject = f"the config of '{search.step}'"
    for override in composition.overrides:
        problem = _apply(override, composition.config, origins, schema, search.step)
        if problem is not None:
            problems.append(problem)
    unresolved = OmegaConf.to_container(composition.config, resolve=False)
    note_variables(variables_in(unresolved))
    if problems and schema is not None:
        problems += _wrong_values(composition.config, origins, schema, search.step)
    raise_problems(problems, subject)
    values = _resolve(composition.config, origins)
    _drop_names(values, unresolved)
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

        values, problems = translate(values, lambda key: _schema_has(schema, key), origins)
        raise_problems(problems, subject)
    return ComposedConfig(
        step=search.step,
        name=config if config is not None else (name and name.rpartition("/")[2]),
        values=values,
        inputs={str(port): source for port, source in inputs.items()},
        origins=origins,
        files=composition.files,
        overrides=tuple(overrides),
        variables=_set_variables(unresolved),
        job=job,
    )


def _take_job(values: dict[str, Any], origins: Mapping[KeyPath, str], step: str) -> dict[str, Sequence[Any]]:
    """ComposedConfig.job, taken out of the values; what else the `run` table has stays, to be refused."""
    paths = [("cluster", key) for key in ("num_nodes", "gpus_per_node")]
    job: dict[str, Sequence[Any]] = {
        ".".join(path): [values["cluster"][path[1]], origins[path]] for path in paths if path in origins
    }
    table = values.get(RUN_KEY)
    if not isinstance(table, dict) or not isinstance(env := table.get("env"), dict):
        return job
    from nemotron_steps.config.profiles import JOB_KEYS, RunTable

    # Misspelt ones as well: the model says what was meant.
    given = {key: env.pop(key) for key in [*env] if key in JOB_KEYS or meant(key, JOB_KEYS)}
    if len({JOB_KEYS.get(key) for key in given}) < len(given):
        where = origin_of(origins, (RUN_KEY, "env", "container"))
        raise ConfigError("'run.env.container' is another name of 'run.env.container_image', which is set", where=where)
    if not env:
        del table["env"]
    if not table:
        del values[RUN_KEY]
    ComposedConfig(step, None, {RUN_KEY: {"env": given}}, {}, origins).model(RunTable)
    return job | {JOB_KEYS[key]: [value, origin_of(origins, (RUN_KEY, "env", key))] for key, value in given.items()}


def _wrong_values(
    config: DictConfig, origins: dict[KeyPath, str], schema: type[BaseModel], step: str
) -> list[ConfigError]:
    """What is wrong with the values of the overrides that could be applied, so that all mistakes are told at once.

    Other mistakes are left out: an override that could not be applied may have been meant to mend them.
    """
    try:
        values = _resolve(config, origins)
        values.pop(INPUTS_KEY, None)
        ComposedConfig(step, None, values, {}, origins).model(schema)
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
    override: Override,
    config: DictConfig,
    origins: dict[KeyPath, str],
    schema: type[BaseModel] | None,
    step: str,
) -> ConfigError | None:
    """Apply one override as Hydra does; what it cannot apply comes back as an error."""
    from omegaconf import OmegaConf, open_dict
    from omegaconf._utils import split_key
    from omegaconf.errors import OmegaConfBaseException

    key, text = override.key_or_group, override.input_line or ""
    shown = shown_override(text)
    where = f"override '{shown}'"
    path = tuple(split_key(key))
    value = override.value()
    exists = _present(config, path)
    known = exists or key.split(".", 1)[0] in (INPUTS_KEY, RUN_KEY) or (schema is not None and _takes(schema, key))
    if override.package is not None:
        return ConfigError(f"'{key}' is not a config group", where=where, expected="key=value")
    if not known and not (schema is None and (override.is_add() or override.is_force_add())):
        return _unknown(key, override, config, schema, step)
    try:
        if override.is_delete():
            if not exists:
                return ConfigError(f"'{key}' is not set, so `~` cannot delete it", where=where)
            current = OmegaConf.select(config, key, throw_on_missing=False)
            if value is not None and value != current:
                return ConfigError(
                    f"`~{key}` names another value than the config has", where=where, expected=str(current)
                )
            parent = OmegaConf.select(config, ".".join(path[:-1])) if len(path) > 1 else config
            with open_dict(config):
                del parent[int(path[-1]) if path[-1].isdigit() and OmegaConf.is_list(parent) else path[-1]]
            _forget(origins, path)
            return None
        if override.is_add() and exists and not isinstance(value, dict | list):
            return ConfigError(
                f"`+` adds a key, and '{key}' is already set",
                where=where,
                hints=(shown.removeprefix("+"), f"+{shown}"),
            )
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
    key: str,
    override: Override,
    config: DictConfig,
    schema: type[BaseModel] | None,
    step: str,
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
        if isinstance(node, ListConfig):
            node = node._get_node(int(part)) if part.isdigit() and int(part) < len(node) else None
        else:
            node = node._get_node(part)
        if node is None:
            return False
    return True


def _schema_has(schema: type[BaseModel], key: str) -> bool:
    from nemotron_steps.config.validation import has_key

    return has_key(schema, key)


def _takes(schema: type[BaseModel], key: str) -> bool:
    """Whether the schema has a key, or published recipes do."""
    if _schema_has(schema, key):
        return True
    from nemotron_steps.config.published.translate import find

    return find(key) is not None


def _forget(origins: dict[KeyPath, str], path: KeyPath) -> None:
    for stale in [known for known in origins if known[: len(path)] == path]:
        del origins[stale]


def _resolve(config: DictConfig, origins: Mapping[KeyPath, str]) -> dict[str, Any]:
    """Plain values with every interpolation resolved; every one that cannot be is named."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _register_resolvers()
    try:
        values = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException:
        problems: list[ConfigError] = []
        _broken(config, (), origins, problems)
        raise_problems(problems, "the interpolations")
        raise
    assert isinstance(values, dict)
    missing = [path for path, value in _nodes(values) if value == "???"]
    problems = [
        ConfigError(
            f"'{key}' must be given a value", where=origin_of(origins, path), found="???", hints=(f"{key}=VALUE",)
        )
        for path in missing
        for key in (".".join(path),)
    ]
    raise_problems(problems, "the config")
    return {str(key): value for key, value in values.items()}


def _broken(node: Any, path: KeyPath, origins: Mapping[KeyPath, str], problems: list[ConfigError]) -> None:
    from omegaconf import DictConfig, ListConfig
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(node, DictConfig | ListConfig) and not node._is_interpolation():
        if node._is_none() or node._is_missing():
            return
        keys: list[Any] = list(node.keys()) if isinstance(node, DictConfig) else list(range(len(node)))
        for key in keys:
            _broken(node._get_node(key), (*path, str(key)), origins, problems)
        return
    if not node._is_interpolation():
        return
    try:
        node._dereference_node()
    except OmegaConfBaseException as error:
        expression = str(node._value())
        reason = str(error).splitlines()[0]
        hints: list[str] = [f"{'.'.join(path)}=VALUE"]
        if unset := re.search(r"Environment variable '(\w+)' not found", str(error)):
            hints.insert(0, f"export {unset[1]}=VALUE")
            reason = f"environment variable {unset[1]} is not set"
        problems.append(
            ConfigError(
                f"'{'.'.join(path)}' does not resolve: {reason}",
                where=origin_of(origins, path),
                found=expression,
                hints=hints,
            )
        )


def _nodes(node: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every value in plain ones with its path, sections and lists included."""
    yield path, node
    for key, item in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from _nodes(item, (*path, str(key)))


def variables_in(node: Any) -> set[str]:
    """The environment variables that a config file's text, or unresolved values, interpolate."""
    return set(_ENVIRONMENT.findall(str(node)))


def _set_variables(unresolved: Any) -> dict[str, tuple[str, ...]]:
    """Dotted key → environment variables, for every value that interpolates some that are set."""
    found: dict[str, tuple[str, ...]] = {}
    for path, text in _nodes(unresolved):
        matches = _ENVIRONMENT.finditer(text) if isinstance(text, str) else ()
        # An empty one counts where there is no default.
        names = [name[1] for name in matches if os.environ.get(name[1], "") or not name[0].endswith(",")]
        if names := [name for name in names if name in os.environ]:
            found[".".join(path)] = tuple(names)
    return found


def _drop_names(values: dict[str, Any], unresolved: Any) -> None:
    """Take the names that references use out of the `run` table, and the table with the last of them."""
    names = values.get(RUN_KEY)
    if not isinstance(names, dict):
        return
    for _, text in _nodes(unresolved):
        if isinstance(text, str) and text.startswith("${art:"):
            names.pop(text.removeprefix("${art:").partition(",")[0].rstrip("}").strip(), None)
    if not names:
        del values[RUN_KEY]


def _register_resolvers() -> None:
    """Make `art` known to OmegaConf, and `mul`, which NeMo-RL's files multiply sizes with; an empty variable does not
    stand before the default of `oc.env`, as in a shell's `${NAME:-DEFAULT}`."""
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    def environment(name: str, *default: Any) -> str | None:
        return oc.env(name if os.environ.get(name) or not default else "", *default)  # there is no variable ""

    OmegaConf.register_new_resolver("oc.env", environment, replace=True)
    OmegaConf.register_new_resolver("mul", lambda a, b: a * b, replace=True)
    OmegaConf.register_new_resolver("art", _marked, replace=True)


def _marked(name: Any, field: Any = "path", *, _root_: DictConfig) -> str:
    from omegaconf import DictConfig, OmegaConf

    names = OmegaConf.select(_root_, RUN_KEY)
    given = names.get(str(name)) if isinstance(names, DictConfig) else None
    ref = given if isinstance(given, str) else str(name)
    # A version keeps it from being taken for a path of that name.
    versioned = ref if ":" in ref or _DIGEST.fullmatch(ref) else f"{ref}:latest"
    return f"{_MARK}{versioned}\0{field}"
