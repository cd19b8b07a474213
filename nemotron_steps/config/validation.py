"""Composed values → a frozen pydantic model, with every mistake named by key, place and nearest name.

Also answers which dotted keys a model has, for hints and for the resolver's checks of manifest parameters. Imports
pydantic; importing `nemotron_steps.config` does not.
"""

import math
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from nemotron_steps.config.compose import ComposedConfig, origin_of, raise_problems
from nemotron_steps.config.names import meant, nearest
from nemotron_steps.config.schema.base import OPERATIONAL, BrokenRulesError
from nemotron_steps.config.secrets import MASK, looks_random, mask, shown_override
from nemotron_steps.config.yaml_lines import KeyPath
from nemotron_steps.errors import ConfigError, renamed_key
from nemotron_steps.errors.plugins import load_object

ModelT = TypeVar("ModelT", bound=BaseModel)

_PREFIX = re.compile("^(Value error, |Assertion failed, )?(Input should be )?(a valid )?")
WILDCARD = "*"
"""Stands in a known key for a part the model leaves open (`env.nemo_gym.environments.*`)."""


def load_schema(reference: str) -> type[BaseModel]:
    """Import the `config_schema` of a manifest, `module:Class`. ConfigError where it cannot be imported, or is not a
    frozen pydantic model that forbids unknown keys."""
    try:
        schema = load_object(reference)
    except (ImportError, AttributeError) as error:
        absent = isinstance(error, ModuleNotFoundError)
        raise ConfigError(
            f"config_schema '{reference}' cannot be imported: {error}",
            where=getattr(error, "line", None),
            expected="module:Class of a pydantic model",
            hints=("pip install -e PACK   # or put the pack's folder on PYTHONPATH",) if absent else (),
        ) from error
    if not (isinstance(schema, type) and issubclass(schema, BaseModel)):
        what = f"config_schema '{reference}' is not a pydantic model"
        raise ConfigError(what, expected="a subclass of pydantic.BaseModel", found=repr(schema))
    if schema.model_config.get("extra") != "forbid" or not schema.model_config.get("frozen"):
        raise ConfigError(
            f"config_schema '{reference}' would let unknown keys or later changes through",
            expected='model_config = ConfigDict(frozen=True, extra="forbid")',
            found=repr(dict(schema.model_config)),
        )
    return schema


def validate(composed: ComposedConfig, schema: type[ModelT]) -> ModelT:
    """The values as a frozen model. ConfigError with every unknown key, wrong type and wrong value in `problems` (or
    the only one itself), each with the file and line or the override that set it."""
    try:
        return schema.model_validate(composed.values)
    except ValidationError as error:
        problems = _problems(error, composed, schema)
    raise_problems(problems, f"the config of '{composed.step}'")
    raise AssertionError("a ValidationError without an error")


def complete(composed: ComposedConfig, schema: type[BaseModel], filled_later: frozenset[str]) -> dict[str, Any]:
    """Composed values with the model's defaults filled in, checked like `validate`. While a required key is missing
    that receives a value only when the step runs (`filled_later`, dotted: paths of its inputs), they come back as they
    are."""
    try:
        return schema.model_validate(composed.values).model_dump(mode="json")
    except ValidationError as error:
        problems = _problems(error, composed, schema, except_missing=filled_later)
    raise_problems(problems, f"the config of '{composed.step}'")
    return composed.values


@lru_cache(maxsize=64)
def known_keys(schema: type[BaseModel]) -> tuple[str, ...]:
    """Every dotted key of a model, sections included, in declaration order; open parts are `*`."""
    return tuple(_walk(schema, ""))


def has_key(schema: type[BaseModel], key: str) -> bool:
    """Whether a dotted key exists in the model (anything below a free-form field does)."""
    return _accepts(schema, tuple(key.split(".")))


def default_of(schema: type[BaseModel], key: str) -> Any:
    """What the model has for a dotted key that nobody sets, as plain values; Ellipsis where it has nothing."""
    models, value = [schema], ...
    for part in key.split("."):
        found = [(name, info) for model in models for name, info in model.model_fields.items()]
        name, info = next(((name, info) for name, info in found if part == (info.alias or name)), ("", None))
        if isinstance(value, Mapping):
            value = value.get(part, ...)
        elif isinstance(value, list | tuple):
            value = value[int(part)] if part.isdigit() and int(part) < len(value) else ...
        elif info is None:
            return ...
        elif isinstance(value, BaseModel):
            value = getattr(value, name)
        else:
            value = ... if info.is_required() else info.get_default(call_default_factory=True)  # type: ignore[call-arg]
        models = _models(info.annotation) if info is not None else []
    return value if value is ... else TypeAdapter(Any).dump_python(value, mode="json")


def nearest_keys(schema: type[BaseModel], key: str) -> tuple[str, ...]:
    """The model's keys that look most like `key`, best first."""
    return nearest(key, _beside(schema, key), limit=2) or nearest(key, known_keys(schema))


def _beside(schema: type[BaseModel], key: str) -> list[str]:
    """The keys of the section that a key is in, or would be."""
    return [known for known in known_keys(schema) if known.rpartition(".")[0] == key.rpartition(".")[0]]


@lru_cache(maxsize=64)
def operational_keys(schema: type[BaseModel]) -> tuple[str, ...]:
    """Dotted keys, or sections as a whole, that the model marks OPERATIONAL; WILDCARD stands for any name."""
    return tuple(_walk(schema, "", operational=True))


def _walk(model: type[BaseModel], prefix: str, *, operational: bool = False) -> Iterator[str]:
    for name, info in model.model_fields.items():
        key = f"{prefix}{info.alias or name}"
        if not operational or OPERATIONAL in info.metadata:
            yield key
        if operational and OPERATIONAL in info.metadata:
            continue
        for below in _models(info.annotation):
            yield from _walk(below, f"{key}.", operational=operational)
        item = _mapping_item(info.annotation)
        if item is not None and not operational:
            yield f"{key}.{WILDCARD}"
        for below in _models(item):
            yield from _walk(below, f"{key}.{WILDCARD}.", operational=operational)


def _accepts(annotation: Any, path: KeyPath) -> bool:
    if not path or annotation is Any:
        return True
    head, rest = path[0], path[1:]
    fields = [each for model in _models(annotation) for each in model.model_fields.items()]
    if any(head == (info.alias or name) and _accepts(info.annotation, rest) for name, info in fields):
        return True
    item = _mapping_item(annotation)
    if item is not None:
        return _accepts(item, rest)
    lists = [member for member in _members(annotation) if get_origin(member) in (list, tuple, set, frozenset, Sequence)]
    elements = chain.from_iterable(map(get_args, lists))
    return head.isdigit() and any(each is not Ellipsis and _accepts(each, rest) for each in elements)


def _members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, Annotated stripped; a plain annotation is its own only member."""
    if hasattr(annotation, "__metadata__"):
        return _members(annotation.__origin__)
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(chain.from_iterable(map(_members, get_args(annotation))))
    return (annotation,)


def _models(annotation: Any) -> list[type[BaseModel]]:
    return [m for m in _members(annotation) if isinstance(m, type) and issubclass(m, BaseModel)]


def _mapping_item(annotation: Any) -> Any:
    """The value type of a mapping annotation, Any for a bare one, None for anything else."""
    for member in _members(annotation):
        origin = get_origin(member) or member
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return (*get_args(member), Any, Any)[1]
    return None


def _problems(
    error: ValidationError,
    composed: ComposedConfig,
    schema: type[BaseModel],
    *,
    except_missing: frozenset[str] = frozenset(),
) -> list[ConfigError]:
    by_key: dict[tuple[KeyPath, str], list[Mapping[str, Any]]] = {}
    problems: list[ConfigError] = []
    file = str(composed.files[0]) if composed.files else None
    for detail in error.errors(include_url=False):
        kind = detail["type"] if detail["type"] in ("extra_forbidden", "missing") else "value"
        path = _key_path(detail["loc"], composed.values, missing=kind == "missing")
        broken = detail.get("ctx", {}).get("error")
        if not isinstance(broken, BrokenRulesError):
            by_key.setdefault((path, kind), []).append(detail)
            continue
        prefix = "".join(f"{part}." for part in path)
        for rule in broken.rules:
            place = origin_of(composed.origins, (*path, *rule.key.split("."))) or file or prefix + rule.key
            hint = " ".join(re.sub("^~?", rf"\g<0>{prefix}", override) for override in rule.hint.split())
            problems.append(ConfigError(rule.sentence(prefix), where=place, hints=(hint,) if hint else ()))
    for (path, kind), details in by_key.items():
        key, where = ".".join(path), origin_of(composed.origins, path) or file
        if kind == "extra_forbidden":
            problems.append(_unknown_key(key, details[0]["input"], where, schema))
        elif kind == "value":
            problems.append(_wrong_value(key, details, where))
        elif key not in except_missing:
            problems.append(ConfigError(f"'{key}' must be given a value", where=where, hints=(f"{key}=VALUE",)))
    return problems


def _key_path(location: Sequence[int | str], values: Any, *, missing: bool) -> KeyPath:
    """A pydantic location without the names of union members and validators it is mixed with: only parts that are found
    in what was validated are kept, and, if `missing`, the last one."""
    path: list[str] = []
    node = values
    for position, part in enumerate(location):
        if isinstance(node, Mapping) and isinstance(part, str):
            if part in node:
                node = node[part]
                path.append(part)
            elif missing and position == len(location) - 1:
                path.append(part)
        elif isinstance(node, list | tuple) and isinstance(part, int):
            node = node[part] if part < len(node) else None
            path.append(str(part))
    return tuple(path)


def _unknown_key(key: str, value: Any, where: str | None, schema: type[BaseModel]) -> ConfigError:
    close, (parent, _, name) = nearest_keys(schema, key), key.rpartition(".")
    expected = " or ".join(close)
    if not close and (siblings := _beside(schema, key)):
        expected = f"a key of '{parent or 'the config'}': " + ", ".join(s.rpartition(".")[2] for s in siblings[:12])
    right = meant(key, close)
    scalar = isinstance(value, bool | int | float | str)
    hints = tuple(shown_override(f"{other}={value}", key) for other in right) if scalar else ()
    if right and right[0].rpartition(".")[0] == parent:
        hints = renamed_key(where, name, right[0].rpartition(".")[2]) or hints
    return ConfigError(f"unknown key '{key}'", where=where, expected=expected or None, found=key, hints=hints)


def _wrong_value(key: str, details: Sequence[Mapping[str, Any]], where: str | None) -> ConfigError:
    messages = list(dict.fromkeys(_PREFIX.sub("", detail["msg"]) for detail in details))
    value = details[0]["input"]
    if details[0]["type"] in ("value_error", "assertion_error"):
        return ConfigError(f"'{key}': {messages[0]}" if key else messages[0], where=where)
    shown = MASK if isinstance(value, str) and looks_random(value) else mask(key, value)
    text = repr(shown)
    right = None if shown != value else _right_value(details[0])
    return ConfigError(
        f"'{key}' has a wrong value",
        where=where,
        expected=" or ".join(messages),
        found=f"{text if len(text) <= 120 else text[:117] + '...'} ({type(value).__name__})",
        hints=() if right is None else (f"{key}={right}",),
    )


def _right_value(detail: Mapping[str, Any]) -> str | None:
    """What the value was probably meant to be; None where there is no telling."""
    value, kind, expected = detail["input"], detail["type"], str(detail.get("ctx", {}).get("expected", ""))
    if kind in ("literal_error", "enum", "bool_parsing"):
        choices = ["true", "false"] if kind == "bool_parsing" else re.findall("'([^']*)'", expected)
        return next(iter(meant(str(value), choices)), None)
    if kind not in ("int_parsing", "int_from_float", "int_type", "float_parsing"):
        return None
    try:
        number = float(re.sub(r"[ ,_]", "", str(value)))
    except ValueError:
        return None
    whole = kind.startswith("int")
    if not math.isfinite(number) or (whole and not number.is_integer()):
        return None
    return f"{int(number) if whole else number}"
