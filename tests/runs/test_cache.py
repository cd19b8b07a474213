"""What counts as done: a record under the step's key whose artifacts are those that were made under it."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.artifacts.records import sealed
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.manifest.models import Consumes, StepManifest
from nemotron_steps.resolver.plan import PlannedStep
from nemotron_steps.runs import cache
from nemotron_steps.runs.cache import recall, verify_entries, with_cached
from nemotron_steps.runs.cache_key import cache_key
from tests.runs.runner_toy_plan import TRAIN, make_plan, run


def entries(store: ArtifactStore) -> list[Path]:
    return sorted((store.backend.scratch / "artifacts/steps").iterdir())


def entry_of(store: ArtifactStore, port: str) -> Path:
    return next(path for path in entries(store) if port in json.loads(path.read_bytes())["outputs"])


def rewrite(path: Path, **changes: Any) -> None:
    record = {key: value for key, value in json.loads(path.read_bytes()).items() if key != "checksum"}
    path.write_bytes(sealed(record | changes))


def test_what_is_recorded_is_recalled(store: ArtifactStore) -> None:
    result = run(store)
    for path in entries(store):
        entry = recall(store, path.stem)
        assert entry is not None and entry.run == result.id
    assert list(verify_entries(store)) == []
    assert recall(store, "0" * 32) is None


@pytest.mark.parametrize("change", ["another digest", "another port's artifact", "another step's artifact"])
def test_a_record_that_names_another_artifact_is_not_used(
    store: ArtifactStore, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    run(store)
    path = entry_of(store, "model")
    outputs = json.loads(path.read_bytes())["outputs"]
    if change == "another digest":
        outputs["model"]["digest"] = outputs["report"]["digest"]
    elif change == "another port's artifact":
        outputs["model"] = outputs["report"]
    else:
        outputs["model"] = json.loads(entry_of(store, "rows").read_bytes())["outputs"]["rows"]
    rewrite(path, outputs=outputs)
    with caplog.at_level(logging.WARNING):
        assert recall(store, path.stem) is None
    assert "is not used" in caplog.text
    assert [found.ref for found in verify_entries(store)] == [f"artifacts/steps/{path.name}"]
    again = run(store)
    assert [step.state for step in again.steps] == ["cached", "ran"]
    assert list(verify_entries(store)) == []


def test_an_artifact_that_is_gone_is_made_again(store: ArtifactStore) -> None:
    run(store)
    digest = json.loads(entry_of(store, "model").read_bytes())["outputs"]["model"]["digest"]
    (store.backend.scratch / f"artifacts/objects/{digest}/artifact.json").unlink()
    assert recall(store, entry_of(store, "model").stem) is None
    assert list(verify_entries(store)) == []  # gone is not corrupt


def rows_of(store: ArtifactStore, tmp_path: Path) -> dict[str, Artifact]:
    (tmp_path / "mine.jsonl").write_text('{"value": 3}\n')
    return {"rows": store.open(store.reference(tmp_path / "mine.jsonl"))}


def key_of(changes: dict[str, Any], inputs: dict[str, Artifact] | None = None, **fields: Any) -> str:
    """The key of toy/train with some of its config changed."""
    step: PlannedStep = make_plan(train=changes).steps[1]
    return cache_key(replace(step, **fields), inputs or {})


def test_a_key_depends_on_the_function_and_on_what_a_step_makes() -> None:
    other = TRAIN.model_copy(update={"step": TRAIN.step.model_copy(update={"entry": f"{TRAIN.step.entry}_again"})})
    adapter = {"model": "toy_adapter", "report": "eval_report"}
    assert len({key_of({}), key_of({}, manifest=other), key_of({}, produces=adapter)}) == 3


def test_no_credential_is_part_of_a_key_however_deep_it_is() -> None:
    def key(secret: str, model: str = "m") -> str:
        return key_of({"judge": {"server": {"api_key": secret, "model": model}}})

    assert key("a-credential") == key("another-one") != key("another-one", "other")


def test_a_path_that_an_input_takes_the_place_of_is_no_part_of_a_key(store: ArtifactStore, tmp_path: Path) -> None:
    inputs = rows_of(store, tmp_path)
    assert key_of({"data_path": "a.jsonl"}, inputs) == key_of({"data_path": "b.jsonl"}, inputs)
    assert key_of({"data_path": "a.jsonl"}) != key_of({"data_path": "b.jsonl"})


def test_a_model_that_is_not_here_is_not_fetched_to_see_what_is_cached(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(store)
    asked: list[bool] = []

    def download(name: str, *, local_files_only: bool, **_: Any) -> str:
        asked.append(local_files_only)
        raise LocalEntryNotFoundError("not here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(cache, "depends_on", lambda *_: pytest.fail("a key without one of the inputs"))
    port = Consumes(type="checkpoint_hf", name="rows")
    plan = make_plan(rows="org/model")
    manifest = StepManifest(step=TRAIN.step, consumes=(port,), produces=TRAIN.produces)
    plan = replace(plan, steps=(replace(plan.steps[0], manifest=manifest),))
    assert with_cached(plan, store).steps[0].cached is None
    assert asked == [True]
