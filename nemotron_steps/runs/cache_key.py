"""What a step's result depends on, as one mapping (docs/cache_keys.md): its cache key is the digest of it, and two of
them say what changed. A config model may add to it by `data_fingerprint`, the `module:function` that gives config key →
what identifies it, texts and Paths."""

import hashlib
import importlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.files import sha256_file, stat_of
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.config.locations import cache_folder, read_json, write_json
from nemotron_steps.config.secrets import MASK, is_secret_key, redact
from nemotron_steps.errors import StepsError, UnsupportedError
from nemotron_steps.resolver.plan import PlannedStep
from nemotron_steps.runs.code_digest import SYSTEM, Code
from nemotron_steps.runs.step_workdir import ENGINE_PACKAGES, bound_values

_FORMAT = 3
_LONGEST = 400
"""Characters of a config value that is kept as it is; of a longer one its digest."""
_FUNCTION = re.compile(r"(?P<file>[^\n:]+\.py)(?::[A-Za-z_][\w.]*)?|(?P<module>[A-Za-z_]\w*(?:\.\w+)*):[A-Za-z_][\w.]*")
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_WRITTEN = re.compile(
    r"(?:^|_)(?:outputs?|out|logs?|logging|saved?|results|cache|te?mp|scratch|work|dump|export)(?:_|$)"
)
"""Names of keys for places that are written to."""
_NAMES_A_PATH = re.compile(
    r"(?:^|_)(?:path|file|folder|dir|directory|tokenizer|template|adapter|checkpoint|model|data(?:set)?|prompt)s?$"
)
"""Names of keys whose value is a path even if it is a single word."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".distcp", ".gguf")
_MOST_READ = (500, 1 << 28)
"""Files and bytes of what code names in one string: of more, names, sizes and times count, not the content."""
_WORTH_NOTING = 1 << 22
"""Bytes of a file from which its digest is remembered by size and time."""

Values = dict[str, Any]


def depends_on(planned: PlannedStep, inputs: Mapping[str, Artifact]) -> dict[str, str]:
    """Name → digest, or short text, of everything that the outputs of a step with these inputs are a function of."""
    filled = bound_values(planned, inputs)
    found = {
        "step": planned.step_id,
        "step version": planned.manifest.step.version,
        "step entry": planned.manifest.step.entry or "",
        **{f"output {port}": kind for port, kind in planned.produces.items()},
        **{f"input {port}": f"{artifact.type} {artifact.digest[:32]}" for port, artifact in inputs.items()},
    }
    for key, path in filled.items():
        port, root = next((p, a.path) for p, a in inputs.items() if Path(path).is_relative_to(a.path))
        found[f"bound {key}"] = f"{port}/{os.path.relpath(path, root)}"
    code, entry, schema = Code(), entry_module(planned), planned.manifest.step.config_schema
    if not code.add_module(entry):
        raise UnsupportedError(
            f"the code of step '{planned.step_id}' is not installed: no module named '{entry}'",
            where=planned.manifest.where("step", "entry"),
            found=planned.manifest.step.entry,
            hints=("steps doctor",),
        )
    if schema is not None:
        code.add_module(schema.partition(":")[0])
    values = _plain_values(planned)
    for name in sorted(_environments(values, inputs, code)):
        code.add_module(name)
    bound = {key for port in planned.manifest.consumes for key in port.bindings}
    for key in filled:
        _pop_all(values, key.split("."))
    fingerprints = {}
    if schema is not None:
        from nemotron_steps.config.validation import load_schema

        module, _, name = getattr(load_schema(schema), "data_fingerprint", "").partition(":")
        if module:
            told = getattr(importlib.import_module(module), name)(values)
            fingerprints = {key: _digest(text_of(things)) for key, things in told.items()}
    for key, value in leaves(values):
        section = next((each for each in fingerprints if key == each or key.startswith(f"{each}.")), None)
        if section is not None:
            found[f"file {section}"] = fingerprints[section]
            continue
        content, value = _content(key, value, code, is_path=key in bound)
        if content is not None:
            found[f"file {key}"] = content
        else:
            found[f"config {key}"] = text_of(value)
    for name, files in code.files.items():
        stats = {file: file.stat() for file in files if file.is_file()}
        if len(stats) > _MOST_READ[0] or sum(each.st_size for each in stats.values()) > _MOST_READ[1]:
            contents = [f"{file.name} {each.st_size} {each.st_mtime_ns}" for file, each in stats.items()]
        else:
            contents = [_file_digest(file) for file in stats]
        found[name] = _digest(sorted(contents))
    found |= {f"distribution {name}": version for name, version in code.distributions.items()}
    return found


def cache_key(planned: PlannedStep, inputs: Mapping[str, Artifact]) -> str:
    """The key of a step with these inputs, 32 hex digits. Raises as `depends_on`."""
    return key_of(depends_on(planned, inputs))


def key_of(depends: Mapping[str, str]) -> str:
    """The cache key: 32 hex digits."""
    return _digest({"format": str(_FORMAT), **depends})


def recorded(depends: Mapping[str, str], planned: PlannedStep) -> dict[str, str]:
    """The mapping as it may be kept and shown: secrets masked. `config` is the digest of all values, masked ones
    included, so that a change of them shows."""
    values = _plain_values(planned)
    shown = dict(leaves(redact(values)))
    hidden = {f"config {key}" for key, value in leaves(values) if shown.get(key) != value}
    config = {name: text for name, text in depends.items() if name.startswith("config ")}
    masked = {name: MASK if name in hidden else text for name, text in depends.items()}
    return {**masked, "config": _digest(config)}


def entry_module(planned: PlannedStep) -> str:
    """The module of a step's function. UnsupportedError if its manifest names none."""
    entry = planned.manifest.step.entry
    if entry is None:
        raise UnsupportedError(
            f"step '{planned.step_id}' has no implementation here: its manifest names no entry",
            where=planned.manifest.where("step"),
            expected='entry = "package.module:function"',
            hints=(f"steps plan {planned.step_id}   # type-checking works without one",),
        )
    return entry.partition(":")[0]


def _environments(values: Values, inputs: Mapping[str, Artifact], code: Code) -> set[str]:
    """Modules of the environments that the config names, itself or as an agent, and of those that rows name, where
    rows are graded or checked: all there are, where it is not known which the rows name."""
    from nemotron_steps.environments.registry import AGENTS, BUILT_IN, names, plugin, resolve

    said = {part for key, value in leaves(values) for part in (*key.split("."), str(value))}
    named = said & {*names(), *AGENTS}
    if "nemotron_steps.environments.registry" not in code.modules and not named:
        return set()
    env = _section(values, "env")
    by_row = env.get("should_use_nemo_gym", True) and not _section(values, "evaluation").get("environment")
    if values.get("check_environments") or ("env" in values and by_row):
        recorded_names = [a.attributes["environments"] for a in inputs.values() if "environments" in a.attributes]
        named.update(*(recorded_names or [names()]))
    options = _section(env, "nemo_gym", "environments")
    modules = set()
    for name in named:
        try:
            found = resolve(name, options)
            environment = found[0] if found is not None else None
        except StepsError:  # reported when the step runs
            environment = AGENTS[name].environment if name in AGENTS else None
        if environment is not None:
            entry = BUILT_IN.get(environment) or getattr(plugin(environment), "value", "") or ""
            modules.add(entry.partition(":")[0])
    return modules - {""}


def _section(values: Any, *path: str) -> Mapping[str, Any]:
    for name in path:
        values = values.get(name) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}


def _plain_values(planned: PlannedStep) -> Values:
    """The config as plain values, without what says how the step runs and without credentials."""
    values: Values = json.loads(json.dumps(dict(planned.config), default=str))
    schema = planned.manifest.step.config_schema
    if schema is not None:
        from nemotron_steps.config.validation import load_schema, operational_keys

        for key in operational_keys(load_schema(schema)):
            _pop_all(values, key.split("."))
    _pop_secrets(values)
    return values


def _pop_secrets(values: Any) -> None:
    """Which credentials fetched something does not change it."""
    if isinstance(values, dict):
        for key in [key for key, value in values.items() if is_secret_key(key) and not isinstance(value, dict)]:
            del values[key]
    for value in values.values() if isinstance(values, dict) else values if isinstance(values, list) else ():
        _pop_secrets(value)


def _pop_all(values: Any, path: Sequence[str]) -> None:
    """Without the key of a path, in which "*" is any name (config/validation.py)."""
    if not isinstance(values, dict):
        return
    head, *rest = path
    for name in [*values] if head == "*" else [head]:
        if rest:
            _pop_all(values.get(name), rest)
        else:
            values.pop(name, None)


def leaves(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything that is not a mapping or list, or an empty one."""
    items = enumerate(values) if isinstance(values, list) else values.items() if isinstance(values, Mapping) else ()
    empty = True
    for name, value in items:
        empty = False
        yield from leaves(value, f"{key}.{name}" if key else str(name))
    if empty and key:
        yield key, values


def text_of(value: Any) -> str:
    """A config value as the mapping has it."""
    text = json.dumps(value, ensure_ascii=False, default=_tree_digest)
    return text if len(text) <= _LONGEST else f"{len(text)} characters, {_digest(text)}"


def _content(key: str, value: Any, code: Code, *, is_path: bool) -> tuple[str | None, Any]:
    """The digest of the file or folder that a value names, None where it names none; and the value without the folder
    of a Python file, whose code is followed."""
    if not isinstance(value, str) or not 0 < len(value) < 4096 or "\n" in value or "://" in value:
        return None, value
    function = _FUNCTION.fullmatch(value)
    if function is not None and function["file"]:
        file = Path(function["file"]).expanduser()
        if file.is_file():
            code.add_file(file)
            return None, value.rpartition("/")[2]
    elif function is not None:
        code.add_module(function["module"])
    elif _DOTTED.fullmatch(value) and value.partition(".")[0] not in ENGINE_PACKAGES:
        code.add_dotted(value)
    *_, word = (part for part in key.split(".") if not part.isdigit())
    path = Path(value).expanduser()
    if not (is_path or "/" in value or path.suffix or _NAMES_A_PATH.search(word)) or _WRITTEN.search(word):
        return None, value
    with suppress(OSError, ValueError):
        absolute = f"{path.absolute()}/"
        if path.is_file() or (path.is_dir() and not f"{Path.cwd()}/".startswith(absolute)):
            if absolute.startswith(SYSTEM):
                return None, value
            return _tree_digest(path, without=_WEIGHTS if word.endswith("tokenizer") else ()), value
    return None, value


def _tree_digest(path: Path, without: tuple[str, ...] = ()) -> str:
    """Of a file's bytes, or of the names and bytes of a folder's files: none that are hidden at its top, or are
    Python's own."""
    if path.is_file():
        return _file_digest(path)
    found = {}
    for folder, folders, files in os.walk(path):
        hidden = "." if folder == str(path) else "\0"
        folders[:] = [each for each in folders if each != "__pycache__" and each[0] != hidden]
        for file in (Path(folder, name) for name in files if name[0] != hidden):
            if not file.name.endswith(without or ".pyc") and file.is_file():
                found[file.relative_to(path).as_posix()] = _file_digest(file)
    return _digest(found)


_digests: dict[tuple[Any, ...], str] = {}


def _file_digest(path: Path) -> str:
    """32 hex digits of a file's content, read again when its size, times or inode change: of a large one remembered."""
    known: tuple[Any, ...] = (str(path.absolute()), *stat_of(path))
    if known not in _digests:
        is_large = known[1] >= _WORTH_NOTING
        note = cache_folder() / "contents" / f"{_digest(known[0])}.json"
        remembered = read_json(note) if is_large else None
        if isinstance(remembered, list) and remembered[:-1] == [*known] and isinstance(remembered[-1], str):
            _digests[known] = remembered[-1]
        else:
            _digests[known] = sha256_file(path)[:32]
            if is_large:
                write_json(note, [*known, _digests[known]])
    return _digests[known]


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]
