"""What somebody who can write to a shared home may do to its records, and a watch over what readers then touch."""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.integrity import verify_home
from nemotron_steps.artifacts.lineage import lineage
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.artifacts.records import CHECKSUM
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import StepsError
from nemotron_steps.runs.cache import recall, verify_entries
from nemotron_steps.runs.context import OutputSlot
from nemotron_steps.runs.report.data import read_report
from nemotron_steps.runs.run_folder import get_run, list_runs, read_events, run_file
from nemotron_steps.runs.step_workdir import WorkFolder
from tests.runs.runner_toy_plan import run

KEY = "0123456789abcdef" * 2
"""A work folder whose step was killed before it committed."""
_EVENTS = ("open", "os.listdir", "os.scandir", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.chmod")
_touched: list[str] | None = None


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if _touched is not None and event in _EVENTS:
        # Two paths for a rename or a link; descriptors and modes are no paths.
        _touched.extend(os.fsdecode(each) for each in arguments[:2] if isinstance(each, str | bytes | os.PathLike))


sys.addaudithook(_hear)


@contextmanager
def watched() -> Iterator[list[str]]:
    """Every path that this process opens, lists, makes, moves or deletes meanwhile, as it was named."""
    global _touched
    _touched = []
    try:
        yield _touched
    finally:
        _touched = None


def outside(touched: list[str], place: Path, allowed: list[Path]) -> list[str]:
    """The paths below `place` that are not below one of the allowed folders, and the canaries beyond it."""
    real = {os.path.realpath(path) for path in set(touched) if path.startswith("/") or ".." in path}
    roots = tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in allowed)
    below = f"{os.path.realpath(place)}{os.sep}"
    return sorted(p for p in real if (p.startswith(below) and not f"{p}/".startswith(roots)) or p == "/etc/passwd")


def fill(store: ArtifactStore, place: Path) -> None:
    """A home with everything in it: a finished run, a user's folder used in place, an added file, a filled step.

    `place/mine` is the user's folder; `place/canary.txt` and `place/outside/train.jsonl` belong to nobody's home.
    """
    for name in ("canary.txt", "outside/train.jsonl", "mine/train.jsonl"):
        file = place / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"value": len(name)}) + "\n")
    run(store, train={"steps": 2}, make={"rows": 3})
    run(store, train={"steps": 2}, make={"rows": 3})  # all of it cached
    second = run(store, rows=place / "mine", train={"steps": 2})
    store.add(place / "mine/train.jsonl", name="mine/added")
    (second.folder / "job.json").write_text(json.dumps({"executor": "local", "job": "999999@1", "submitted": 1.0}))
    work = WorkFolder(store.backend.local("work"), KEY)
    slots = work.prepare({"model": "toy_model"})
    (slots["model"].path / "weights").write_text("x")
    work.mark_filled(slots, {}, 1.0)
    second_files = second.folder
    store.backend.upload(second_files, f"runs/{second.id}")


def use_everything(store: ArtifactStore, place: Path) -> list[str]:
    """Read, list, verify, commit and report all that a home holds; what `steps artifacts verify` would complain of.

    Anything but an error of this package, which says what is wrong, is raised.
    """
    # Before anything is committed, which repairs what it finds broken.
    verified = [*verify_home(store), *verify_entries(store)]
    artifacts = store.list_artifacts()
    for artifact in artifacts:
        with suppress(StepsError):
            store.open(artifact).jsonl()
    for artifact in artifacts[-1:]:
        for use in (lambda a: lineage(store, a), lambda a: store.find(a.digest)):
            with suppress(StepsError):
                use(artifact)
    for name in store.names():
        with suppress(StepsError):
            store.find(name)
    for name in store.backend.names("artifacts/steps"):
        recall(store, name.removesuffix(".json"))
    for info in list_runs(store):
        with suppress(StepsError):
            get_run(store, info.id)
            read_events(store, info.id, "metrics")
            read_report(run_file(store, info.id, "run.json").parent, store)
    with suppress(StepsError):
        filled = WorkFolder(store.backend.local("work"), KEY).filled({"model": "toy_model"})
        if filled is not None:
            _commit(store, filled[0])
    with suppress(StepsError):
        store.add(place / "mine/train.jsonl", name="mine/added")
    return [problem.render() for each in verified for problem in each.problems]


def _commit(store: ArtifactStore, slots: dict[str, OutputSlot]) -> list[Artifact]:
    return [store.commit(slot.path, slot.type, name=f"killed/{port}") for port, slot in slots.items()]


def is_record(path: str) -> bool:
    """Whether a file of a home is a record: not an artifact's own content."""
    parts = path.split("/")
    content = parts[:2] == ["artifacts", "objects"] and parts[-1] != "artifact.json"
    return (path.endswith((".json", ".jsonl")) and not content and parts[0] != "work") or parts[-1] == "filled.json"


def fields(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The address of every field of a record, sections included."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*at, key)
        yield from fields(inner, (*at, key))


def changed(record: Any, at: tuple[Any, ...], value: Any) -> Any:
    """A copy of a record with one field changed; DROPPED deletes it."""
    copy = json.loads(json.dumps(record))
    node = copy
    for key in at[:-1]:
        node = node[key]
    if value is DROPPED:
        del node[at[-1]]
    else:
        node[at[-1]] = value
    return copy


DROPPED = object()


def written(record: Any, *, resealed: bool) -> bytes:
    """The bytes of a changed record; resealed, by somebody who computes the checksum anew."""
    if resealed and isinstance(record, dict) and CHECKSUM in record:
        rest = {key: value for key, value in record.items() if key != CHECKSUM}
        text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
        record = {**rest, CHECKSUM: "sha256:" + hashlib.sha256(text.encode()).hexdigest()}
    return json.dumps(record).encode()


def nasty(place: Path) -> list[Any]:
    """Values that a field may be given: ways out of the home, and what no field may be."""
    ways = ["../" * depth + "canary.txt" for depth in range(1, 7)]
    return [
        *ways,
        *(way.removesuffix("canary.txt") + "outside" for way in ways),
        *(way.removesuffix("canary.txt") + "outside/train.jsonl" for way in ways),
        str(place / "canary.txt"),
        str(place / "outside"),
        "/etc/passwd",
        "..",
        "a/../../../../outside/train.jsonl",
        "x\x00y",
        "a" * 300,
        "\udcff",
        "--help",
        "",
        None,
        True,
        -1,
        10**400,
        0.5,
        [],
        {},
        ["../canary.txt"],
        {"../../outside": "../../outside"},
        DROPPED,
    ]
