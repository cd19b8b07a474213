"""`env.toml`: named places to run, and the accounts results are reported to.

    [wandb]
    project = "alignment"

    [base]
    executor = "slurm"
    account = "research"

    [big]
    extends = "base"
    nodes = 16

The nearest `env.toml` of the working directory and the folders above (or the file that NEMOTRON_ENV_FILE names) comes
first, then `env.toml` in the user's config folder; a profile may extend one of either file. `${oc.env:NAME}` in a value
reads the environment. Which keys there are, and what they do, is the executor's business (`runs/executors`); here they
are read, merged and checked against the model it gives.
"""

import os
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, StrictStr

from nemotron_steps.config.compose import ComposedConfig, KeyPath
from nemotron_steps.config.locations import ENVIRONMENT_VARIABLE, environment_files
from nemotron_steps.config.names import meant
from nemotron_steps.config.schema.base import OnlyIf, Section
from nemotron_steps.config.secrets import mask, note_variables, redact, redact_text
from nemotron_steps.config.validation import validate
from nemotron_steps.errors import ConfigError, StepsError, UnknownNameError, UnsupportedError
from nemotron_steps.errors.plugins import entry_points, load_object

ENTRY_POINT_GROUP = "nemotron_steps.trackers"
_IN_EXAMPLES = {"mlflow": "./examples/mlflow_tracker   # in a checkout of nemotron-steps"}
"""Tables whose trackers are packages under examples/, and what to install for them."""
Count = Annotated[PositiveInt, Field(strict=True)]
VariableName = Annotated[StrictStr, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")]
Text = Annotated[StrictStr, Field(pattern=r"^[^\x00]*$")]
"""What a process can be given: without the character that ends a text there."""


class Table(BaseModel):
    """Any table of env.toml: unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


TableT = TypeVar("TableT", bound=Table)


class WandbSettings(Table):
    """`[wandb]`: where metrics and artifacts are mirrored."""

    project: StrictStr
    entity: StrictStr | None = None
    mode: Literal["online", "offline"] | None = None
    """None: what wandb's own settings and environment say."""


class TensorBoardSettings(Table):
    """`[tensorboard]`: event files of every run."""

    folder: StrictStr | None = None
    """Has a folder for each run. None: `tensorboard` in the run's own folder."""


class OpenTable(Table):
    """The table of a tracker that says nothing about its keys, or that is not installed: any key."""

    model_config = ConfigDict(extra="allow")


BUILT_IN: Mapping[str, type[Table]] = {"wandb": WandbSettings, "tensorboard": TensorBoardSettings}


class MirrorSettings(Table):
    """Every mirror; None for one that env.toml has no table for."""

    wandb: WandbSettings | None = None
    tensorboard: TensorBoardSettings | None = None
    others: dict[str, Any] = Field(default_factory=dict)
    """Tables of trackers that other packages bring, by name, each as its tracker's `settings_model`."""

    @property
    def names(self) -> tuple[str, ...]:
        """The tables that are there."""
        return (*(name for name in BUILT_IN if getattr(self, name) is not None), *self.others)


def mirror_names() -> frozenset[str]:
    """Tables of env.toml that are mirrors rather than profiles."""
    return frozenset({*BUILT_IN, *_IN_EXAMPLES, *(point.name for point in entry_points(ENTRY_POINT_GROUP))})


def settings_model(name: str) -> type[Table]:
    """What a mirror's table is checked against."""
    if name in BUILT_IN or _tracker(name) is None:
        return BUILT_IN.get(name, OpenTable)
    model: type[Table] = getattr(tracker_class(name), "settings_model", OpenTable)
    return model


def _tracker(name: str) -> str | None:
    return next((point.value for point in entry_points(ENTRY_POINT_GROUP) if point.name == name), None)


def tracker_class(name: str) -> Any:
    """The class that another package brings for a table. UnsupportedError if none does, or it cannot be loaded."""
    if (reference := _tracker(name)) is None:
        what = f"the [{name}] table of env.toml needs a package that brings a tracker '{name}'"
        raise UnsupportedError(what, where=f"[{name}]", hints=(f"pip install {_IN_EXAMPLES[name]}",))
    try:
        return load_object(reference)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(f"tracker '{name}' cannot be loaded: {error}", where=reference) from error


class Profile(Table):
    """One `[PROFILE]`, with what it extends merged in: the keys that mean the same to every executor.

    An executor's own keys are the fields of its subclass (`profile_model`, see `runs/executors`)."""

    executor: StrictStr = "local"
    """One of those in `runs/executors`, or the name of an executor that an installed package brings."""
    extends: StrictStr | None = None
    nodes: Count = 1
    gpus_per_node: Annotated[int, Field(strict=True, ge=0)] | None = None
    env_vars: dict[VariableName, Text] = Field(default_factory=dict)
    setup_lines: tuple[Text, ...] = ()
    """Shell lines run before the job."""
    of_image: ClassVar[tuple[str, ...]] = ()
    """Keys that need an image: a profile that has one of them is refused where neither it nor the config names one."""

    @property
    def offers(self) -> dict[str, int | None]:
        """The most that a step's `cluster` may ask for: of nodes whatever it wants, where there can be several."""
        one = {"nodes": 1} if type(self).model_fields["nodes"].annotation is not int else {}
        return {"gpus_per_node": self.gpus_per_node, **one}

    @property
    def on_this_machine(self) -> bool:
        """Whether its runs are processes of this machine."""
        return self.executor == "local"

    @property
    def hours(self) -> float | None:
        """The most that a job may take, begun again as often as it may be; None where nothing bounds it."""
        return None

    @property
    def runs_here(self) -> bool:
        """Whether a run that somebody waits for works in the process that asks for it."""
        return self.on_this_machine and not self.setup_lines

    @property
    def variables_here(self) -> Mapping[str, str]:
        """What `env_vars` sets in the process that asks for a run; an executor of another machine sets them there."""
        return self.env_vars if self.on_this_machine else {}

    def shown(self) -> dict[str, Any]:
        """The keys that are set, secrets masked, as they may be printed."""
        values = self.model_dump(exclude_defaults=True, exclude={"extends", "env_vars"})
        if self.env_vars:
            values["env_vars"] = {name: mask(name, value) for name, value in self.env_vars.items()}
        if self.setup_lines:
            values["setup_lines"] = [redact_text(line) for line in self.setup_lines]
        return {"executor": self.executor, **redact(values)}


class OpenProfile(Profile):
    """A profile of an executor that declares no keys of its own: any key is accepted and passed on."""

    model_config = ConfigDict(extra="allow")


class NoImageError(ConfigError):
    """A job needs an image, and nothing names one."""

    profile: Profile
    """What the job would be submitted under."""


class _JobKeys(Section):
    container_image: StrictStr | None = None
    container: Annotated[StrictStr | None, OnlyIf("container_image", None)] = None
    nodes: Count | None = None
    gpus_per_node: Annotated[int, Field(strict=True, ge=0)] | None = None
    ntasks_per_node: Count | None = None


class _RunEnv(Section):
    env: _JobKeys


class RunTable(Section):
    """`run.env` of a config: what the job that works on a step is given, whatever the profile."""

    run: _RunEnv


ProfileModels = Callable[[str], type[Profile]]
"""Executor name → the model of its profiles. UnsupportedError for an executor that is not there."""

OTHER_TABLES = frozenset({"artifacts", "cache", "cli"})
"""Tables that other tools read in the same file; no profile has such a name."""
_ALSO_CALLED = {
    **dict.fromkeys(("startup_commands", "pre_launch_commands"), "setup_lines"),
    "container": "container_image",
}
"""Second names of keys, as the public profiles have them."""
JOB_KEYS = {key: _ALSO_CALLED.get(key, key) for key in _JobKeys.model_fields}
"""Key of `run.env` → the profile's."""


@dataclass(frozen=True)
class Environment:
    """Every profile found, and the tables of mirrors (`[wandb]`, `[tensorboard]`, those of other packages)."""

    profiles: Mapping[str, Mapping[str, Any]]
    lines: Mapping[tuple[str, str], str]
    """(table, key) → `file:line`; key "": of the table itself."""
    mirror_tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Profile names, sorted."""
        return tuple(sorted(self.profiles))

    @property
    def mirrors(self) -> MirrorSettings:
        """The tables of mirrors, checked. ConfigError if one is malformed."""
        tables = {}
        for name, values in self.mirror_tables.items():
            lines = {key: where for (table, key), where in self.lines.items() if table == name}
            tables[name] = _validated(settings_model(name), values, name, lines)
        own = {name: tables.pop(name) for name in BUILT_IN if name in tables}
        return MirrorSettings(**own, others=tables)

    def profile(self, name: str, models: ProfileModels, job: Mapping[str, Sequence[Any]] | None = None) -> Profile:
        """A profile with everything it extends merged in, nearest last, as its executor's model.

        Args:
            job: as `resolver.plan.job_of`, for the job to be started. What steps say of nodes, GPUs and tasks counts
                more than the profile, and so does an override; an image that a config names is for a profile without.

        Raises:
            UnknownNameError: no such profile, with the nearest names.
            UnsupportedError: nothing here provides its executor.
            ConfigError: a key or value is wrong, or `extends` goes in a circle.
        """
        found, at = self._merged(name), self.lines[name, ""]
        lines = {"": at} | {key: where for key, (_, where) in found.items()}
        merged = {key: _filled(value, where) for key, (value, where) in found.items()}
        executor = merged.get("executor", "local")
        try:
            # A value that is not a string is the general model's to refuse.
            model = models(executor) if isinstance(executor, str) else Profile
        except StepsError as error:
            error.where = lines.get("executor", error.where)
            raise
        for key, (value, where, *others) in (job or {}).items():
            overridden = (where or "").startswith("override ")
            takes = key in model.model_fields or model.model_config.get("extra") == "allow"
            if not (takes or overridden) or (key == "container_image" and key in merged and not overridden):
                continue
            if others:
                what = "one job works on all these steps, and their configs name several images"
                expected = "container_image in the profile, or the steps one by one"
                hints = [_appended(at, f'container_image = "{image}"') for image in (value, *others)]
                raise ConfigError(what, where=at, expected=expected, found=", ".join((value, *others)), hints=hints)
            merged[key], lines[key] = value, where or at
        profile = _validated(model, merged, name, lines)
        image, always = merged.get("container_image"), "container_image" in model.of_image
        needs = [key for key in model.of_image if merged.get(key)]
        if job is None or not ((always and not image) or (needs and image is None)):
            return profile
        build = 'container_image = "nemotron-steps:cuda"'
        hints = [f"{_appended(at, build)}   # docs/executors.md: how to build it"]
        hints += [] if always else [_appended(at, 'container_image = ""') + "   # without a container"]
        lacking = NoImageError(
            f"[{name}] needs an image{' for its ' if needs else ''}{' and '.join(needs)}, and neither it nor the "
            "step's config names one",
            where=lines.get((*needs, "")[0], at),
            expected="container_image in the profile, or run.env.container=IMAGE",
            hints=hints,
        )
        lacking.profile = profile
        raise lacking

    def _merged(self, name: str, above: tuple[str, ...] = ()) -> dict[str, tuple[Any, str]]:
        """Key → its value and where that is written, of a profile and of all that it extends."""
        where = self.lines.get((above[-1], "extends")) if above else None
        if name in above:
            raise ConfigError(f"profiles extend each other in a circle: {' → '.join((*above, name))}", where=where)
        values = self.profiles.get(name)
        if values is None:
            raise self._unknown(name, where)
        base, at = values.get("extends"), self.lines[name, ""]
        merged = self._merged(base, (*above, name)) if isinstance(base, str) else {}
        for written, value in values.items():
            key, where = _ALSO_CALLED.get(written, written), self.lines.get((name, written), at)
            if key != written and key in values:
                raise ConfigError(f"'{written}' is another name of '{key}', which [{name}] has", where=where)
            below, _ = merged.get(key, (None, ""))
            both = isinstance(value, dict) and isinstance(below, dict)
            merged[key] = ({**below, **value} if both else value, where)
        return merged

    def _unknown(self, name: str, where: str | None) -> UnknownNameError:
        close, files = meant(name, self.profiles), environment_files()
        hints = [f"-r {other}" for other in close]
        other = "which other tools read" if name in OTHER_TABLES else ""
        other = "a mirror, not a profile" if name in mirror_names() else other
        if not close and not other and re.fullmatch(r"[\w-]+", name):
            # Never `local` unasked: it would run on the login node what was meant for the cluster.
            executor = "local" if "local" in re.split("[_-]", name) else "slurm"
            table = shlex.quote(f'\\n[{name}]\\nexecutor = "{executor}"\\n')
            hints.append(f"printf {table} >> {shlex.quote(str(files[0]))}   # docs/executors.md has every executor")
        looked = f"a [{name}] table in one of: {', '.join(map(str, files))}"
        return UnknownNameError(
            f"no profile '{name}'",
            where=where or self.lines.get((name, "")) or str(files[0]),
            expected=", ".join(self.names) or ("a profile, or neither -r nor -b" if other else looked),
            found=f"[{name}], {other}" if other else name,
            hints=hints,
        )


def load_environment(cwd: Path | None = None) -> Environment:
    """Read every `env.toml`; a profile of an earlier file hides one of the same name in a later file. ConfigError where
    one cannot be read, is not TOML or has values outside of tables, or NEMOTRON_ENV_FILE names no file."""
    named, unset = os.environ.get(ENVIRONMENT_VARIABLE), f"unset {ENVIRONMENT_VARIABLE}"
    if named and not Path(named).expanduser().is_file():
        raise ConfigError("there is no such file", where=ENVIRONMENT_VARIABLE, found=named, hints=(unset,))
    profiles: dict[str, Mapping[str, Any]] = {}
    lines: dict[tuple[str, str], str] = {}
    mirrors: dict[str, Mapping[str, Any]] = {}
    trackers = mirror_names()
    files = tuple(file for file in environment_files(cwd) if file.is_file())
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            at = re.search(r"line (\d+)", str(error))
            raise ConfigError(f"not valid TOML: {error}", where=f"{file}:{at[1] if at else 1}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read env.toml: {error}", where=str(file)) from error
        found = _table_lines(text)
        for name, values in tables.items():
            line = found.get((name, ""), found.get(("", name), 1))  # a [table], or `table = {...}`
            if not isinstance(values, dict):
                what = f"'{name}' stands outside any table"
                raise ConfigError(what, where=f"{file}:{line}", expected="[PROFILE] tables")
            if name in profiles or name in mirrors or name in OTHER_TABLES:
                continue
            (mirrors if name in trackers else profiles)[name] = values
            lines.update({key: f"{file}:{line}" for key, line in found.items() if key[0] == name})
            lines[name, ""] = f"{file}:{line}"
    return Environment(profiles, lines, mirrors)


_IN_BRACES = r"[^{}]*"
for _ in range(3):  # a default may have one of its own, and so may that
    _IN_BRACES = rf"(?:[^{{}}]|\{{{_IN_BRACES}\}})*"


def _filled(value: Any, where: str) -> Any:
    """A profile's value with `${oc.env:NAME}` and `${oc.env:NAME,default}` replaced by what the environment has."""
    if isinstance(value, dict):
        return {key: _filled(item, where) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, where) for item in value]
    if not isinstance(value, str):
        return value

    def read(found: re.Match[str]) -> str:
        name, default = found[1], found[2]
        note_variables((name,))
        text = os.environ.get(name)
        if text is None and default is not None:
            return str(_filled(re.sub(r"^(['\"])(.*)\1$", r"\2", default), where))
        if text is None:
            raise ConfigError(
                f"environment variable {name} is not set", where=where, found=found[0], hints=(f"export {name}=...",)
            )
        return text

    return re.sub(rf"\$\{{oc\.env:([A-Za-z_]\w*)(?:,({_IN_BRACES}))?\}}", read, value)


def _table_lines(text: str) -> dict[tuple[str, str], int]:
    """Line of each `[table]` (key '') and of each key in it; good enough to point at, never parsed from."""
    found: dict[tuple[str, str], int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[\s*([^\[\]]+?)\s*\]", line)
        key = re.match(r"\s*([A-Za-z0-9_.\"'-]+?)\s*=", line)
        if header:
            table, _, nested = header[1].replace('"', "").replace("'", "").partition(".")
            found.setdefault((table, nested), number)
        elif key:
            found.setdefault((table, key[1].strip("\"'").partition(".")[0]), number)
    return found


def _validated(model: type[TableT], values: Mapping[str, Any], table: str, lines: Mapping[str, str]) -> TableT:
    origins: dict[KeyPath, str] = {(key,): where for key, where in lines.items()}
    try:
        return validate(ComposedConfig(f"[{table}]", dict(values), {}, origins, lines[""]), model)
    except ConfigError as error:
        for each in error.problems or (error,):
            each.what += f" in [{table}]"
            added = [_appended(lines[""], f'{hint[:-6]} = "..."') for hint in each.hints if hint.endswith("=VALUE")]
            each.hints = (*(hint for hint in each.hints if hint.startswith("sed ")), *added)
        raise


def _appended(where: str, text: str) -> str:
    """A command that adds a line to env.toml after another."""
    file, _, line = where.rpartition(":")
    return f"sed -i {shlex.quote(f'{line}a {text}')} {shlex.quote(file)}"
