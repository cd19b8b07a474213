"""The manifest files of a step and of an artifact type as frozen models (a pipeline: `pipeline_models`).

The fields of the public Nemotron `step.toml` and `types.toml` are a subset of these. Unknown keys inside a known
table are refused; unknown tables beside them are kept in `extra`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from nemotron_steps.config.families import FAMILIES
from nemotron_steps.manifest.override import resolved_overrides
from nemotron_steps.manifest.source import SourceText

STEP_ID = re.compile(r"[a-z0-9][a-z0-9_.-]*(/[a-z0-9][a-z0-9_.-]*)*")
"""What a step id looks like: `rl/nemo_rl/rlhf`."""

TABLES: dict[str, list[str]] = {"@families": [*FAMILIES]}
"""What the value of a port's attribute may stand for."""

DOTTED = re.compile(r"[^\s.=]+(\.[^\s.=]+)*")
"""What a dotted config key looks like."""


def _object_path(value: str, info: ValidationInfo) -> str:
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
        raise ValueError(f"{info.field_name} must look like 'package.module:name', not {value!r}")
    return value


ObjectPath = Annotated[StrictStr, AfterValidator(_object_path)]
"""`module:name`, imported only when needed."""
Strings = tuple[StrictStr, ...]
OneOrMore = Annotated[Strings, BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
"""A string or a list of strings."""
LONGEST_OUTPUT = 200
"""Characters of an artifact's name (artifacts/models.py), which for a step's output is its pack, id and port."""


class Table(BaseModel):
    """A table of a manifest file: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    def changed(self, **changes: Any) -> Self:
        """A copy with other values, whose cached properties are its own."""
        return type(self)(**{**{name: getattr(self, name) for name in type(self).model_fields}, **changes})


class ManifestFile(Table):
    """One file of a pack. `pack`, `file` and `source` say where it came from and are not part of the TOML."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), arbitrary_types_allowed=True)

    pack: str = Field(default="", exclude=True)
    file: Path = Field(default=Path(), exclude=True)
    source: SourceText | None = Field(default=None, exclude=True, repr=False)
    hidden: bool = Field(default=False, exclude=True)
    """Whether something of an earlier pack has the plain id or name."""

    def where(self, *path: str | int) -> str:
        """`file:line` of a key of this file, e.g. where("consumes", 0, "type")."""
        return f"{self.file}:{self.source.line(path) if self.source is not None else 1}"


class StepTable(Table):
    """`[step]`."""

    id: StrictStr
    name: StrictStr = ""
    category: StrictStr = ""
    description: StrictStr = ""
    summary: StrictStr = ""
    stack: StrictStr = ""
    difficulty: StrictStr = ""
    tags: Strings = ()
    aliases: Strings = ()
    """Other words that find the step, where they are no id and no other step has them."""
    version: StrictStr = "1"
    """Part of the cache key: raise it when the step's results change for the same config."""
    entry: ObjectPath | None = None
    config_schema: ObjectPath | None = None
    preflight: ObjectPath | None = None
    """Function of (config, inputs) that raises what is wrong with its data before a run's first step starts; `inputs`:
    supplied artifacts by port, None where an earlier step makes it. May return what it needs (see Resources.needs)."""

    @field_validator("id", "aliases")
    @classmethod
    def _is_id(cls, value: str | Strings) -> str | Strings:
        for each in (value,) if isinstance(value, str) else value:
            if not STEP_ID.fullmatch(each):
                raise ValueError(f"{'step id' if each == value else 'alias'} {each!r} must look like 'rl/nemo_rl/rlhf'")
        return value


class Port(Table):
    """What inputs and outputs have in common."""

    type: StrictStr
    name: StrictStr = ""
    """Default: the type."""
    description: StrictStr = ""
    required: StrictBool = True

    @model_validator(mode="before")
    @classmethod
    def _name_defaults_to_type(cls, data: Any) -> Any:
        if isinstance(data, dict) and not data.get("name") and "type" in data:
            return {**data, "name": data["type"]}
        return data


class Consumes(Port):
    """`[[consumes]]`: an input port."""

    many: StrictBool = False
    """Takes several artifacts, each under a name: `PORT.NAME`. `bind` is then a config key that gets NAME → path."""
    bind: StrictStr | dict[StrictStr, StrictStr] | None = None
    """Config key that receives the artifact's path, or {config key = path inside it}. The key of a split other than
    train, or of a path that ends in '?', stays where the artifact lacks it; of `A.jsonl|B.jsonl` the first is taken."""
    instead_of: Strings = ()
    """Config keys that name the same thing in another way: null where the port is fed, unless an override sets them."""
    unless: dict[StrictStr, StrictStr] = Field(default_factory=dict)
    """Config key → the value with which the step takes no such input; its bound keys are then the config's own."""
    attributes: dict[StrictStr, Any] = Field(default_factory=dict)
    """Attribute → the value, or list of values, it must have; "@families": the models of config/families.py."""
    auto: StrictBool | StrictStr = True
    """What a plain list of steps connects by itself: outputs of the port's type (true), of a narrower one (its name),
    or none."""

    def idle(self, config: Mapping[str, Any]) -> bool:
        """Whether a config takes no such input. `config`: dotted key → value."""
        return any(config.get(key) == value for key, value in self.unless.items())

    @field_validator("attributes")
    @classmethod
    def _tables_are_written_out(cls, attributes: dict[str, Any]) -> dict[str, Any]:
        for name, value in attributes.items():
            if isinstance(value, str) and value.startswith("@"):
                if value not in TABLES:
                    raise ValueError(f"{name} = {value!r} names no table; there is {', '.join(TABLES)}")
                attributes[name] = TABLES[value]
        return attributes

    @model_validator(mode="after")
    def _many_have_one_key(self) -> Self:
        if self.many and not isinstance(self.bind, str):
            raise ValueError(f"{self.name}: many = true needs one config key at bind, which gets NAME → path")
        return self

    def named(self, name: str) -> Consumes:
        """The port of one of the artifacts of a port that takes many."""
        return self.changed(name=f"{self.name}.{name}", bind=f"{self.bind}.{name}", many=False)

    @cached_property
    def bindings(self) -> Mapping[str, str]:
        """Config key → path inside the artifact ('' for the artifact's folder itself)."""
        return {self.bind: ""} if isinstance(self.bind, str) else self.bind or {}


class Produces(Port):
    """`[[produces]]`: an output port."""

    inherits: StrictStr | None = None
    """Input port whose attributes this output keeps, as far as its type declares them, for checks at plan time."""
    attributes: dict[StrictStr, Any] = Field(default_factory=dict)
    """Attributes that every artifact of this output has, for checks at plan time."""
    becomes: dict[StrictStr, StrictStr] = Field(default_factory=dict)
    """Config key → the type that the output has instead where that key is true (an adapter in place of a model)."""

    def under(self, config: Mapping[str, Any]) -> Produces:
        """The output as a config makes it. `config`: dotted key → value."""
        instead = next((kind for key, kind in self.becomes.items() if config.get(key) is True), self.type)
        return self if instead == self.type else self.changed(type=instead)


class Parameter(Table):
    """`[[parameters]]`: a config key worth knowing. `name` is dotted and must exist in the step's config."""

    name: StrictStr
    description: StrictStr = ""
    default: Any = None
    choices: tuple[Any, ...] = ()

    @model_validator(mode="after")
    def _well_formed(self) -> Self:
        if not DOTTED.fullmatch(self.name):
            raise ValueError(f"parameter name {self.name!r} is not a dotted config key")
        return self

    def allows(self, value: Any) -> bool:
        """Whether `value` is one of the choices ('null' in the manifest stands for None)."""
        choices = [None if c == "null" else c for c in self.choices]
        return not choices or any(value == c and isinstance(value, bool) == isinstance(c, bool) for c in choices)


class Advice(Table):
    """What to do about something."""

    skill: StrictStr | None = None
    override: OneOrMore = ()
    """Overrides to paste; `key*=10|0.001` is relative to the run's own value (see `override`)."""

    def overrides_for(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """The overrides as plain `key=value`, relative ones worked out from `config`."""
        return resolved_overrides(self.override, config)


class Strategy(Advice):
    """`[[strategies]]`: when something is seen, what to do; `signal` names the run signal it answers."""

    when: StrictStr
    then: StrictStr
    signal: OneOrMore = ()


class ErrorHint(Advice):
    """`[[errors]]`: a known failure. `match` is an error code, exception class name or regular expression."""

    name: StrictStr
    recovery: StrictStr
    match: OneOrMore = ()

    @model_validator(mode="after")
    def _patterns_compile(self) -> Self:
        for pattern in self.match:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"match {pattern!r} is not a regular expression: {error}") from error
        return self


class Constraint(Table):
    """`[[constraints]]`: `same = ["policy.tokenizer", "prompts.tokenizer"]`, each PORT.ATTRIBUTE."""

    same: Annotated[Strings, Field(min_length=2)]
    description: StrictStr = ""

    @cached_property
    def terms(self) -> tuple[tuple[str, str], ...]:
        """(port, attribute) pairs."""
        return tuple((port, attribute) for port, _, attribute in (term.partition(".") for term in self.same))


class ModelChoice(BaseModel):
    """`[[models]]`: a model the step is meant for. Further keys are kept."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    name: StrictStr
    description: StrictStr = ""
    default: StrictBool = False
    min_gpus: StrictInt | None = None


class Resources(BaseModel):
    """`[resources]`: what the default config is sized for. Further keys are kept."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    nodes: StrictInt | None = None
    gpus_per_node: StrictInt | None = None
    cpus: StrictInt | None = None
    memory_gib: StrictInt | None = None
    needs: Strings = ()
    """What it needs of a machine under every config, by the names of `runs/prerequisites.py`, else programs on PATH."""


class StepManifest(ManifestFile):
    """One step file."""

    step: StepTable
    consumes: tuple[Consumes, ...] = ()
    produces: tuple[Produces, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    strategies: tuple[Strategy, ...] = ()
    errors: tuple[ErrorHint, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    models: tuple[ModelChoice, ...] = ()
    resources: Resources = Resources()
    reference: dict[str, Any] = Field(default_factory=dict)
    extra: dict[str, Any] = Field(default_factory=dict)
    config_dir: Path | None = Field(default=None, exclude=True)
    """Folder with this step's `<config name>.yaml` files; None when the pack has none for it."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for kind in ("consumes", "produces", "parameters"):
            names = [entry.name for entry in getattr(self, kind)]
            for name in sorted({n for n in names if names.count(n) > 1}):
                raise ValueError(f"{kind}: two entries are named {name!r}; give each its own name")
        # A port that takes many is PORT.NAME where a request has named them; constraints are about all of them.
        ports = {p.name for p in self.consumes} | {p.name.partition(".")[0] for p in self.consumes}
        for output in self.produces:
            if len(f"{self.pack}:{self.step.id}/{output.name}") > LONGEST_OUTPUT:
                what = f"the name PACK:ID/OUTPUT of {output.name[:40]!r} has more than {LONGEST_OUTPUT} characters"
                raise ValueError(f"produces: {what}")
            if output.inherits is not None and output.inherits not in ports:
                raise ValueError(f"produces.{output.name}: inherits names no input port {output.inherits!r}")
        for constraint in self.constraints:
            for (port, attribute), term in zip(constraint.terms, constraint.same, strict=True):
                if port not in ports or not attribute:
                    raise ValueError(f"constraints: {term!r} is not PORT.ATTRIBUTE of an input port")
        return self

    @property
    def id(self) -> str:
        """What the step goes by: `step.id`, or `PACK:ID` where an earlier pack has that id."""
        return f"{self.pack}:{self.step.id}" if self.hidden else self.step.id

    @cached_property
    def inputs(self) -> Mapping[str, Consumes]:
        """Input ports by name."""
        return {port.name: port for port in self.consumes}

    @cached_property
    def outputs(self) -> Mapping[str, Produces]:
        """Output ports by name."""
        return {port.name: port for port in self.produces}

    @cached_property
    def varies(self) -> bool:
        """Whether the config decides about an input or the type of an output."""
        return any(port.becomes for port in self.produces) or any(port.unless for port in self.consumes)

    @property
    def config_names(self) -> tuple[str, ...]:
        """Names of this step's configs, sorted."""
        found = self.config_dir.glob("*.yaml") if self.config_dir is not None else ()
        return tuple(sorted(path.stem for path in found if path.is_file()))

    def where_input(self, name: str, *path: str) -> str:
        """`file:line` of an input port, or of a key of it."""
        in_file = list(dict.fromkeys(port.name.partition(".")[0] for port in self.consumes))
        return self.where("consumes", in_file.index(name.partition(".")[0]), *path)

    def with_ports(self, consumes: Sequence[Consumes]) -> StepManifest:
        """The same step with other input ports."""
        return self.changed(consumes=consumes)

    def under(self, config: Mapping[str, Any]) -> StepManifest:
        """The same step with the inputs that a config (dotted key → value) takes and the outputs that it makes."""
        return self.changed(
            consumes=tuple(port for port in self.consumes if not port.idle(config)),
            produces=tuple(port.under(config) for port in self.produces),
        )


class TypeManifest(Table):
    """One table of `types.toml`: an artifact type."""

    description: StrictStr = ""
    is_a: Strings = ()
    """Types this one can be used as. One direction: a parent cannot be used as its child."""
    convert_to: dict[StrictStr, StrictStr] | None = None
    """Target type → id of the step that converts. None: what the parents convert to; {}: nothing."""
    attributes: dict[StrictStr, StrictStr] = Field(default_factory=dict)
    """Attribute → what it means. Recorded when an artifact is committed, checked when it is consumed."""
    validator: ObjectPath | None = None
    """`module:function` of a folder that raises ArtifactError or DataError for what is no such artifact, else returns
    the attributes read from it. None: the parents' is used."""
