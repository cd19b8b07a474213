"""One TOML file → one model, or every mistake in it with file and line."""

import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from nemotron_steps.config.names import meant
from nemotron_steps.errors import ManifestError, renamed_key
from nemotron_steps.manifest.models import StepManifest, TypeManifest
from nemotron_steps.manifest.override import is_override
from nemotron_steps.manifest.pipeline_models import PipelineManifest
from nemotron_steps.manifest.source import SourceText

M = TypeVar("M", bound=BaseModel)

LONGEST_FILE = 4 << 20
"""Bytes of a manifest: the largest here has 20 thousand."""
_OWN_FIELDS = frozenset({"pack", "file", "config_dir", "source", "extra", "hidden"})
_STEP_TABLES = frozenset(StepManifest.model_fields) - _OWN_FIELDS
_PIPELINE_TABLES = frozenset(PipelineManifest.model_fields) - _OWN_FIELDS
_MEANT = {
    **dict.fromkeys(("input", "inputs", "takes"), "consumes"),
    **dict.fromkeys(("output", "outputs", "makes"), "produces"),
    **dict.fromkeys(("stage", "steps"), "stages"),
    **dict.fromkeys(("param", "params"), "parameters"),
}
"""What others call tables of ours."""


@dataclass(frozen=True)
class TomlFile:
    """A parsed TOML file with its text, so that errors can name lines."""

    path: Path
    data: Mapping[str, Any]
    source: SourceText

    def where(self, *path: str | int) -> str:
        """`file:line` of a key."""
        return f"{self.path}:{self.source.line(path)}"


def read_toml(path: Path) -> TomlFile:
    """Read and parse. Raises ManifestError naming file and line for anything that is not TOML."""
    try:
        status = path.stat()
        # A pipe would be waited for, a device never ends.
        if not stat.S_ISREG(status.st_mode) or status.st_size > LONGEST_FILE:
            raise ManifestError(
                "this is not a manifest file",
                where=str(path),
                expected=f"a plain file of at most {LONGEST_FILE >> 20} MiB",
                found=f"{status.st_size} bytes" if stat.S_ISREG(status.st_mode) else "a pipe, socket or device",
            )
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ManifestError(f"cannot read the file: {error.strerror or error}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise ManifestError(
            f"not UTF-8 text (byte {error.start})", where=str(path), expected="a TOML file in UTF-8"
        ) from error
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        position = re.search(r"at line (\d+)", str(error))
        line = int(position[1]) if position else text.count("\n") + 1
        raise ManifestError(f"not valid TOML: {error}", where=f"{path}:{line}") from error
    return TomlFile(path, data, SourceText(text))


def parse_step(
    file: TomlFile, *, pack: str = "", config_dir: Path | None = None
) -> tuple[StepManifest | None, tuple[ManifestError, ...]]:
    """The step manifest in a file, or None with every mistake in it."""
    known = {key: value for key, value in file.data.items() if key in _STEP_TABLES}
    extra = {key: value for key, value in file.data.items() if key not in _STEP_TABLES}
    problems = [
        ManifestError(
            f"unknown key '{key}' at the top of a step manifest"
            if _is_value(value)
            else f"unknown table '{key}' in a step manifest",
            where=file.where(key),
            expected=f"one of the tables {', '.join(sorted(_STEP_TABLES))}, or a table of your own",
            hints=_did_you_mean(key, _STEP_TABLES, file.where(key)),
        )
        for key, value in extra.items()
        if _is_value(value) or key.lower() in _MEANT or meant(key, _STEP_TABLES)
    ]
    origin = {"pack": pack, "file": file.path, "config_dir": config_dir, "source": file.source}
    step, more = _validate(StepManifest, {**known, "extra": extra, **origin}, file)
    problems += more
    if step is not None:
        problems += [  # not a field validator, so that the line of the entry is known
            ManifestError(
                f"override '{text}' cannot be pasted",
                where=file.where(table, index, "override"),
                expected="key=value, +key=value, ~key, key<=MOST, or key*=FACTOR|FALLBACK",
            )
            for table, entries in (("strategies", step.strategies), ("errors", step.errors))
            for index, entry in enumerate(entries)
            for text in entry.override
            if not is_override(text)
        ]
    return (None if problems else step), tuple(problems)


def parse_pipeline(file: TomlFile, *, pack: str = "") -> tuple[PipelineManifest | None, tuple[ManifestError, ...]]:
    """The pipeline in a file, or None with every mistake in it."""
    unknown = [key for key in file.data if key not in _PIPELINE_TABLES]
    problems = tuple(
        ManifestError(
            f"unknown key '{key}' in a pipeline",
            where=file.where(key),
            expected=f"one of {', '.join(sorted(_PIPELINE_TABLES))}",
            hints=_did_you_mean(key, _PIPELINE_TABLES, file.where(key)),
        )
        for key in unknown
    )
    known = {key: value for key, value in file.data.items() if key not in unknown}
    pipeline, more = _validate(
        PipelineManifest, {**known, "pack": pack, "file": file.path, "source": file.source}, file
    )
    return (None if problems else pipeline), (*problems, *more)


def parse_types(file: TomlFile) -> tuple[dict[str, TypeManifest], tuple[ManifestError, ...]]:
    """Every well-formed type of a `types.toml`, and the mistakes in the others."""
    types: dict[str, TypeManifest] = {}
    problems: list[ManifestError] = []
    for name, table in file.data.items():
        if not isinstance(table, dict):
            problems.append(
                ManifestError(
                    f"'{name}' is not a type",
                    where=file.where(name),
                    expected=f"a table [{name}]",
                    found=type(table).__name__,
                )
            )
            continue
        parsed, more = _validate(TypeManifest, table, file, prefix=(name,))
        problems += more
        if parsed is not None:
            types[name] = parsed
    return types, tuple(problems)


def _validate(
    model: type[M], data: Mapping[str, Any], file: TomlFile, prefix: tuple[str, ...] = ()
) -> tuple[M | None, tuple[ManifestError, ...]]:
    try:
        return model.model_validate(data), ()
    except ValidationError as error:
        # Unions report one error per branch; the first at a place says enough.
        problems: dict[tuple[Any, ...], ManifestError] = {}
        items = error.errors(include_url=False, include_context=False)
        for item in items:
            # A list none of whose entries is right is called too short as well.
            at = item["loc"]
            if item["type"] == "too_short" and any(other["loc"][: len(at)] == at != other["loc"] for other in items):
                continue
            # What of the location exists in the file, plus its last key when that one is missing.
            location: tuple[str | int, ...] = ()
            inner: Any = data
            for part in at:
                is_item = isinstance(inner, list | tuple) and isinstance(part, int) and part < len(inner)
                if not is_item and not isinstance(inner, dict):
                    break
                location += (part,)
                if not is_item and part not in inner:
                    break
                inner = inner[part]
            problems.setdefault(location, _explain(model, item, location, file, prefix))
        return None, tuple(problems.values())


def _explain(
    model: type[BaseModel], item: Any, location: tuple[str | int, ...], file: TomlFile, prefix: tuple[str, ...]
) -> ManifestError:
    path = (*prefix, *location)
    dotted = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    where = file.where(*path)
    kind, found = item["type"], item.get("input")
    if kind == "missing":
        return ManifestError(f"'{dotted}' is missing", where=where, expected="a value")
    if kind == "extra_forbidden":
        fields = _fields_at(model, location[:-1])
        return ManifestError(
            f"unknown key '{dotted}'",
            where=where,
            expected=f"one of {', '.join(sorted(fields))}" if fields else None,
            hints=_did_you_mean(str(location[-1]), fields, where),
        )
    if kind == "value_error":
        text = str(item["msg"]).removeprefix("Value error, ")
        named = re.match(r"(\w+)[.:]", text)
        if item["loc"] == () and named is not None:  # a rule over a whole file names the table first: `consumes: …`
            where = file.where(*prefix, named[1], 0)
        return ManifestError(text, where=where)
    expected = str(item["msg"]).removeprefix("Input should be ")
    return ManifestError(f"'{dotted}' has the wrong type", where=where, expected=expected, found=repr(found))


def _fields_at(model: type[BaseModel], location: tuple[str | int, ...]) -> frozenset[str]:
    """Names of the fields of the (nested) model that a location points at."""
    current: Any = model
    for part in location:
        if isinstance(part, int) or not (isinstance(current, type) and issubclass(current, BaseModel)):
            continue
        field = current.model_fields.get(part)
        if field is None:
            return frozenset()
        current = _model_in(field.annotation)
    if isinstance(current, type) and issubclass(current, BaseModel):
        return frozenset(current.model_fields) - _OWN_FIELDS
    return frozenset()


def _model_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        if (found := _model_in(argument)) is not None:
            return found
    return None


def _did_you_mean(key: str, known: frozenset[str], where: str) -> tuple[str, ...]:
    other = _MEANT.get(key.lower(), "")
    close = (other,) if other in known else meant(key, known)[:1]
    return tuple(hint for name in close for hint in (*renamed_key(where, key, name), f"did you mean '{name}'?"))


def _is_value(value: Any) -> bool:
    """Whether what stands at the top of a file is neither a table nor a list of them."""
    tables = isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)
    return not tables and not isinstance(value, dict)
