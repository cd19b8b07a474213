"""What a user supplies for a port: a path, an artifact's name, or a model of the hub; and what its bindings fill."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ArtifactError, DataError
from nemotron_steps.manifest.models import Constraint, Consumes, StepManifest, StepTable
from nemotron_steps.manifest.typegraph import ArtifactType, TypeGraph
from nemotron_steps.runs.step_workdir import bound_values, check_inputs, name_users_files, open_input
from tests.artifacts.checkpoint_files import write_hf


def planned(type_name: str = "checkpoint_hf", overrides: tuple[str, ...] = (), **bindings: str) -> Any:
    port = SimpleNamespace(type=type_name, bindings=bindings)
    return SimpleNamespace(
        manifest=SimpleNamespace(inputs={"model": port}),
        key="toy/train",
        step_id="toy/train",
        overrides=overrides,
        config={"data": None, "steps": 3},
    )


def source(ref: str) -> Any:
    return SimpleNamespace(ref=ref, type="checkpoint_hf")


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: mit\n---\n", "mit"),
        ("---\nlicense: [mit, cc0-1.0]\n---\n", "mit, cc0-1.0"),
        ("---\nlicense: other\nlicense_name: of-nobody\n---\n", "of-nobody"),
        ("---\nlicense:\n---\n", None),
        ("---\n[\n---\n", None),
        ("# No front matter", None),
        (None, None),
    ],
)
def test_a_model_of_the_hub_is_used_in_place_under_its_name_with_the_licence_of_its_card(
    card: str | None, licence: str | None, store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot, asked = write_hf(tmp_path / ("0a" * 20)), []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cards = tmp_path / "nemotron_steps/cards/org/tiny-model" / snapshot.name
    cards.mkdir(parents=True)
    if card is not None:
        (cards / "README.md").write_text(card)

    def download(name: str, *, allow_patterns: list[str], local_files_only: bool) -> str:
        asked.append((name, local_files_only))
        assert "*.safetensors" in allow_patterns and not any("bin" in pattern for pattern in allow_patterns)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for fetch in (True, False):
        found = open_input(planned(), "model", source("org/tiny-model"), store, fetch=fetch)
        assert found is not None and found.path == snapshot and found.ref == "input/tiny-model:v1"
        assert found.attributes.get("license") == licence
        assert found.digest == store.reference(snapshot, name="same").digest
    assert asked == [("org/tiny-model", False), ("org/tiny-model", True)]


def test_the_card_of_a_model_is_asked_for_once(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"id": "org/model", "cardData": {"license": "mit"}}).encode())

    snapshot = write_hf(tmp_path / ("0a" * 20))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(snapshot))
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        found = [
            open_input(planned(), "model", source("org/model"), store, fetch=fetch) for fetch in (False, True, True)
        ]
        server.shutdown()
    assert [each and each.attributes.get("license") for each in found] == [None, "mit", "mit"]
    told = [path for path in asked if path.startswith("/api/models/")]
    assert told == [f"/api/models/org/model/revision/{snapshot.name}"]


def test_a_model_that_cannot_be_fetched_is_an_error_of_the_run_and_none_of_the_plan(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(name: str, **_: Any) -> str:
        raise LocalEntryNotFoundError("no such snapshot\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_input(planned(), "model", source("org/model"), store, fetch=False) is None
    with pytest.raises(ArtifactError, match="could not be fetched") as caught:
        open_input(planned(), "model", source("org/model"), store)
    assert (caught.value.where, caught.value.found) == (
        "toy/train.model",
        "LocalEntryNotFoundError: no such snapshot",
    )


def test_bindings_take_the_files_there_are_and_refuse_those_that_must_be(store: ArtifactStore, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text('{"x": 1}\n')
    (tmp_path / "rows" / "notes").write_text("x")
    artifact = store.open(store.reference(tmp_path / "rows", type_name="training_jsonl"))
    inputs, folder = {"model": artifact}, artifact.path

    def filled(*overrides: str, **bindings: str) -> dict[str, str]:
        return bound_values(planned("training_jsonl", overrides, **bindings), inputs)

    assert filled(a="", b="train.jsonl", c="validation.jsonl", d="notes", e="notes?", f="absent?") == {
        "a": str(folder),
        "b": str(folder / "train.jsonl"),
        "d": str(folder / "notes"),
        "e": str(folder / "notes"),
    }
    either = filled(a="heldout.jsonl|train.jsonl", b="train.jsonl|heldout.jsonl", c="validation.jsonl|heldout.jsonl")
    assert either == {"a": str(folder / "train.jsonl"), "b": str(folder / "train.jsonl")}
    # The first key names the artifact; of the others an override stays.
    assert filled("a=1", "+b=2", a="", b="train.jsonl", c="notes") == {"a": str(folder), "c": str(folder / "notes")}
    with pytest.raises(ArtifactError, match="has no 'absent'") as caught:
        filled(a="absent")
    assert caught.value.found == "notes, train.jsonl"
    (tmp_path / "others").mkdir()
    for split in ("validation", "heldout"):
        (tmp_path / "others" / f"{split}.jsonl").write_text('{"x": 1}\n')
    without = store.open(store.reference(tmp_path / "others", type_name="training_jsonl"))
    with pytest.raises(DataError):
        bound_values(planned("training_jsonl", a="train.jsonl"), {"model": without})
    with pytest.raises(DataError):
        bound_values(planned("training_jsonl", a="test.jsonl|train.jsonl"), {"model": without})
    assert bound_values(planned("training_jsonl", a="train.jsonl|test.jsonl"), {"model": without}) == {}
    first = bound_values(planned("training_jsonl", a="validation.jsonl|train.jsonl"), {"model": without})
    assert first == {"a": str(without.jsonl("validation"))}


def test_what_a_narrower_type_is_too_must_hold_of_a_path(store: ArtifactStore, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"x": 1}\n{"x": ')
    types, given = TypeGraph([ArtifactType("my_rows", is_a=("training_jsonl",))]), source(str(tmp_path / "mine.jsonl"))
    given.type = "my_rows"
    with pytest.raises(DataError, match="truncated"):
        open_input(planned("my_rows"), "model", given, store, types=types)
    assert open_input(planned("my_rows"), "model", given, store) is not None


def a_step(*ports: Consumes, constraints: tuple[Constraint, ...] = ()) -> Any:
    manifest = StepManifest(step=StepTable(id="toy/train"), consumes=ports, constraints=constraints)
    return SimpleNamespace(manifest=manifest, key="toy/train", step_id="toy/train")


def made(type_name: str, **attributes: Any) -> Artifact:
    return Artifact(type_name, "d", Path("/nowhere"), attributes, name=type_name, version=1)


def test_every_port_is_held_against_its_attributes_and_what_is_not_recorded_is_not_had() -> None:
    ports = tuple(Consumes(type="rows", name=name, attributes={"tokenizer": "a"}) for name in ("one", "two"))
    right = made("rows", tokenizer="a")
    check_inputs(a_step(*ports), {"one": right, "two": right}, TypeGraph())
    for wrong, found in ((made("rows", tokenizer="b"), "b"), (made("rows"), "not recorded")):
        with pytest.raises(ArtifactError, match="input 'two' has the wrong tokenizer") as caught:
            check_inputs(a_step(*ports), {"one": right, "two": wrong}, TypeGraph())
        assert caught.value.found == found


def test_inputs_that_must_agree_are_compared_as_far_as_they_say_something() -> None:
    ports = tuple(Consumes(type="rows", name=name, required=False) for name in "abc")
    same = Constraint(same=("a.tokenizer", "b.tokenizer", "c.tokenizer"))
    step = a_step(*ports, constraints=(same,))
    x, y, silent = made("rows", tokenizer="x"), made("rows", tokenizer="y"), made("rows")
    for fine in ({"a": x, "b": silent, "c": x}, {"a": x, "c": x}, {"a": silent, "b": y}, {}):
        check_inputs(step, fine, TypeGraph())
    for wrong in ({"a": x, "b": x, "c": y}, {"a": silent, "b": x, "c": y}):
        with pytest.raises(ArtifactError, match="must be the same") as caught:
            check_inputs(step, wrong, TypeGraph())
        assert (caught.value.expected or "").startswith("c.tokenizer = x") and caught.value.found == "c.tokenizer = y"


def test_an_error_names_the_users_own_file_as_long_as_it_is_the_same(store: ArtifactStore, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text('{"x": 1}\n')
    (tmp_path / "one.jsonl").write_text('{"x": 2}\n')
    used = store.open(store.reference(folder))
    copies = [store.add(path, type_name="training_jsonl", name=path.stem) for path in (folder, tmp_path / "one.jsonl")]

    def told() -> list[str | None]:
        one, rows = copies[1].jsonl("train"), copies[0].path / "validation.jsonl"
        hints = (f"rm {one}", "steps doctor")
        error = DataError(f"{rows} is no good", where=f"{one}:1", found=f"in {rows}", hints=hints)
        named = name_users_files(error, [used, *copies])
        return [named.what, named.where, named.expected, named.found, *named.hints]

    assert told() == [
        f"{folder}/validation.jsonl is no good",
        f"{tmp_path}/one.jsonl:1",
        None,
        f"in {folder}/validation.jsonl",
        f"rm {tmp_path}/one.jsonl",
        "steps doctor",
    ]
    (tmp_path / "one.jsonl").write_text('{"x": 3}\n')
    changed = told()
    assert changed[0] == f"{folder}/validation.jsonl is no good" and str(tmp_path / "one.jsonl") not in changed[1]
