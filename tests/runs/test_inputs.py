"""What a user supplies for a port: a path, an artifact's name, or a model of the hub; and what its bindings fill."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ArtifactError, DataError
from nemotron_steps.runs.inputs import bound_values, filled_config, open_input
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


def test_a_model_of_the_hub_is_used_in_place_under_its_name(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot, asked = write_hf(tmp_path / "snapshot"), []

    def download(name: str, *, allow_patterns: list[str], local_files_only: bool) -> str:
        asked.append((name, local_files_only))
        assert "*.safetensors" in allow_patterns and not any("bin" in pattern for pattern in allow_patterns)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for fetch in (True, False):
        found = open_input(planned(), "model", source("org/tiny-model"), store, fetch=fetch)
        assert found is not None and found.path == snapshot and found.name.endswith("tiny-model")
    assert asked == [("org/tiny-model", False), ("org/tiny-model", True)]


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


@pytest.mark.parametrize(("ref", "type_name"), [("org/rows", "training_jsonl"), ("no model name", "checkpoint_hf")])
def test_what_no_model_can_be_called_is_not_asked_of_the_hub(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, ref: str, type_name: str
) -> None:
    def download(name: str, **_: Any) -> str:
        raise AssertionError

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ArtifactError, match="neither a path nor an artifact") as caught:
        open_input(planned(type_name), "model", source(ref), store)
    assert caught.value.found == ref


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
    assert filled("a=1", "+b=2", a="", b="train.jsonl") == {"a": str(folder)}
    with pytest.raises(ArtifactError, match="has no 'absent'") as caught:
        filled(a="absent")
    assert caught.value.found == "notes, train.jsonl"
    (tmp_path / "others").mkdir()
    for split in ("validation", "heldout"):
        (tmp_path / "others" / f"{split}.jsonl").write_text('{"x": 1}\n')
    without = store.open(store.reference(tmp_path / "others", type_name="training_jsonl"))
    with pytest.raises(DataError):
        bound_values(planned("training_jsonl", a="train.jsonl"), {"model": without})
    first = bound_values(planned("training_jsonl", a="validation.jsonl|train.jsonl"), {"model": without})
    assert first == {"a": str(without.jsonl("validation"))}


def test_a_bound_key_is_filled_in_though_its_section_is_not_there(store: ArtifactStore, tmp_path: Path) -> None:
    artifact = store.open(store.reference(write_hf(tmp_path / "m")))
    step = planned(**{"data.train.path": ""})
    assert filled_config(step, {"model": artifact}) == {"data": {"train": {"path": str(artifact.path)}}, "steps": 3}
    assert step.config == {"data": None, "steps": 3}
