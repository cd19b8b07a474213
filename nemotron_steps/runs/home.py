"""What a home on this machine holds, and what of it nothing needs any more.

What is deleted gets a hidden name first: a kill in the middle leaves only what the next `steps gc` frees.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from nemotron_steps.artifacts.backend import FsspecBackend
from nemotron_steps.artifacts.files import is_digest, remove_tree, renamed_aside, set_aside
from nemotron_steps.artifacts.integrity import OBJECTS, REFERENCES
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ArtifactError, RequestError
from nemotron_steps.runs.cache import KEY, RECEIPTS, recall
from nemotron_steps.runs.locks import hold_if_free, is_held, read_holder
from nemotron_steps.runs.run_folder import DONE, RUNNING, SUBMITTED, RunFolder, RunInfo, list_runs
from nemotron_steps.runs.step_workdir import WorkFolder

ARTIFACT, RUN, WORK, GIVEN, LEFT, UNNAMED = "artifact", "run", "work folder", "given", "left", "unnamed"
FINISHED, UNFINISHED = "finished", "unfinished"
_DAY_S = 24 * 3600.0


@dataclass(frozen=True)
class Held:
    """One thing that a home holds. Versions of one content are at one path, whose bytes count once."""

    kind: str
    """ARTIFACT (a version), RUN, WORK, GIVEN (rows and functions of Python), LEFT by a killed command, or UNNAMED: what
    no version of an artifact leads to."""
    name: str
    path: Path
    size: int
    of: str = ""
    """An artifact's type; whether a run, or the runs of a work folder, are FINISHED or UNFINISHED."""
    until: float = 0.0
    """When a run was last at work, in Unix seconds."""


def survey(store: ArtifactStore) -> list[Held]:
    """All that a home holds. RequestError for one that is not a folder of this machine."""
    backend = store.backend
    if isinstance(backend, FsspecBackend):
        what = "what an object store holds is counted and deleted by its own tools"
        raise RequestError(what, where=backend.url, expected="a home in a folder", hints=("--home DIR",))
    size = cache(size_of)
    found, runs = [], list_runs(store)
    for _, record in store.records():
        if not isinstance(record, ArtifactError):
            found.append(Held(ARTIFACT, record.ref, place := _place(store, record), size(place), record.type))
    for run in runs:
        path, of = backend.local(f"runs/{run.id}"), FINISHED if run.status == DONE else UNFINISHED
        found.append(Held(RUN, run.id, path, size(path), of, run.updated))
    for key in filter(KEY.fullmatch, backend.names("work")):
        folder = WorkFolder(backend.local("work"), key)
        of = FINISHED if _is_over(store, folder, runs) and not is_held(folder.lock) else UNFINISHED
        found.append(Held(WORK, key, folder.path, size(folder.path), of))
    left = list(_left(store))
    rest = [(GIVEN, path) for path in sorted(backend.local("given").glob("*/*")) if path not in left]
    rest += [*((LEFT, path) for path in left), *((UNNAMED, path) for path in _unnamed(store))]
    return [*found, *(Held(kind, path.name, path, size(path)) for kind, path in rest)]


def size_of(path: Path) -> int:
    """Bytes of a file, or of the files below a folder; what goes away meanwhile counts nothing."""
    if path.is_dir() and not path.is_symlink():
        return sum(size_of(Path(here, name)) for here, _, names in os.walk(path) for name in names)
    with suppress(OSError):
        return path.lstat().st_size
    return 0


def to_free(store: ArtifactStore, *, days: float | None = None, artifacts: Sequence[str] = ()) -> list[Held]:
    """What nothing needs, and what is asked for: folders of runs that were done `days` ago, versions of `artifacts`.

    RequestError for a version that another one, or a run that is not finished, needs.
    """
    found, named = survey(store), _deletable(store, artifacts) if artifacts else {}
    needed = {held.path for held in found if held.kind == ARTIFACT and held.name not in named}
    wanted = [held for held in found if held.kind in (LEFT, UNNAMED) or (held.kind == WORK and held.of == FINISHED)]
    if days is not None:
        before = time.time() - days * _DAY_S
        runs = (held for held in found if held.kind == RUN and held.of == FINISHED and held.until <= before)
        wanted += [held for held in runs if not _has_checks(held.path)]
    versions = (held for held in found if held.kind == ARTIFACT and held.name in named)
    return wanted + [replace(held, size=0) if held.path in needed else held for held in versions]


def free(store: ArtifactStore, wanted: Sequence[Held]) -> list[Held]:
    """Delete what `to_free` found; returns what is gone, without what somebody began to use meanwhile."""
    if any(held.kind == LEFT for held in wanted):
        with store.staging():  # which deletes what killed processes left there
            pass
    gone = [held for held in wanted if held.kind in (LEFT, RUN, WORK) and _delete(store, held)]
    versions, places = [held for held in wanted if held.kind == ARTIFACT], {held.path for held in wanted}
    aside: list[Path] = []
    with store.naming(alone=True):  # nobody commits or names an object meanwhile
        for artifact in _deletable(store, [held.name for held in versions]).values() if versions else ():
            # First of all what says that its step is done: the next of its name may get the same version.
            if artifact.producer is not None and KEY.fullmatch(artifact.producer.cache_key):
                store.backend.local(f"{RECEIPTS}/{artifact.producer.cache_key}.json").unlink(missing_ok=True)
            store.forget(artifact)
        unnamed = places.intersection(_unnamed(store))
        for path in unnamed:
            store.backend.local(f"artifacts/verified/{path.stem}.json").unlink(missing_ok=True)
            path.unlink() if path.is_file() else aside.append(renamed_aside(path))
    for path in aside:
        remove_tree(path)
    return [*gone, *versions, *(held for held in wanted if held.kind == UNNAMED and held.path in unnamed)]


def _delete(store: ArtifactStore, held: Held) -> bool:
    """Delete a folder that no lock holds and that is still what it was found to be; whether it is gone."""
    if held.kind == LEFT:
        if held.path.parent != store.backend.local("artifacts/staging"):
            held.path.unlink() if held.path.is_file() else remove_tree(held.path)
        return not held.path.exists()
    folder = RunFolder(store, held.name) if held.kind == RUN else WorkFolder(store.backend.local("work"), held.name)
    if not folder.path.is_dir() or (isinstance(folder, RunFolder) and is_held(folder.submit_lock)):
        return False
    with hold_if_free(folder.lock) as is_free:
        if isinstance(folder, RunFolder):
            info = folder.load() if is_free else None
            is_over = info is not None and info.status == DONE
        else:
            is_over = is_free and _is_over(store, folder, list_runs(store))
        if is_over:
            set_aside(folder.path)
    return is_over


def _is_over(store: ArtifactStore, work: WorkFolder, runs: Sequence[RunInfo]) -> bool:
    """Whether no resume needs the work folder of a key: its result is recorded, or every run of it is done."""
    key, holder = work.key, read_holder(work.lock).get("run")
    if any(key in run.forced.values() for run in runs if run.status != DONE):  # it is being made once more
        return False
    of_key = (run for run in runs if run.id == holder or key in [s.get("cache_key") for s in run.steps.values()])
    return recall(store, key) is not None or {run.status for run in of_key} == {DONE}


def _has_checks(run: Path) -> bool:
    """Whether a run's stages have checks: where they are cached, those are held against its numbers."""
    with suppress(OSError):
        return '"checks"' in (run / "plan.json").read_text(encoding="utf-8")
    return False


def _left(store: ArtifactStore) -> Iterator[Path]:
    """What killed commands left: in staging; half deleted, or written; half exported, in the home or right here."""
    yield from store.abandoned()
    home = Path(store.backend.url)
    for folder in (home / OBJECTS, home / "runs", home / "work"):
        yield from (path for path in sorted(folder.glob("*")) if path.suffix in (".corrupt", ".partial"))
    # No lock tells whether somebody is at these.
    unlocked = [*home.glob("given/*/*.partial")]
    for folder in {home.resolve(), Path.cwd()}:
        unlocked += [path for path in folder.glob(".*.export-????????") if {p.name for p in path.glob("*")} <= {"tree"}]
    for path in sorted(unlocked):
        if time.time() - max(each.lstat().st_mtime for each in (path, *path.rglob("*"))) > _DAY_S:
            yield path


def _unnamed(store: ArtifactStore) -> list[Path]:
    """Objects, and records of artifacts used in place, that no version names; none while a version cannot be read."""
    records = [record for _, record in store.records()]
    if any(isinstance(record, ArtifactError) for record in records):
        return []
    named = {record.digest for record in records if isinstance(record, Artifact)}
    found = [store.backend.local(f"{at}/{name}") for at in (OBJECTS, REFERENCES) for name in store.backend.names(at)]
    return [path for path in found if is_digest(path.stem) and path.stem not in named]


def _place(store: ArtifactStore, artifact: Artifact) -> Path:
    """Where the home has an artifact: its object, or the record of a folder that is used in place."""
    place = store.backend.local(f"{OBJECTS}/{artifact.digest}")
    return place if place.is_dir() else store.backend.local(f"{REFERENCES}/{artifact.digest}.json")


def _deletable(store: ArtifactStore, refs: Sequence[str]) -> dict[str, Artifact]:
    """Versions by reference. RequestError where anything that stays was made from one, or needs it."""
    records: dict[str, Artifact] = {}
    for ref, record in store.records():
        if isinstance(record, ArtifactError):  # nobody knows what it was made from
            raise record
        records[ref] = record
    named = {artifact.ref: artifact for artifact in map(store.find, refs) if artifact.version}
    whole, below = dict(named), dict[str, str]()
    for parent in (order := list(named)):  # grows
        for ref, record in records.items():
            if ref not in whole and any(_is_of(edge.ref, edge.digest, parent, records) for edge in record.inputs):
                whole[ref], below[ref] = record, parent
                order.append(ref)
    if below:
        hint = f"steps gc {' '.join(f'--artifact {ref}' for ref in whole)}   # all of them"
        what = f"artifacts that stay were made from {', '.join(dict.fromkeys(below.values()))}"
        raise RequestError(what, where="--artifact", found=", ".join(below), hints=(hint,))
    for run in list_runs(store):
        uses = {ref for step in run.steps.values() for ref in step.get("outputs", {}).values()}
        uses |= set((run.request.get("inputs") or {}).values())
        works = run.status in (RUNNING, SUBMITTED)
        if works or (run.status != DONE and uses & named.keys()):
            what = f"run '{run.id}' {'works' if works else 'is not finished'}, and may need it"
            given_up = f"rm -r {RunFolder(store, run.id).path}   # if it is given up"
            hints = (f"steps watch {run.id}" if works else f"steps run --resume {run.id}", given_up)
            raise RequestError(what, where=f"--artifact {next(iter(named))}", found=run.status, hints=hints)
    return named


def _is_of(ref: str, digest: str, parent: str, records: dict[str, Artifact]) -> bool:
    """Whether an edge leads to the version `parent`; one whose version is not here leads to all of its content."""
    known = ref in records and records[ref].digest == digest
    return ref == parent if known else records[parent].digest == digest
