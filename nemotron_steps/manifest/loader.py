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
    problems = []
    for key, value in extra.items():
        tables = value if isinstance(value, list) and value else [value]
        is_table = all(isinstance(each, dict) for each in tables)
        if is_table and key.lower() not in _MEANT and not meant(key, _STEP_TABLES):
            continue
        what = f"unknown table '{key}' in" if is_table else f"unknown key '{key}' at the top of"
        problems.append(_unknown(f"{what} a step manifest", key, _STEP_TABLES, file, ", or a table of your own"))
    origin = {"pack": pack, "file": file.path, "config_dir": config_dir, "source": file.source}
    step, more = _validate(StepManifest, {**known, "extra": extra, **origin}, file)
    problems += more
    for table, entries in (("strategies", step.strategies), ("errors", step.errors)) if step is not None else ():
        for index, entry in enumerate(entries):
            for text in entry.override:
                if not is_override(text):  # not a field validator, so that the line of the entry is known
                    expected = "key=value, +key=value, ~key, key<=MOST, or key*=FACTOR|FALLBACK"
                    where = file.where(table, index, "override")
                    problems.append(
                        ManifestError(f"override '{text}' cannot be pasted", where=where, expected=expected)
                    )
    return (None if problems else step), tuple(problems)


def parse_pipeline(file: TomlFile, *, pack: str = "") -> tuple[PipelineManifest | None, tuple[ManifestError, ...]]:
    """The pipeline in a file, or None with every mistake in it."""
    unknown = [key for key in file.data if key not in _PIPELINE_TABLES]
    problems = [_unknown(f"unknown key '{key}' in a pipeline", key, _PIPELINE_TABLES, file) for key in unknown]
    known = {key: value for key, value in file.data.items() if key not in unknown}
    origin = {"pack": pack, "file": file.path, "source": file.source}
    pipeline, more = _validate(PipelineManifest, {**known, **origin}, file)
    return (None if problems else pipeline), (*problems, *more)


def _unknown(what: str, key: str, known: frozenset[str], file: TomlFile, more: str = "") -> ManifestError:
    where, expected = file.where(key), f"one of {', '.join(sorted(known))}{more}"
    return ManifestError(what, where=where, expected=expected, hints=_did_you_mean(key, known, where))


def parse_types(file: TomlFile) -> tuple[dict[str, TypeManifest], tuple[ManifestError, ...]]:
    """Every well-formed type of a `types.toml`, and the mistakes in the others."""
    types: dict[str, TypeManifest] = {}
    problems: list[ManifestError] = []
    for name, table in file.data.items():
        if not isinstance(table, dict):
            expected, found = f"a table [{name}]", type(table).__name__
            what, where = f"'{name}' is not a type", file.where(name)
            problems.append(ManifestError(what, where=where, expected=expected, found=found))
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
    kind, text = item["type"], str(item["msg"])
    if kind == "missing":
        return ManifestError(f"'{dotted}' is missing", where=where, expected="a value")
    if kind == "extra_forbidden":
        table: Any = model
        for part in location[:-1]:
            if isinstance(part, str) and table is not None:
                table = _model_in(table.model_fields[part].annotation) if part in table.model_fields else None
        fields = frozenset(table.model_fields if table is not None else ()) - _OWN_FIELDS
        return ManifestError(
            f"unknown key '{dotted}'",
            where=where,
            expected=f"one of {', '.join(sorted(fields))}" if fields else None,
            hints=_did_you_mean(str(location[-1]), fields, where),
        )
    if kind == "value_error":
        text = text.removeprefix("Value error, ")
        named = re.match(r"(\w+)[.:]", text)
        if item["loc"] == () and named is not None:  # a rule over a whole file names the table first: `consumes: …`
            where = file.where(*prefix, named[1], 0)
        return ManifestError(text, where=where)
    expected = text.removeprefix("Input should be ")
    what = f"'{dotted}' has the wrong type"
    return ManifestError(what, where=where, expected=expected, found=repr(item.get("input")))


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model in the type of a field: of a list, a dict or a union the first."""
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
