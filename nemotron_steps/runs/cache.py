"""Which steps need not run: cache keys, and what was committed under them.

A key is a digest of everything a step's outputs are a function of: the step's id and version, its code (see
code_digest), its config without the keys that only carry input paths or only say how it runs (OPERATIONAL), what
identifies the data files that the config names, and the content of its inputs. Two runs with the same key produce the
same artifacts, but for rounding where they were placed differently, so the second is a no-op; the work folder of a step
is named by its key, so a repeated command finds the checkpoints of the one that was killed.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.files import sha256_file
from nemotron_steps.artifacts.integrity import Verified
from nemotron_steps.artifacts.models import Artifact, short_digest
from nemotron_steps.artifacts.records import opened, sealed
from nemotron_steps.artifacts.shapes import DIGEST, NUMBER, TEXT, Values, require_shape
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.config.redaction import is_secret_key
from nemotron_steps.errors import ArtifactError, UnknownNameError, UnsupportedError
from nemotron_steps.resolver.plan import Plan, PlannedStep, StepOutput
from nemotron_steps.runs.code_digest import code_digest
from nemotron_steps.runs.inputs import bound_values, open_input

_FORMAT = 2
_FOLDER = "artifacts/steps"
_KEY = re.compile(r"[0-9a-f]{32}")
_RECORD = {
    "run": re.compile(r"\w[\w.-]*"),
    "seconds": NUMBER,
    "outputs": Values({"ref": TEXT, "digest": DIGEST}),
    "summary": dict,
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheEntry:
    """What a step committed under a key: output port → artifact, and what it reported as its summary."""

    key: str
    run: str
    seconds: float
    outputs: Mapping[str, Artifact]
    summary: Mapping[str, Any]


def cache_key(planned: PlannedStep, inputs: Mapping[str, Artifact]) -> str:
    """The key of a step with these inputs, 32 hex digits.

    Raises UnsupportedError if the step's manifest names no code, or code that is not there.
    """
    payload = {
        "format": _FORMAT,
        "step": planned.step_id,
        "version": planned.manifest.step.version,
        "entry": planned.manifest.step.entry,
        "code": _code(planned),
        "config": _config_that_matters(planned, inputs),
        "inputs": {port: [artifact.type, artifact.digest] for port, artifact in inputs.items()},
        "outputs": dict(planned.produces),
    }
    text = json.dumps(payload, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


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


def _code(planned: PlannedStep) -> str:
    module = entry_module(planned)
    try:
        return code_digest(module)
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"the code of step '{planned.step_id}' is not installed: {error}",
            where=planned.manifest.where("step", "entry"),
            found=planned.manifest.step.entry,
            hints=("steps doctor",),
        ) from error


def recall(store: ArtifactStore, key: str) -> CacheEntry | None:
    """What is committed under a key, None if nothing or if an artifact of it is gone.

    A record that is broken, or names what something else made, counts as nothing, with a warning: the step runs again.
    The artifacts are records only: whoever reads one opens it, which verifies it.
    """
    try:
        return _entry(store, key)
    except UnknownNameError:
        return None
    except ArtifactError as error:
        logger.warning("what the cache says about %s is not used: %s (%s)", key[:12], error.what, error.where)
        return None


def remember(store: ArtifactStore, entry: CacheEntry) -> None:
    """Record that everything under a key is committed: this is the moment a step counts as done."""
    record = {
        "key": entry.key,
        "run": entry.run,
        "seconds": entry.seconds,
        "outputs": {port: {"ref": a.ref, "digest": a.digest} for port, a in entry.outputs.items()},
        "summary": dict(entry.summary),
    }
    store.backend.write(_path(entry.key), sealed(record))


def verify_entries(store: ArtifactStore) -> Iterator[Verified]:
    """Every record of what was done that is broken, or contradicts the records of what it names."""
    for name in store.backend.names(_FOLDER):
        key = name.removesuffix(".json")
        try:
            if key == name or not _KEY.fullmatch(key):
                raise ArtifactError("this is not a cache record", where=f"{store.backend.url}/{_FOLDER}/{name}")
            _entry(store, key)
        except UnknownNameError:
            # An artifact that is gone is not corrupt: the step runs again.
            continue
        except ArtifactError as error:
            yield Verified(f"{_FOLDER}/{name}", "", (error,))


def _entry(store: ArtifactStore, key: str) -> CacheEntry | None:
    """The record of a key, checked against those of its artifacts. UnknownNameError if one of them is gone."""
    data = store.backend.read(_path(key))
    if data is None:
        return None
    where = f"{store.backend.url}/{_path(key)}"
    record = opened(data, where)
    require_shape(record, {"key": re.compile(key), **_RECORD}, where)
    outputs = {port: store.find(each["ref"]) for port, each in record["outputs"].items()}
    for port, artifact in outputs.items():
        made_by = (artifact.producer.port, artifact.producer.cache_key) if artifact.producer else None
        if artifact.digest != record["outputs"][port]["digest"] or made_by != (port, key):
            raise ArtifactError(
                f"a cache record names another artifact as its output '{port}' than its step made",
                where=where,
                expected=f"{short_digest(record['outputs'][port]['digest'])}, made under {key[:12]}",
                found=f"{artifact.ref}, {short_digest(artifact.digest)}",
                hints=("steps artifacts verify",),
            )
        if not store.exists(artifact.digest):
            raise UnknownNameError("an artifact is gone", where=where, found=artifact.ref)
    return CacheEntry(key, record["run"], record["seconds"], outputs, record["summary"])


def with_cached(plan: Plan, store: ArtifactStore) -> Plan:
    """The plan with each step's `cached` filled in: output port → reference if nothing needs to run, else None.

    A step behind one that must run cannot be known to be cached, and counts as not cached.
    """
    if not store.backend.names(_FOLDER):
        return plan
    known: dict[str, Mapping[str, Artifact]] = {}
    steps = []
    for planned in plan.steps:
        entry = None
        inputs = _known_inputs(planned, known, store)
        if inputs is not None:
            # A step without code can be planned; running it says what is missing.
            with suppress(UnsupportedError):
                entry = recall(store, cache_key(planned, inputs))
        if entry is not None:
            known[planned.key] = entry.outputs
        cached = {port: artifact.ref for port, artifact in entry.outputs.items()} if entry is not None else None
        steps.append(replace(planned, cached=cached))
    return replace(plan, steps=tuple(steps))


def _known_inputs(
    planned: PlannedStep, known: Mapping[str, Mapping[str, Artifact]], store: ArtifactStore
) -> dict[str, Artifact] | None:
    inputs: dict[str, Artifact] = {}
    for port, source in planned.inputs.items():
        if isinstance(source, StepOutput):
            artifact = known.get(source.step_key, {}).get(source.port)
        else:
            try:
                artifact = open_input(planned, port, source, store, fetch=False)
            except ArtifactError:
                # It will be reported, with everything known about it, when the step runs.
                return None
        if artifact is None:
            return None
        inputs[port] = artifact
    return inputs


def _config_that_matters(planned: PlannedStep, inputs: Mapping[str, Artifact]) -> dict[str, Any]:
    """The config as plain values, without input paths and how the step runs; a file named by hand is its hash."""
    values = json.loads(json.dumps(dict(planned.config), default=str))
    for key in _operational_keys(planned.manifest.step.config_schema):
        _pop_all(values, key.split("."))
    filled = bound_values(planned, inputs)
    for port in planned.manifest.consumes:
        for key in port.bindings:
            value = _pop(values, key)
            if key not in filled and isinstance(value, str):
                path = Path(value).expanduser()
                values[f"file:{key}"] = sha256_file(path) if path.is_file() else value
    fingerprint = _data_fingerprint(planned.manifest.step.config_schema)
    if fingerprint is not None:
        values["data files"] = fingerprint(values)
    # Which credentials fetched something does not change it.
    return _without_secrets(values)


def _data_fingerprint(schema: str | None) -> Callable[[Mapping[str, Any]], Any] | None:
    """What a config model gives as `data_fingerprint`, `module:function`: identifies files that the config names."""
    if schema is None:
        return None
    from nemotron_steps.config.validation import load_schema

    module, _, name = getattr(load_schema(schema), "data_fingerprint", "").partition(":")
    return getattr(importlib.import_module(module), name) if module else None


def _operational_keys(schema: str | None) -> tuple[str, ...]:
    if schema is None:
        return ()
    from nemotron_steps.config.validation import load_schema, operational_keys

    return operational_keys(load_schema(schema))


def _without_secrets(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_secrets(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if isinstance(value, dict) or not is_secret_key(key)
    }


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


def _pop(values: dict[str, Any], dotted: str) -> Any:
    *parents, last = dotted.split(".")
    node: Any = values
    for part in parents:
        node = node.get(part) if isinstance(node, dict) else None
    return node.pop(last, None) if isinstance(node, dict) else None


def _path(key: str) -> str:
    return f"{_FOLDER}/{key}.json"
