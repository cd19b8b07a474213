"""Run folders: creating, finding and describing them. What a run does is `execute`.

runs/<id>/run.json       what was asked, its state, process or job, and each step's state
          plan.json      the plan, overrides redacted
          config.yaml    every step's merged config, redacted
          events.jsonl   everything that happened, in order
          metrics.jsonl  samples.jsonl  log.txt  report.html
          groups.jsonl   what became of each prompt, by training step
          lock           held by the process that works on it, so that a killed run is known to be dead
          submit.lock    held by the process that hands it to an executor, for the same reason
"""

import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from nemotron_steps import __version__
from nemotron_steps.artifacts.files import is_run_id, plain, to_json_bytes, write_atomic
from nemotron_steps.artifacts.records import (
    ANY,
    COUNT,
    NUMBER,
    TEXT,
    TIME,
    Optional,
    json_object,
    require_shape,
)
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.config.secrets import Redactor, secrets_in
from nemotron_steps.errors import ArtifactError, RequestError, StorageError, UnknownNameError, did_you_mean
from nemotron_steps.runs.locks import is_held

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"
JOB_FILE = "job.json"
"""Which executor's job works on the run, if it was submitted to one."""

SUBMITTED, RUNNING, DONE = "submitted", "running", "done"
FAILED, INTERRUPTED, KILLED = "failed", "interrupted", "killed"
"""States of a run. `killed` is never written: it is a run that says `running` whose process is gone, or `submitted`
whose job was never recorded and that nobody is submitting any more."""


@dataclass(frozen=True)
class RunInfo:
    """What run.json says; `created` and `updated` in Unix seconds."""

    id: str
    name: str = ""
    status: str = RUNNING
    request: dict[str, Any] = field(default_factory=dict)
    """What the command line was asked, so that a run can be resumed by its id alone; redacted."""
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Step key → {"state", "outputs": {port: reference}, "seconds", "metric"}, in plan order."""
    executor: str = "local"
    job: str = ""
    pid: int = 0
    host: str = ""
    version: str = ""
    """Of the package that works, or worked last, on it."""
    attempts: int = 0
    forced: dict[str, str] = field(default_factory=dict)
    """Steps that are yet to be made whatever is cached → the cache key under which each began, "" before that."""
    error: dict[str, Any] | None = None
    created: float = 0.0
    updated: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return asdict(self)

    @property
    def given_name(self) -> str:
        """What the run was called by `--name`; "" for none."""
        return self.request.get("name") or ""

    @property
    def title(self) -> str:
        """The name given, and the plan's."""
        return " · ".join(filter(None, (self.given_name, self.name)))

    def listed(self) -> dict[str, Any]:
        """What tells it from other runs: its name, the overrides it was given, and the last metric of a step."""
        metrics = [step["metric"] for step in self.steps.values() if step.get("metric")]
        return {
            "run_name": self.given_name,
            "overrides": list(self.request.get("overrides", ())),
            "metric": metrics[-1] if metrics else None,
        }


def new_run_id(name: str) -> str:
    """A fresh id: local time, the last part of the name's first word, and four random hex digits."""
    word = next(iter(name.split()), "run").rsplit("/", 1)[-1]
    tail = "".join(c if c.isalnum() else "-" for c in word).strip("-") or "run"
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{tail[:24]}-{secrets.token_hex(2)}"


_STEP: Mapping[Any, Any] = {
    "state": TEXT,
    "outputs": Optional({ANY: TEXT}),
    "seconds": Optional((None, NUMBER)),
    "metric": Optional((None, {"name": TEXT, "before": (None, NUMBER), "after": NUMBER})),
    ANY: ANY,
}
_ERROR: Mapping[Any, Any] = {
    "what": str,
    **dict.fromkeys(("code", "class"), Optional(str)),
    **dict.fromkeys(("where", "expected", "found"), Optional((None, str))),
    "hints": Optional([str]),
    ANY: ANY,
}
_RUN: Mapping[Any, Any] = {
    "name": Optional(str),
    "status": Optional(re.compile("|".join((SUBMITTED, RUNNING, DONE, FAILED, INTERRUPTED, KILLED)))),
    "request": Optional(
        {"name": Optional((None, TEXT)), **dict.fromkeys(("overrides", "over"), Optional([str])), ANY: ANY}
    ),
    "steps": Optional({ANY: _STEP}),
    **dict.fromkeys(("executor", "job", "host", "version"), Optional(TEXT)),
    **dict.fromkeys(("pid", "attempts"), Optional(COUNT)),
    "forced": Optional({ANY: str}),
    "error": Optional((None, _ERROR)),
    **dict.fromkeys(("created", "updated"), Optional(TIME)),
}
JOB_NAME = re.compile(r"[^-\s\x00-\x1f][^\x00-\x1f]{0,500}")
"""What an executor may call a job. It is handed to programs as an argument: it must not be taken for an option."""


class Secrets(Redactor):
    """What must not be written down: the values of secret keys anywhere in configs, requests and overrides, as in
    `{"api_key": "x"}`, `"a.api_key=x"`, `["--api-key", "x"]`."""

    def __init__(self, *sources: Any) -> None:
        super().__init__(os.environ, secrets_in(sources))


class RunFolder:
    """One run's folder on this machine, written by the process that works on the run."""

    def __init__(self, store: ArtifactStore, run_id: str) -> None:
        self.id = run_id
        self._store = store
        if not is_run_id(run_id):
            raise UnknownNameError("this cannot name a run", found=run_id, hints=("steps runs",))
        self.path = store.backend.local(f"runs/{run_id}")
        self.lock = self.path / "lock"
        self.submit_lock = self.path / "submit.lock"

    def create(self, name: str, request: Mapping[str, Any], *, executor: str = "local") -> RunInfo:
        """Make the folder, with a run.json in state `submitted`. StorageError where nothing can be written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what, hints = "the home cannot be written", ("--home DIR", "export STEPS_HOME=DIR")
            raise StorageError(what, where=str(self.path), found=error.strerror, hints=hints) from error
        asked = Secrets(request).mask(plain(request))
        return self.update(RunInfo(self.id, name, SUBMITTED, asked, executor=executor, created=time.time()))

    def load(self) -> RunInfo | None:
        """What run.json says, None if there is no such run on this machine."""
        file = self.path / RUN_FILE
        try:
            return _parse(file.read_bytes(), self.id, str(file))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def update(self, info: RunInfo, **changes: Any) -> RunInfo:
        """Write run.json with some fields changed and return the new state."""
        info = replace(info, **changes, updated=time.time())
        write_atomic(self.path / RUN_FILE, to_json_bytes(plain(info.to_dict())))
        return info

    def publish(self) -> None:
        """Copy the folder to a home that is elsewhere; nothing to do for a local one."""
        self._store.backend.upload(self.path, f"runs/{self.id}")


def list_runs(store: ArtifactStore) -> list[RunInfo]:
    """Every run of the home, oldest first, with the state it is really in. One with a broken run.json is left out,
    with a warning."""
    here = store.backend.local("runs").glob(f"*/{RUN_FILE}")
    names = {*store.backend.names("runs"), *(file.parent.name for file in here)}
    found = []
    for name in filter(is_run_id, names):
        try:
            info = _load(store, name)
        except ArtifactError as error:
            logger.warning("run %s cannot be read: %s (%s)", name, error.what, error.where)
            continue
        if info is not None:
            found.append(info)
    return sorted(found, key=lambda info: (info.created, info.id))


def get_run(store: ArtifactStore, run_id: str) -> RunInfo:
    """One run by its id or the one that begins so, `latest`, its name (the newest of that name), or a unique part of
    its id. UnknownNameError with near ids otherwise."""
    exact = _load(store, run_id) if is_run_id(run_id) else None
    if exact is not None:
        return exact
    runs = list_runs(store)
    if not runs:
        raise UnknownNameError(
            "there is no run yet",
            where=f"{store.backend.url}/runs",
            found=run_id,
            hints=("steps run data_prep/rl_prep -c tiny   # makes one, in seconds", "steps list"),
        )
    if run_id == "latest":
        return runs[-1]
    matching = [info for info in runs if run_id and run_id in info.id]
    begins = [info for info in matching if info.id.startswith(run_id)]
    named = [info for info in runs if run_id and info.given_name == run_id][-1:]
    for found in (begins, named, matching):
        if len(found) == 1:
            return found[0]
    known = [name for info in runs for name in (info.id, info.given_name) if name]
    close = [info.id for info in matching] or get_close_matches(run_id, known, n=1, cutoff=0.5)
    raise UnknownNameError(
        f"no run is called '{run_id}'" if not matching else f"'{run_id}' is part of {len(matching)} run ids",
        where=f"{store.backend.url}/runs",
        expected=" or ".join(info.id for info in (matching or runs)[-3:]),
        found=run_id,
        hints=(*did_you_mean(close[-3:]), "steps runs"),
    )


def called(info: RunInfo, runs: Sequence[RunInfo]) -> str:
    """What a list of `runs`, the newest last, calls one of them: its name, else what of its id no other id has; both
    where a newer run has its name."""
    short = re.sub(r"^\d{8}-\d{6}-", "", info.id)
    short = short if sum(short in other.id for other in runs) == 1 else info.id
    newest = {other.given_name: other.id for other in runs}.get(info.given_name)
    return short if not info.given_name else info.given_name + (f" ({short})" if newest != info.id else "")


def run_file(store: ArtifactStore, run_id: str, name: str) -> Path:
    """A local copy of one file of a run (`log.txt`, `report.html`, `metrics.jsonl`, ...)."""
    info = get_run(store, run_id)
    path = store.backend.local(f"runs/{info.id}/{name}")
    if not path.is_file():
        data = store.backend.read(f"runs/{info.id}/{name}")
        if data is None:
            raise UnknownNameError(
                f"run '{info.id}' has no {name} yet", where=str(path), hints=(f"steps status {info.id}",)
            )
        write_atomic(path, data)
    return path


def read_events(store: ArtifactStore, run_id: str, name: str = "events") -> list[dict[str, Any]]:
    """The records of a run's events.jsonl (or metrics, samples). A line cut off by a kill is left out."""
    try:
        return parse_lines(run_file(store, run_id, f"{name}.jsonl").read_bytes().split(b"\n"))
    except UnknownNameError:
        return []


def keys_of(store: ArtifactStore, run_id: str, cache_key: str | None) -> list[str]:
    """The keys that a step with this cache key had in a run; none in one that is gone."""
    try:
        steps = get_run(store, run_id).steps
    except UnknownNameError:
        return []
    return [key for key, step in steps.items() if step.get("cache_key") == cache_key]


def parse_lines(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """JSON records of lines; one that a kill cut off is left out."""
    records = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def this_process() -> dict[str, Any]:
    """The fields of run.json that say who works on a run."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "version": __version__}


def refuse_busy(run_id: str, holder: Mapping[str, Any], what: str = "still being worked on") -> None:
    """RequestError for a run that another process has; `holder`: its `pid` and `host`."""
    raise RequestError(
        f"run '{run_id}' is {what}",
        found=f"process {holder.get('pid', '?')} on {holder.get('host', '?')}",
        hints=(f"steps watch {run_id}", f"steps logs {run_id} -f", f"steps cancel {run_id}"),
    )


def _load(store: ArtifactStore, run_id: str) -> RunInfo | None:
    folder = RunFolder(store, run_id)
    info = folder.load()
    if info is None:
        data = store.backend.read(f"runs/{run_id}/{RUN_FILE}")
        info = _parse(data, run_id, f"{store.backend.url}/runs/{run_id}/{RUN_FILE}") if data is not None else None
    if info is None:
        return None
    note = folder.path / JOB_FILE
    with suppress(FileNotFoundError):  # nobody's job, or forgotten just now
        job = json_object(note.read_bytes(), str(note))
        require_shape(job, {"executor": TEXT, "job": JOB_NAME, ANY: ANY}, str(note), hints=())
        info = replace(info, executor=job["executor"], job=job["job"])
    abandoned = info.status == SUBMITTED and not info.job and not is_held(folder.submit_lock)
    # A process on another machine cannot be seen from here; a shared file system shows its lock.
    abandoned = abandoned or (info.status == RUNNING and info.host == socket.gethostname())
    return replace(info, status=KILLED) if abandoned and not is_held(folder.lock) else info


def _parse(data: bytes, run_id: str, where: str) -> RunInfo:
    """The content of a run.json. ArtifactError if it is not one, or not that run's."""
    known = {each.name for each in fields(RunInfo)}
    record = {key: value for key, value in json_object(data, where).items() if key in known}
    require_shape(record, {"id": re.compile(re.escape(run_id)), **_RUN}, where, hints=())
    return RunInfo(**record)
