"""What a home on this machine holds, and what of it nothing needs any more.

What is deleted gets a hidden name first: a kill in the middle leaves only what the next `steps gc` frees.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from shlex import quote

from nemotron_steps.artifacts.backend import FsspecBackend
from nemotron_steps.artifacts.files import is_digest, remove_tree, renamed_aside
from nemotron_steps.artifacts.integrity import NAMES, OBJECTS, REFERENCES
from nemotron_steps.artifacts.lineage import lineage
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ArtifactError, RequestError
from nemotron_steps.runs.cache import KEY, RECEIPTS, recall
from nemotron_steps.runs.locks import hold_if_free, read_holder
from nemotron_steps.runs.run_folder import DONE, RUN_FILE, RUNNING, SUBMITTED, RunInfo, list_runs

ARTIFACT, RUN, WORK, GIVEN, LEFT, UNNAMED = "artifact", "run", "work folder", "given", "left", "unnamed"
"""A version; what a run wrote, and works in; rows and functions of Python; what a killed command left; objects that no
version leads to."""
FINISHED, UNFINISHED = "finished", "unfinished"
_DAY_S = 24 * 3600.0


@dataclass(frozen=True)
class Held:
    """One thing that a home holds. Versions of one content are at one path, whose bytes count once."""

    kind: str
    name: str
    path: Path
    size: int
    of: str = ""
    """An artifact's type; whether a run, or the runs of a work folder, are FINISHED or UNFINISHED."""


def survey(store: ArtifactStore) -> list[Held]:
    """All that a home holds. RequestError for one that is not a folder of this machine."""
    local = store.backend.local
    if isinstance(store.backend, FsspecBackend):
        what = "what an object store holds is counted and deleted by its own tools"
        raise RequestError(what, where=store.backend.url, expected="a home in a folder", hints=("--home DIR",))
    found, runs, size = [], list_runs(store), cache(size_of)
    for artifact in _versions(store)[0].values():
        objects = local(f"{OBJECTS}/{artifact.digest}")
        path = objects if objects.is_dir() else local(f"{REFERENCES}/{artifact.digest}.json")
        found.append(Held(ARTIFACT, artifact.ref, path, size(path), artifact.type))
    folders = [(RUN, run.id, local(f"runs/{run.id}")) for run in runs]
    folders += [(WORK, key, local(f"work/{key}")) for key in store.backend.names("work") if KEY.fullmatch(key)]
    for kind, name, path in folders:
        found.append(Held(kind, name, path, size(path), FINISHED if _is_over(store, kind, name, runs) else UNFINISHED))
    left, given = list(_left(store)), sorted(local("given").glob("*/*"))
    rest = [*((GIVEN, path) for path in given if path not in left), *((LEFT, path) for path in left)]
    rest += [(UNNAMED, path) for path in _unnamed(store)]
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
        for held in (held for held in found if held.kind == RUN and held.of == FINISHED):
            plan = held.path / "plan.json"  # where its stages are cached, their checks read its numbers
            checked = plan.is_file() and '"checks"' in plan.read_text(encoding="utf-8")
            wanted += [held] if not checked and (held.path / RUN_FILE).stat().st_mtime <= before else []
    versions = (held for held in found if held.kind == ARTIFACT and held.name in named)
    return wanted + [replace(held, size=0) if held.path in needed else held for held in versions]


def free(store: ArtifactStore, wanted: Sequence[Held]) -> list[Held]:
    """Delete what `to_free` found; returns what is gone, without what somebody began to use meanwhile."""
    with store.staging():  # which deletes what killed processes left there
        gone = [held for held in wanted if held.kind in (LEFT, RUN, WORK) and _delete(store, held)]
    versions = [held for held in wanted if held.kind == ARTIFACT]
    with store.naming(alone=True):  # nobody commits or names an object meanwhile
        for artifact in _deletable(store, [held.name for held in versions]).values() if versions else ():
            # First of all what says that its step is done: the next of its name may get the same version.
            if artifact.producer is not None and KEY.fullmatch(artifact.producer.cache_key):
                store.backend.local(f"{RECEIPTS}/{artifact.producer.cache_key}.json").unlink(missing_ok=True)
            record = store.backend.local(f"{NAMES}/{artifact.name.replace('/', '~')}/v{artifact.version}.json")
            record.unlink(missing_ok=True)
            with suppress(OSError):  # other versions
                record.parent.rmdir()
        unnamed = {held.path for held in wanted}.intersection(_unnamed(store))
        aside = [path if path.is_file() else renamed_aside(path) for path in unnamed]
    for path in aside:
        path.unlink() if path.is_file() else remove_tree(path)
    return [*gone, *versions, *(held for held in wanted if held.kind == UNNAMED and held.path in unnamed)]


def _delete(store: ArtifactStore, held: Held) -> bool:
    """Delete a folder that no lock holds and that is still what it was found to be; whether it is gone."""
    aside = held.path
    if held.kind != LEFT and held.path.is_dir():
        lock = held.path / "lock" if held.kind == RUN else held.path.with_name(f"{held.name}.lock")
        with hold_if_free(lock) as is_free:
            if not is_free or not _is_over(store, held.kind, held.name, list_runs(store)):
                return False
            aside = renamed_aside(held.path)
    if held.path.parent != store.backend.local("artifacts/staging"):
        aside.unlink() if aside.is_file() else remove_tree(aside)
    return not held.path.exists()


def _is_over(store: ArtifactStore, kind: str, name: str, runs: Sequence[RunInfo]) -> bool:
    """Whether no resume needs a folder: of a run that is done; of a key whose result is recorded, or its runs done."""
    if kind == RUN:
        return any(run.id == name and run.status == DONE for run in runs)
    if any(name in run.forced.values() for run in runs if run.status != DONE):  # it is made once more
        return False
    holder = read_holder(store.backend.local(f"work/{name}.lock")).get("run")
    of_key = (run for run in runs if run.id == holder or name in [s.get("cache_key") for s in run.steps.values()])
    return recall(store, name) is not None or {run.status for run in of_key} == {DONE}


def _left(store: ArtifactStore) -> Iterator[Path]:
    """What killed commands left: in staging, half deleted or written, half exported right here."""
    yield from store.abandoned()
    home = Path(store.backend.url)
    for folder in (home / OBJECTS, home / "runs", home / "work"):
        yield from (path for path in sorted(folder.glob("*")) if path.suffix in (".corrupt", ".partial"))
    folders = (path for path in Path.cwd().glob(".*.export-????????") if path.is_dir() and not path.is_symlink())
    copies = [path for path in folders if {each.name for each in path.iterdir()} == {"tree"}]
    for path in sorted([*copies, *home.glob("given/*/*.partial")]):
        if time.time() - path.lstat().st_mtime > _DAY_S:  # no lock tells whether somebody is at it
            yield path


def _unnamed(store: ArtifactStore) -> list[Path]:
    """Objects, and records of artifacts used in place, that no version names; none while a version cannot be read."""
    versions, broken = _versions(store)
    named = {artifact.digest for artifact in versions.values()}
    found = [store.backend.local(f"{at}/{name}") for at in (OBJECTS, REFERENCES) for name in store.backend.names(at)]
    return [path for path in found if not broken and is_digest(path.stem) and path.stem not in named]


def _versions(store: ArtifactStore) -> tuple[dict[str, Artifact], list[ArtifactError]]:
    """Every version by its reference, and the errors of those that cannot be read."""
    records = list(store.records())
    broken = [record for _, record in records if isinstance(record, ArtifactError)]
    return {ref: record for ref, record in records if isinstance(record, Artifact)}, broken


def _deletable(store: ArtifactStore, refs: Sequence[str]) -> Mapping[str, Artifact]:
    """Versions by reference. RequestError where anything that stays was made from one, or needs it."""
    for error in _versions(store)[1]:  # nobody knows what it was made from
        raise error
    named = {artifact.ref: artifact for artifact in map(store.find, refs)}
    below = dict.fromkeys(link.child for each in named.values() for link in lineage(store, each).descendants)
    if made := [ref for ref in below if ref not in named]:
        what, every = "newer artifacts were made from it", " ".join(f"--artifact {ref}" for ref in {**named, **below})
        where, hints = f"--artifact {' '.join(named)}", [f"steps gc {every}   # all of them"]
        raise RequestError(what, where=where, found=", ".join(made), hints=hints)
    for run in list_runs(store):
        uses = {*(run.request.get("inputs") or {}).values()}.union(
            *(s.get("outputs", {}).values() for s in run.steps.values())
        )
        if run.status in (RUNNING, SUBMITTED) or (run.status != DONE and uses & named.keys()):
            given_up = f"rm -r {quote(str(store.backend.local(f'runs/{run.id}')))}   # if it is given up"
            what, hints = f"run '{run.id}' is not over, and may need it", [f"steps status {run.id}", given_up]
            raise RequestError(what, where=f"--artifact {' '.join(named)}", found=run.status, hints=hints)
    return named
