"""Which steps need not run: what was committed under their cache keys, and what changed since where nothing was."""

import getpass
import logging
import os
import re
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from nemotron_steps.artifacts.integrity import Verified
from nemotron_steps.artifacts.models import Artifact, Edge, short_digest
from nemotron_steps.artifacts.records import ANY, DIGEST, NUMBER, TEXT, Optional, opened, require_shape, sealed
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.config.names import nearest
from nemotron_steps.errors import ArtifactError, RequestError, UnknownNameError, UnsupportedError
from nemotron_steps.resolver.plan import Changes, Plan, PlannedStep, StepOutput
from nemotron_steps.runs.cache_key import depends_on, key_of, recorded, text_of
from nemotron_steps.runs.run_folder import get_run, run_file
from nemotron_steps.runs.step_workdir import artifact_name, open_input

RECEIPTS = "artifacts/steps"
"""Where the records of done steps are, by their keys."""
KEY = re.compile(r"[0-9a-f]{32}")
_RECORD = {
    "run": re.compile(r"\w[\w.-]*"),
    "seconds": NUMBER,
    "outputs": {ANY: {"ref": TEXT, "digest": DIGEST}},
    "summary": dict,
    "version": Optional(TEXT),
    "depends": Optional({ANY: TEXT}),
}
_LOOKED_AT = 64
"""Results of a step, the newest, among which the nearest is looked for."""
_NOTHING = "no earlier result of it is here"
_CODE = ("code ", "distribution ", "step version", "step entry")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheEntry:
    """What a step committed under a key: output port → artifact, and what it reported as its summary."""

    key: str
    run: str
    seconds: float
    outputs: Mapping[str, Artifact]
    summary: Mapping[str, Any]
    version: str = ""
    depends: Mapping[str, str] | None = None


def recall(store: ArtifactStore, key: str) -> CacheEntry | None:
    """What is committed under a key, None if nothing or if an artifact of it is gone."""
    try:
        return _entry(store, key)
    except UnknownNameError:
        return None
    except ArtifactError as error:
        logger.warning("what the cache says about %s is not used: %s (%s)", key[:12], error.what, error.where)
        return None


def remember(store: ArtifactStore, entry: CacheEntry) -> None:
    """Record that everything under a key is committed: this is the moment a step counts as done."""
    outputs = {port: {"ref": a.ref, "digest": a.digest} for port, a in entry.outputs.items()}
    record = {**vars(entry), "outputs": outputs, "summary": dict(entry.summary), "depends": dict(entry.depends or {})}
    store.backend.write(f"{RECEIPTS}/{entry.key}.json", sealed(record))


def verify_entries(store: ArtifactStore) -> Iterator[Verified]:
    """Every record of what was done that is broken, or contradicts the records of what it names."""
    for name in store.backend.names(RECEIPTS):
        key = name.removesuffix(".json")
        try:
            if key == name or not KEY.fullmatch(key):
                raise ArtifactError("this is not a cache record", where=f"{store.backend.url}/{RECEIPTS}/{name}")
            _entry(store, key)
        except UnknownNameError:
            # An artifact that is gone is not corrupt: the step runs again.
            continue
        except ArtifactError as error:
            yield Verified(f"{RECEIPTS}/{name}", "", (error,))


def _entry(store: ArtifactStore, key: str) -> CacheEntry | None:
    """The record of a key, checked against those of its artifacts. UnknownNameError if one of them is gone."""
    data = store.backend.read(f"{RECEIPTS}/{key}.json")
    if data is None:
        return None
    where = f"{store.backend.url}/{RECEIPTS}/{key}.json"
    record = opened(data, where)
    require_shape(record, {"key": re.compile(key), **_RECORD}, where)
    outputs = {port: store.find(each["ref"]) for port, each in record["outputs"].items()}
    for port, artifact in outputs.items():
        made_by = (artifact.producer.port, artifact.producer.cache_key) if artifact.producer else None
        digest = record["outputs"][port]["digest"]
        if artifact.digest != digest or made_by != (port, key):
            raise ArtifactError(
                f"a cache record names another artifact as its output '{port}' than its step made",
                where=where,
                expected=f"{short_digest(digest)}, made under {key[:12]}",
                found=f"{artifact.ref}, {short_digest(artifact.digest)}",
                hints=("steps artifacts verify",),
            )
        if not store.exists(artifact.digest):
            raise UnknownNameError("an artifact is gone", where=where, found=artifact.ref)
    made = record["run"], record["seconds"], outputs, record["summary"]
    return CacheEntry(key, *made, record.get("version", ""), record.get("depends"))


def with_cached(plan: Plan, store: ArtifactStore, *, accept: Sequence[str] = ()) -> Plan:
    """The plan with `cached` filled in for each step that need not run, and `changes` for each that must. A step behind
    one that must run counts as not cached.

    `accept`: keys of steps, or stages, whose earlier result is taken as it is though the code changed since.
    RequestError for one that has nothing to accept, and nothing is recorded then.
    """
    found = _Look(store).plan(plan) if store.backend.names(RECEIPTS) else plan
    return _Look(store, _acceptable(found, accept)).plan(plan) if accept else found


class _Look:
    """One look at what is there for a plan. `accept`: keys of steps whose earlier results are accepted on the way."""

    def __init__(self, store: ArtifactStore, accept: Collection[str] = ()) -> None:
        self._store, self._accept = store, accept
        self._known: dict[str, Mapping[str, Artifact]] = {}
        self._supposed: set[str] = set()
        """Steps that must run, whose outputs are supposed to be what they were: only to say more of what follows."""
        self._made: dict[str, list[CacheEntry]] = {}

    def plan(self, plan: Plan) -> Plan:
        """The plan with `cached` and `changes`."""
        return replace(plan, steps=tuple(map(self._step, plan.steps)))

    def _step(self, planned: PlannedStep) -> PlannedStep:
        inputs: dict[str, Artifact] | None = {}
        for port, source in planned.inputs.items():
            artifact = None
            if isinstance(source, StepOutput):
                artifact = self._known.get(source.step_key, {}).get(source.port)
            else:
                with suppress(ArtifactError):  # reported, with everything known about it, when the step runs
                    artifact = open_input(planned, port, source, self._store, fetch=False)
            inputs = None if artifact is None or inputs is None else {**inputs, port: artifact}
        reads = [s.step_key for s in planned.inputs.values() if isinstance(s, StepOutput)]
        made_anew = [key for key in reads if key in self._supposed or key not in self._known]
        if inputs is None:
            what = f"reads what {made_anew[0]} makes" if made_anew else "an input is not here yet"
            return replace(planned, cached=None, changes=Changes((what,)))
        # A step without code can be planned; running it says what is missing.
        try:
            depends = depends_on(planned, inputs)
        except UnsupportedError:
            return replace(planned, cached=None)
        key = key_of(depends)
        entry, changes = recall(self._store, key), None
        if entry is None:
            entry, changes = self._nearest(planned, recorded(depends, planned))
            if entry is not None and changes is not None and planned.key in self._accept:
                entry, changes = _accepted(self._store, planned, inputs, entry, changes.code, key, depends), None
        if entry is None or (changes is not None and not changes.code):
            return replace(planned, cached=None, changes=changes)
        self._known[planned.key] = entry.outputs
        if changes is None and not made_anew:
            return replace(planned, cached={port: a.ref for port, a in entry.outputs.items()}, changes=None)
        self._supposed.add(planned.key)
        if changes is None:
            changes = Changes((f"cached if {made_anew[0]} makes again what it made",), entry.version, entry.run)
        return replace(planned, cached=None, changes=changes)

    def _nearest(self, planned: PlannedStep, now: Mapping[str, str]) -> tuple[CacheEntry | None, Changes]:
        """The earlier result with the fewest differences, and these."""
        if planned.step_id not in self._made:
            self._made[planned.step_id] = _results_of(self._store, planned)
        compared = []
        for entry in self._made[planned.step_id]:
            changes = changes_since(planned, entry.depends or {}, now, entry.version, entry.run)
            compared.append((entry, changes))
        if not compared:
            return None, Changes((_NOTHING,))
        entry, changes = min(compared, key=lambda each: (not each[1].code, len(each[1].differences), len(each[1].code)))
        if changes.code:  # of the run that made it, whatever was accepted since
            accepted = [each for a in entry.outputs.values() if a.producer for each in a.producer.accepted]
            code = tuple(dict.fromkeys([*(name for each in accepted for name in each["changed"]), *changes.code]))
            changes = replace(changes, code=code, differences=(_code_line(code),))
        return entry, changes


def _results_of(store: ArtifactStore, planned: PlannedStep) -> list[CacheEntry]:
    """What a step made before, newest first: the records of its artifacts lead to those of its keys."""
    keys: dict[str, None] = {}
    for port in planned.produces:
        name = artifact_name(planned.step_id, port)
        for version in reversed(store.versions(name)[-_LOOKED_AT:]):
            with suppress(ArtifactError, UnknownNameError):
                producer = store.find(f"{name}:v{version}").producer
                if producer is not None and producer.step == planned.step_id and KEY.fullmatch(producer.cache_key):
                    keys[producer.cache_key] = None
    entries = (recall(store, key) for key in keys)
    return [entry for entry in entries if entry is not None and entry.depends]  # earlier formats have none


def changes_since(
    planned: PlannedStep, before: Mapping[str, str], now: Mapping[str, str], version: str = "", run: str = ""
) -> Changes:
    """What differs between two lists of what a step depends on, as `cache_key.recorded` gives them."""
    code: list[str] = []
    lines, config = [], now.get("config") != before.get("config")
    for name in sorted({*now, *before}, key=lambda name: (name.startswith(_CODE), name)):
        old, new = before.get(name), now.get(name)
        if old == new or name == "config":
            continue
        config = config and not name.startswith("config ")
        if name.startswith(_CODE) or _is_of_code(planned, name, old, new):
            code.append(_line(name, old, new).removeprefix("code "))
        else:
            lines.append(_line(name, old, new))
    if config:
        lines.append("config: a value that is not shown")
    if not lines and not code:  # of one that had another form of keys
        code.append("what a cache key is made of")
    differences = (*lines, *((_code_line(code),) if code else ()))
    return Changes(differences, version, run, () if lines else tuple(code))


def _code_line(code: Sequence[str]) -> str:
    return f"code: {', '.join(code[:12])}" + (f" and {len(code) - 12} more" if len(code) > 12 else "")


def _is_of_code(planned: PlannedStep, name: str, old: str | None, new: str | None) -> bool:
    """Whether a key of the config is there, or gone, because the config model has other keys: at its default."""
    schema, key = planned.manifest.step.config_schema, name.removeprefix("config ")
    if schema is None or key == name or (old is not None and new is not None):
        return False
    from nemotron_steps.config.validation import default_of, has_key, load_schema

    model = load_schema(schema)
    if new is None:
        return not has_key(model, key)
    default = default_of(model, key)
    return default is not ... and text_of(default) == new


def _line(name: str, old: str | None, new: str | None) -> str:
    if name.startswith(("code ", "file ")):
        return name + (" (new)" if old is None else " (gone)" if new is None else "")
    shown = []
    for text in (old, new):
        text = "not set" if text is None else re.sub(r"[0-9a-f]{32,64}", lambda found: short_digest(found[0]), text)
        shown.append(text if len(text) <= 80 else f"{text[:77]}...")
    return f"{name}: {' -> '.join(shown)}"


def _acceptable(plan: Plan, names: Sequence[str]) -> set[str]:
    """Keys of the steps of these names. RequestError for one that has nothing to accept."""
    every = {
        name: [step for step in plan if name in (step.key, step.instance and step.instance.stage)] for name in names
    }
    taken = {step.key for steps in every.values() for step in steps}
    for name, steps in every.items():
        why, hint = "", f"steps plan {' '.join(plan.goals)} --why"
        if not steps:
            close = nearest(name, [step.key for step in plan])
            why, hint = "no step of the plan is called that", f"--accept {close[0]}" if close else hint
        for step in steps:
            reads = [source.step_key for source in step.inputs.values() if isinstance(source, StepOutput)]
            made_anew = [key for key in reads if key not in taken and plan.step(key).cached is None]
            if step.cached is not None:
                why = "it is cached as it is"
            elif made_anew:
                why = f"it reads what {made_anew[0]} makes anew"
                hint = " ".join(f"--accept {key}" for key in (*made_anew, step.key))
            elif step.changes is None or not step.changes.code:
                why = "; ".join(step.changes.differences if step.changes is not None else (_NOTHING,))
        if why:
            raise RequestError(
                f"there is nothing to accept of {name}: {why}",
                where=f"--accept {name}",
                expected="a step that must run though its code alone changed since it was made",
                hints=(hint,),
            )
    return taken


def _accepted(
    store: ArtifactStore,
    planned: PlannedStep,
    inputs: Mapping[str, Artifact],
    entry: CacheEntry,
    changed: Sequence[str],
    key: str,
    depends: Mapping[str, str],
) -> CacheEntry:
    """Record an earlier result under the key that the step has now."""
    user = str(os.getuid())
    with suppress(OSError, KeyError):  # a user without a name, as in containers
        user = getpass.getuser()
    record: dict[str, Any] = {"by": f"{user}@{socket.gethostname()}", "at": time.time()}
    record |= {"key": entry.key, "version": entry.version, "changed": list(changed)}
    edges = [Edge(port, artifact.digest, artifact.ref) for port, artifact in inputs.items()]
    outputs = {}
    for port, artifact in entry.outputs.items():
        assert artifact.producer is not None  # checked when the entry was read
        accepted, version = (*artifact.producer.accepted, record), planned.manifest.step.version
        producer = replace(artifact.producer, step_version=version, cache_key=key, accepted=accepted)
        outputs[port] = store.attribute(artifact, producer, edges)
    taken = replace(entry, key=key, outputs=outputs, depends=recorded(depends, planned))
    remember(store, taken)
    return taken


def config_of(store: ArtifactStore, artifact: Artifact) -> dict[str, Any] | None:
    """The merged config, redacted, of the step that made an artifact; None where no step did, or its run is gone."""
    import yaml

    if artifact.producer is None:
        return None
    try:
        info = get_run(store, artifact.producer.run)
        text = run_file(store, info.id, "config.yaml").read_text(encoding="utf-8")
    except UnknownNameError:
        return None
    made = artifact.producer.made_under
    key = next((key for key, step in info.steps.items() if step.get("cache_key") == made), None)
    values = yaml.safe_load(text)
    config = values.get(key) if isinstance(values, dict) else None
    return config if isinstance(config, dict) else None
