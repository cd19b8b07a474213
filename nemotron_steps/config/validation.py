"""Composed values → a frozen pydantic model, with every mistake named by key, place and nearest name.

Also answers which dotted keys a model has, for hints and for the resolver's checks of manifest parameters. Imports
pydantic; importing `nemotron_steps.config` does not.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from nemotron_steps.config.compose import ComposedConfig, KeyPath, origin_of
from nemotron_steps.config.names import meant, nearest
from nemotron_steps.config.schema.base import OPERATIONAL, BrokenRulesError, members
from nemotron_steps.config.secrets import MASK, is_secret_key, looks_random, mask, shown_override
from nemotron_steps.errors import ConfigError, raise_problems, renamed_key
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
    settings = schema.model_config if isinstance(schema, type) and issubclass(schema, BaseModel) else {}
    if settings.get("extra") != "forbid" or not settings.get("frozen"):
        raise ConfigError(
            f"config_schema '{reference}' must be a frozen pydantic model that refuses unknown keys",
            expected='a subclass of pydantic.BaseModel with model_config = ConfigDict(frozen=True, extra="forbid")',
            found=repr(settings or schema),
        )
    return schema  # type: ignore[no-any-return]


def validate(composed: ComposedConfig, schema: type[ModelT]) -> ModelT:
    """The values as a frozen model. ConfigError with every unknown key, wrong type and wrong value in `problems` (or
    the only one itself), each with the file and line or the override that set it."""
    try:
        return schema.model_validate(composed.values)
    except ValidationError as error:
        raise_problems(_problems(error, composed, schema), f"the config of '{composed.step}'")
        raise


def complete(composed: ComposedConfig, schema: type[BaseModel], filled_later: frozenset[str]) -> dict[str, Any]:
    """Composed values with the model's defaults filled in, checked like `validate`. While a required key is missing
    that receives a value only when the step runs (`filled_later`, dotted: paths of its inputs), they come back as they
    are."""
    try:
        return schema.model_validate(composed.values).model_dump(mode="json")
    except ValidationError as error:
        raise_problems(_problems(error, composed, schema, filled_later), f"the config of '{composed.step}'")
    return composed.values


@lru_cache(maxsize=64)
def known_keys(schema: type[BaseModel]) -> tuple[str, ...]:
    """Every dotted key of a model, sections included, in declaration order; open parts are `*`."""
    return tuple(_walk(schema, ""))


@lru_cache(maxsize=64)
def operational_keys(schema: type[BaseModel]) -> tuple[str, ...]:
    """Dotted keys, or sections as a whole, that the model marks OPERATIONAL; WILDCARD stands for any name."""
    return tuple(_walk(schema, "", operational=True))


def _walk(model: type[BaseModel], prefix: str, *, operational: bool = False) -> Iterator[str]:
    for name, info in model.model_fields.items():
        key, marked = f"{prefix}{name}", OPERATIONAL in info.metadata
        if marked or not operational:
            yield key
        if marked and operational:
            continue
        for member in members(info.annotation):
            kind = _kind(member)
            if issubclass(kind, BaseModel):
                yield from _walk(kind, f"{key}.", operational=operational)
            elif issubclass(kind, Mapping):
                if not operational:
                    yield f"{key}.{WILDCARD}"
                for below in members(_item(member)):
                    if issubclass(kind := _kind(below), BaseModel):
                        yield from _walk(kind, f"{key}.{WILDCARD}.", operational=operational)


def has_key(schema: type[BaseModel], key: str) -> bool:
    """Whether a dotted key exists in the model (anything below a free-form field does)."""
    return _accepts(schema, key.split("."))


def _accepts(annotation: Any, path: Sequence[str]) -> bool:
    if not path or annotation is Any:
        return True
    head, *rest = path
    for member in members(annotation):
        kind = _kind(member)
        if issubclass(kind, BaseModel):
            below = [kind.model_fields[head].annotation] if head in kind.model_fields else []
        elif issubclass(kind, Mapping):
            below = [_item(member)]
        else:
            elements = get_args(member) if head.isdigit() and issubclass(kind, Collection) else ()
            below = [each for each in elements if each is not Ellipsis]
        if any(_accepts(each, rest) for each in below):
            return True
    return False


def _kind(member: Any) -> type:
    kind = get_origin(member) or member
    return kind if isinstance(kind, type) else object


def _item(mapping: Any) -> Any:
    """The type of a mapping's values."""
    return (*get_args(mapping), Any, Any)[1]


def default_of(schema: type[BaseModel], key: str) -> Any:
    """What the model has for a dotted key that nobody sets, as plain values; Ellipsis where it has nothing."""
    name, _, rest = key.partition(".")
    info = schema.model_fields.get(name)
    if info is None or info.is_required():
        return ...
    default = info.get_default(call_default_factory=True)  # type: ignore[call-arg]
    value = TypeAdapter(Any).dump_python(default, mode="json")
    for part in rest.split(".") if rest else ():
        value = value.get(part, ...) if isinstance(value, Mapping) else ...
    return value


def nearest_keys(schema: type[BaseModel], key: str) -> tuple[str, ...]:
    """The model's keys that look most like `key`, best first."""
    return nearest(key, _beside(schema, key), limit=2) or nearest(key, known_keys(schema))


def _beside(schema: type[BaseModel], key: str) -> list[str]:
    """The keys of the section that a key is in, or would be."""
    return [known for known in known_keys(schema) if known.rpartition(".")[0] == key.rpartition(".")[0]]


def _problems(
    error: ValidationError, composed: ComposedConfig, schema: type[BaseModel], may_miss: Collection[str] = ()
) -> list[ConfigError]:
    wrong: dict[KeyPath, list[Mapping[str, Any]]] = {}
    problems: list[ConfigError] = []
    for detail in error.errors(include_url=False):
        kind = detail["type"]
        path = _key_path(detail["loc"], composed.values, missing=kind == "missing")
        key, where = ".".join(path), origin_of(composed.origins, path) or composed.file
        broken = detail.get("ctx", {}).get("error")
        if isinstance(broken, BrokenRulesError):
            prefix = f"{key}." if key else ""
            for rule in broken.rules:
                place = origin_of(composed.origins, (*path, *rule.key.split("."))) or composed.file or prefix + rule.key
                hint = " ".join(re.sub("^~?", rf"\g<0>{prefix}", override) for override in rule.hint.split())
                problems.append(ConfigError(rule.sentence(prefix), where=place, hints=(hint,) if hint else ()))
        elif kind == "extra_forbidden":
            below = (origin for known, origin in composed.origins.items() if known[: len(path)] == path)
            problems.append(_unknown_key(key, detail["input"], next(below, where), schema, composed.step))
        elif kind != "missing":
            wrong.setdefault(path, []).append(detail)
        elif key not in may_miss:
            problems.append(ConfigError(f"'{key}' must be given a value", where=where, hints=(f"{key}=VALUE",)))
    for path, details in wrong.items():  # of a union each member says what it wants
        problems.append(_wrong_value(".".join(path), details, origin_of(composed.origins, path) or composed.file))
    return problems


def _key_path(location: Sequence[int | str], values: Any, *, missing: bool) -> KeyPath:
    """A pydantic location without the names of union members and validators: what is found in the values."""
    path: list[str] = []
    node: Any = values
    for part in location:
        has_item = isinstance(node, list | tuple) and isinstance(part, int) and part < len(node)
        if has_item or (isinstance(node, Mapping) and part in node):
            node = node[part]
            path.append(str(part))
    return (*path, str(location[-1])) if missing else tuple(path)


def _unknown_key(key: str, value: Any, where: str | None, schema: type[BaseModel], step: str) -> ConfigError:
    close, (parent, _, name) = nearest_keys(schema, key), key.rpartition(".")
    beside = ", ".join(known.rpartition(".")[2] for known in _beside(schema, key)[:12])
    if any(map(is_secret_key, close)) and (where or "").startswith("override "):
        where = f"override '{key}={MASK}'"  # it was meant for a secret
    right = meant(key, close)
    if (where or "").startswith("override "):
        text = str(where).removeprefix("override '").removesuffix("'")
        hints = tuple(text.replace(key, other, 1) for other in right) or (f"steps show {step}",)
    else:
        scalar = isinstance(value, bool | int | float | str)
        hints = tuple(shown_override(f"{other}={value}", key) for other in right) if scalar else ()
        if right and right[0].rpartition(".")[0] == parent:
            hints = renamed_key(where, name, right[0].rpartition(".")[2]) or hints
    return ConfigError(
        f"unknown key '{key}'",
        where=where,
        expected=" or ".join(close) or (f"a key of '{parent or step}': {beside}" if beside else None),
        found=key,
        hints=hints,
    )


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
    value, kind = detail["input"], detail["type"]
    if kind in ("literal_error", "bool_parsing"):
        expected = str(detail.get("ctx", {}).get("expected", "'true' 'false'"))
        return next(iter(meant(str(value), re.findall("'([^']*)'", expected))), None)
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
