"""Nothing that a home's records say makes a reader leave the home, and `verify` notices what was changed."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemotron_steps.artifacts.backend import Backend
from nemotron_steps.artifacts.models import FileRecord, tree_digest
from nemotron_steps.artifacts.records import sealed
from nemotron_steps.artifacts.store import ArtifactStore
from tests.runs.tampering import changed, fields, fill, is_record, nasty, outside, use_everything, watched, written
from tests.s3_server import home_on

examples = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


class Place:
    """A folder with a home in it, which can be put back as it was."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cache = root / "cache"
        self.make()
        self.kept = self.content()
        shutil.copytree(self.cache, root / "kept")
        self.records = sorted(path for path, data in self.kept.items() if is_record(path) and data)
        self.data = sorted(path for path in self.kept if path.startswith("artifacts/objects/") and not is_record(path))

    def make(self) -> None:
        self.home = self.root / "outer" / "home"
        fill(self.store(), self.root)

    def store(self) -> ArtifactStore:
        return ArtifactStore(Backend(self.home, self.cache))

    def content(self) -> dict[str, bytes]:
        return {str(p.relative_to(self.home)): p.read_bytes() for p in self.home.rglob("*") if p.is_file()}

    def write(self, path: str, data: bytes) -> None:
        file = self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            file.chmod(0o644)
        file.write_bytes(data)

    def remove(self, path: str) -> None:
        (self.home / path).unlink()

    def digests(self) -> dict[str, str]:
        return {path: _digest(data) for path, data in self.content().items()}

    def restore(self) -> None:
        now = self.digests()
        for path in now.keys() - self.kept.keys():
            self.remove(path)
        for path, data in self.kept.items():
            if now.get(path) != _digest(data):
                self.write(path, data)
        shutil.rmtree(self.cache)
        shutil.copytree(self.root / "kept", self.cache)

    def parsed(self, record: str) -> Any:
        data = self.kept[record]
        return [json.loads(line) for line in data.splitlines()] if record.endswith(".jsonl") else json.loads(data)

    def tamper(self, record: str, after: Any, *, resealed: bool) -> None:
        lines = after if record.endswith(".jsonl") else [after]
        self.write(record, b"\n".join(written(line, resealed=resealed) for line in lines))

    def use(self) -> list[str]:
        """Use everything; what verify says. Fails if anything outside the home was touched."""
        with watched() as touched:
            problems = use_everything(self.store(), self.root)
        assert outside(touched, self.root, [self.root / "outer/home", self.cache, self.root / "mine"]) == []
        return problems


class S3Place(Place):
    """The same on S3; the cache holds nothing but what the user registered, as on another machine."""

    def __init__(self, root: Path, url: str) -> None:
        import s3fs

        self.url = url
        self.prefix = url.removeprefix("s3://") + "/"
        self.fs = s3fs.S3FileSystem()
        super().__init__(root)

    def make(self) -> None:
        fill(self.store(), self.root)
        for folder in self.cache.iterdir():
            if folder.name != "imports":
                shutil.rmtree(folder)
        for name in ("canary.txt", "outside/train.jsonl"):
            self.fs.pipe_file(self.prefix.replace("/home/", f"/{name}"), b'{"value": 1}\n')

    def store(self) -> ArtifactStore:
        from nemotron_steps.artifacts.backend import FsspecBackend

        return ArtifactStore(FsspecBackend(self.url, self.cache))

    def content(self) -> dict[str, bytes]:
        self.fs.invalidate_cache()
        found = self.fs.cat(self.fs.find(self.prefix))
        return {path.removeprefix(self.prefix): data for path, data in found.items()}

    def digests(self) -> dict[str, str]:
        """What S3 lists beside each name, so that nothing is read."""
        self.fs.invalidate_cache()
        found = self.fs.find(self.prefix, detail=True)
        return {path.removeprefix(self.prefix): info["ETag"].strip('"') for path, info in found.items()}

    def write(self, path: str, data: bytes) -> None:
        self.fs.pipe_file(self.prefix + path, data)

    def remove(self, path: str) -> None:
        self.fs.rm_file(self.prefix + path)

    def use(self) -> list[str]:
        store = self.store()
        filesystem = store.backend._fs  # type: ignore[attr-defined]
        asked: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            for name in ("cat_file", "pipe_file", "get_file", "put_file", "find", "ls", "open", "rm_file"):
                patch.setattr(filesystem, name, _heard(getattr(filesystem, name), asked, at=int(name == "put_file")))
            with watched() as touched:
                problems = use_everything(store, self.root)
        assert outside(touched, self.root, [self.cache, self.root / "mine"]) == []
        assert len(asked) > 20
        assert [path for path in asked if not path.startswith(self.prefix) or ".." in path.split("/")] == []
        return problems


def _digest(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


def _heard(method: Callable[..., Any], asked: list[str], at: int) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        asked.append(arguments[at])
        return method(*arguments, **options)

    return call


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    """Nothing is durable here, and nobody reads the warnings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        logging.disable(logging.WARNING)
        yield
        logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("local"))


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory, s3_endpoint: str) -> Iterator[Place]:
    with pytest.MonkeyPatch.context() as patch:
        yield S3Place(tmp_path_factory.mktemp("remote"), home_on(s3_endpoint, patch, "tampered"))


@pytest.fixture(params=["local", "remote"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    place: Place = request.getfixturevalue(request.param)
    yield place
    place.restore()


def test_an_untouched_home_is_whole_and_has_every_kind_of_record(place: Place) -> None:
    assert place.use() == []
    kinds = {"/".join(record.split("/")[:2]) for record in place.records}
    assert {"artifacts/objects", "artifacts/names", "artifacts/references", "artifacts/steps"} < kinds
    assert {record.rsplit("/", 1)[-1] for record in place.records} > {"run.json", "plan.json", "job.json"}


def test_the_watch_sees_a_reader_that_leaves(local: Place) -> None:
    with watched() as touched:
        (local.home / "artifacts" / "../../../canary.txt").read_bytes()
        os.listdir(local.root / "outside")
    assert outside(touched, local.root, [local.home]) == [str(local.root / "canary.txt"), str(local.root / "outside")]


def tampered_field(place: Place, data: st.DataObject) -> None:
    record = data.draw(st.sampled_from(place.records), "record")
    before = place.parsed(record)
    at = data.draw(st.sampled_from(list(fields(before))), "field")
    value = data.draw(st.sampled_from(nasty(place.root)), "value")
    resealed = data.draw(st.booleans(), "resealed")
    after = changed(before, at, value)
    try:
        place.tamper(record, after, resealed=resealed)
        problems = place.use()
        kept_for_good = record.split("/")[0] == "artifacts" and not record.startswith("artifacts/verified")
        if kept_for_good and after != before and not resealed:
            assert problems, "the change was not noticed"
    finally:
        place.restore()


@settings(max_examples=100, **examples)
@given(data=st.data())
def test_no_field_of_a_local_record_leads_out_of_the_home(local: Place, data: st.DataObject) -> None:
    tampered_field(local, data)


@pytest.mark.slow
@settings(max_examples=6, **examples)
@given(data=st.data())
def test_no_field_of_a_record_on_s3_leads_out_of_the_home(remote: Place, data: st.DataObject) -> None:
    tampered_field(remote, data)


def test_no_text_of_any_kind_of_record_is_followed_upwards(local: Place) -> None:
    """Each field of one record of a kind, with the checksum made anew: what chance may not draw."""
    kinds = {
        ("/".join(r.split("/")[:2]) if r.startswith("artifacts") else r.rsplit("/", 1)[-1]): r for r in local.records
    }
    for record in (each for each in kinds.values() if not each.endswith(".jsonl")):
        for at in fields(local.parsed(record)):
            local.tamper(
                record, changed(local.parsed(record), at, "../" * len(record.split("/")) + "outside"), resealed=True
            )
            local.use()
        local.restore()


def test_every_change_of_content_is_noticed(place: Place) -> None:
    """Bits flipped, files cut, emptied, lengthened, swapped, deleted and added; records swapped and overwritten."""
    changes: list[dict[str, bytes | None]] = []
    for path in place.data:
        data = place.kept[path]
        other = next(place.kept[each] for each in place.data if place.kept[each] != data)
        flipped = bytes([data[0] ^ 1]) + data[1:]
        changes += [{path: new} for new in (flipped, data[:-1], b"", data + b"\n", other, None)]
        changes.append({f"{path}.added": b"x"})
    for folder in ("objects", "names", "references", "steps"):
        records = [record for record in place.records if record.startswith(f"artifacts/{folder}/")]
        changes += [{record: data} for record in records[:2] for data in (b"", b"{}", b"\xff\x00", b"[" * 100_000)]
        changes += [{a: place.kept[b], b: place.kept[a]} for a, b in pairwise(records)]
    if isinstance(place, S3Place):
        changes = changes[::16]
    for change in changes:
        for path, data in change.items():
            if data is None:
                place.remove(path)
            else:
                place.write(path, data)
        assert place.use() != [], f"{sorted(change)} was not noticed"
        place.restore()


def test_a_cached_step_is_not_reported_with_curves_from_elsewhere(local: Place) -> None:
    reports = [
        record for record in local.records if record.endswith("events.jsonl") and b"made_by" in local.kept[record]
    ]
    assert reports
    (local.root / "outside" / "metrics.jsonl").write_text("{}\n")
    for record in reports:
        after = [
            {**event, "made_by": "../../../outside"} if "made_by" in event else event for event in local.parsed(record)
        ]
        local.tamper(record, after, resealed=False)
    local.use()
    local.restore()


def crafted(path: str, content: bytes, **more: Any) -> tuple[str, bytes]:
    """(digest, record) of an artifact that contradicts itself nowhere, as somebody would write it by hand."""
    files = [{"path": path, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}]
    digest = tree_digest("training_jsonl", [FileRecord(**file) for file in files])
    record = {
        "format": 2,
        "type": "training_jsonl",
        "digest": digest,
        "name": "crafted",
        "version": 0,
        "attributes": {},
    }
    record |= {"files": files, "producer": None, "inputs": [], "created": 1.0, "source": "", "location": ""}
    return digest, sealed(record | more)


@pytest.mark.parametrize("path", ["../../../../../outside/train.jsonl", "../../../outside/train.jsonl", "ABSOLUTE"])
def test_a_consistent_record_of_files_elsewhere_is_refused(place: Place, path: str) -> None:
    target = str(place.root / "outside/train.jsonl") if path == "ABSOLUTE" else path
    content = (place.root / "outside/train.jsonl").read_bytes()
    digest, record = crafted(target, content)
    place.write(f"artifacts/objects/{digest}/artifact.json", record)
    place.write("artifacts/names/crafted/v1.json", crafted(target, content, version=1)[1])
    assert any("leaves its folder" in problem for problem in place.use())


def test_a_folder_that_this_user_never_supplied_is_not_read(place: Place) -> None:
    content = (place.root / "outside/train.jsonl").read_bytes()
    location = str(place.root / "outside")
    digest, record = crafted("train.jsonl", content, location=location)
    place.write(f"artifacts/references/{digest}.json", record)
    place.write("artifacts/names/crafted/v1.json", crafted("train.jsonl", content, location=location, version=1)[1])
    assert any("never gave as an input" in problem for problem in place.use())


@pytest.mark.parametrize("link", ["artifacts/names/mine~added", "artifacts/objects", "artifacts/staging", "runs/gone"])
def test_a_link_inside_the_home_does_not_lead_out(local: Place, link: str) -> None:
    """Nothing is read, written or deleted behind it; deleting is what staging does with what it finds."""
    place = local.home / link
    if place.exists():
        shutil.move(place, local.root / "moved")
    target = local.root / "outside" / "more"
    target.mkdir(exist_ok=True)
    (target / "canary").write_text("x")
    place.symlink_to(local.root / "outside")
    try:
        with watched() as touched:
            try:
                use_everything(local.store(), local.root)
            except ValueError as error:
                assert "leads out" in str(error)
        assert (target / "canary").read_text() == "x"
        inside = f"{local.root / 'outside'}/"
        assert [p for p in map(os.path.realpath, touched) if p.startswith(inside) or f"{p}/" == inside] == []
    finally:
        place.unlink()
        if (local.root / "moved").exists():
            shutil.move(local.root / "moved", place)
        local.restore()
