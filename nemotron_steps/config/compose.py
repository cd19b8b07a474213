"""From a config name and overrides to plain values, each knowing which file or override set it.

A config has a Hydra name, `<step id>/<name>`, and the folders it may come from are mounts: a prefix of config names and
the folder that holds them: a pack's `configs/`, the `config/` beside a manifest, that of a file which the user names.

`compose` loads the config (`hydra_loader`), resolves interpolations (`${oc.env:NAME,default}` included) and splits off
`inputs`, the reserved key that says where a step's inputs come from. The values become a model in `validation`.

`${art:NAME}`, `${art:NAME:VERSION}` and `${art:NAME,FIELD}` become a mark that the resolver reads: which input it feeds
follows from the key it stands at. As in the published recipes NAME may be a key of the config's `run` table, which then
names the artifact (`run: {data: super3/data:latest}` and `${art:data,train}`), and FIELD is `path` or a split.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nemotron_steps.config.names import meant
from nemotron_steps.errors import ConfigError, did_you_mean, raise_problems

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from pydantic import BaseModel

KeyPath = tuple[str, ...]
"""Path of a key from the root; list indices are written as decimal strings."""
DEFAULT_CONFIG = "default"
INPUTS_KEY = "inputs"
"""Reserved top-level key: port → where its artifact comes from. Not part of a step's config."""
RUN_KEY = "run"
_MARK = "art\0"
_DIGEST = re.compile(r"[0-9a-f]{8,64}")
ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*([A-Za-z_]\w*)\s*[,}]")


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


def marked(name: Any, field: Any = "path", *, _root_: DictConfig) -> str:
    """OmegaConf's resolver `art`: the mark of a reference."""
    from omegaconf import DictConfig, OmegaConf

    names = OmegaConf.select(_root_, RUN_KEY)
    given = names.get(str(name)) if isinstance(names, DictConfig) else None
    ref = given if isinstance(given, str) else str(name)
    # A version keeps it from being taken for a path of that name.
    versioned = ref if ":" in ref or _DIGEST.fullmatch(ref) else f"{ref}:latest"
    return f"{_MARK}{versioned}\0{field}"


@dataclass(frozen=True)
class Mount:
    """Configs named `prefix/...` live in `folder`. An empty prefix mounts a whole pack's `configs/`.

    With `file`, the mount is that one file, under the config name `prefix`."""

    prefix: str
    folder: Path
    file: Path | None = None

    def path(self, config_name: str) -> Path | None:
        """The file of that config name under this mount, whether or not it exists."""
        config_name = posixpath.normpath(config_name)
        if self.file is not None:
            return self.file if config_name == self.prefix else None
        below = self._below(config_name)
        return self.folder / f"{below}.yaml" if below else None

    def group(self, group: str) -> Path | None:
        """The folder of a config group under this mount, whether or not it exists."""
        below = self._below(group) if self.file is None else None
        return self.folder / below if below is not None else None

    def _below(self, name: str) -> str | None:
        if not self.prefix or name == self.prefix:
            return "" if self.prefix else name
        head, _, tail = name.partition(f"{self.prefix}/")
        return tail if not head and tail else None


@dataclass(frozen=True)
class SearchPath:
    """Every place one step's configs and their bases are looked for, in order.

    Attributes:
        step: step id; its configs are named `<step id>/<name>`.
        roots: the `configs/` folders of packs, the step's own pack first.
        beside: the `config/` folder beside the step's manifest, as in the public layout.
        rivals: the roots of packs with another step of this id. Bases may come from them, this step's configs not.
    """

    step: str
    roots: tuple[Path, ...] = ()
    beside: Path | None = None
    rivals: frozenset[Path] = frozenset()

    def mounts(self) -> tuple[Mount, ...]:
        """Mounts in order of precedence."""
        own = (Mount(self.step, self.beside),) if self.beside is not None else ()
        return (*own, *(Mount("", root) for root in self.roots))

    def names(self) -> tuple[str, ...]:
        """The config names this step has, sorted."""
        folders = [mount.group(self.step) for mount in self._own()]
        return tuple(sorted({file.stem for folder in folders if folder for file in folder.glob("*.yaml")}))

    def _own(self) -> list[Mount]:
        """The mounts that may hold configs of this step."""
        return [mount for mount in self.mounts() if mount.prefix or mount.folder not in self.rivals]

    def locate(self, config: str | None) -> tuple[str | None, tuple[Mount, ...]]:
        """The Hydra name of a config and the mounts to compose it from: of a name (`tiny`), a path (`./mine.yaml`), or
        None for `default`, which a step may lack: then the name is None. ConfigError with the nearest names where there
        is no such file or config."""
        names, hints = self.names(), (f"steps show {self.step}   # its configs",)
        if config is not None and is_path(config):
            file = Path(config).expanduser().absolute()
            if file.is_file():
                # A name of its own, so that a file called tiny.yaml can build on the step's tiny; the files beside it
                # come after the step's configs.
                name = f"{self.step}/{file.stem}.file"
                return name, (Mount(name, file.parent, file), *self.mounts(), Mount(self.step, file.parent))
            there = {path.stem: path for path in file.parent.glob("*.y*ml")}
            raise ConfigError(
                f"config file '{config}' does not exist",
                where=f"-c {config}",
                expected=f"a yaml file, or one of: {', '.join(names) or 'this step has no named configs'}",
                hints=did_you_mean([str(there[other]) for other in meant(file.stem, there)[:1]]) or hints,
            )
        name = config or DEFAULT_CONFIG
        if first_file(self._own(), f"{self.step}/{name}") is not None:
            return f"{self.step}/{name}", self.mounts()
        if config is None or (config == DEFAULT_CONFIG and not names):
            return None, self.mounts()
        raise ConfigError(
            f"step '{self.step}' has no config '{name}'",
            where=f"-c {name}",
            expected=", ".join(names) or "a path to a yaml file: this step has no named configs",
            found=name,
            hints=tuple(f"-c {other}" for other in meant(name, names)) or hints,
        )


def first_file(mounts: Iterable[Mount], name: str) -> Path | None:
    """The file of a config name: of the first mount that has it."""
    paths = (mount.path(name) for mount in mounts)
    return next((path for path in paths if path is not None and path.is_file()), None)


def is_path(config: str) -> bool:
    """Whether a config is named by the path of its file rather than by name."""
    return config.endswith((".yaml", ".yml")) or config.startswith((".", "/", "~"))


@dataclass(frozen=True)
class ComposedConfig:
    """Composed, resolved values of one step's config.

    Attributes:
        step: the step id.
        values: plain values, without `inputs`.
        inputs: the `inputs` mapping: port → source, as written.
        origins: key path → `file:line` or `override '...'`.
        file: where mistakes are that have no place of their own.
        variables: dotted key → the environment variables it takes its value from, for those that are set.
        job: see PlannedStep.
    """

    step: str
    values: dict[str, Any]
    inputs: dict[str, Any] = field(default_factory=dict)
    origins: Mapping[KeyPath, str] = field(default_factory=dict)
    file: str | None = None
    variables: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    job: Mapping[str, Sequence[Any]] = field(default_factory=dict)

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

    With `schema`, the model that the values will become, `a.b=1` may set a key no file mentions: `validation` refuses
    what the model lacks. Without it such a key needs Hydra's `+a.b=1`. ConfigError for anything wrong with the files or
    overrides; `problems` has all of them when there are several."""
    from nemotron_steps.config.hydra_loader import load_config

    values, unresolved, origins, file = load_config(config, overrides, search, schema is not None)
    written = [(path, text) for path, text in nodes(unresolved) if isinstance(text, str)]
    names: Any = values.get(RUN_KEY)
    for _, text in written if isinstance(names, dict) else ():
        if text.startswith("${art:"):  # the names that references use are no keys
            names.pop(text.removeprefix("${art:").partition(",")[0].rstrip("}").strip(), None)
    if isinstance(names, dict) and not names:
        del values[RUN_KEY]
    job = _take_job(values, origins, search.step)
    inputs = values.pop(INPUTS_KEY, None) or {}
    if not isinstance(inputs, dict):
        what, where = f"`{INPUTS_KEY}` maps a step's ports to their artifacts", origin_of(origins, (INPUTS_KEY,))
        expected = "inputs: {PORT: {step: STEP, config: NAME}} or {PORT: PATH}"
        raise ConfigError(what, where=where, expected=expected, found=type(inputs).__name__)
    if schema is not None:
        from nemotron_steps.config.published import translate
        from nemotron_steps.config.validation import has_key

        values, problems = translate(values, lambda key: has_key(schema, key), origins)
        raise_problems(problems, f"the config of '{search.step}'")
    variables: dict[str, tuple[str, ...]] = {}
    for path, text in written:
        for name in ENVIRONMENT.finditer(text):
            # An empty one counts where there is no default.
            if os.environ.get(name[1]) or (name[1] in os.environ and not name[0].endswith(",")):
                key = ".".join(path)
                variables[key] = (*variables.get(key, ()), name[1])
    sources = {str(port): source for port, source in inputs.items()}
    return ComposedConfig(search.step, values, sources, origins, file, variables, job)


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

    given = {key: env.pop(key) for key in [*env] if key in JOB_KEYS}
    if not env:
        del table["env"]
    if not table:
        del values[RUN_KEY]
    validate(ComposedConfig(step, {RUN_KEY: {"env": given}}, {}, origins), RunTable)
    return job | {JOB_KEYS[key]: [value, origin_of(origins, (RUN_KEY, "env", key))] for key, value in given.items()}


def nodes(node: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every value in plain ones with its path, sections and lists included."""
    yield path, node
    for key, item in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from nodes(item, (*path, str(key)))
