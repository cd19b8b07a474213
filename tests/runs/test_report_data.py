import json
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.runs.report.data import read_report


def run_folder(store: ArtifactStore, run_id: str, **files: list[dict[str, Any]]) -> Path:
    """A run of one step `a`, with these JSON Lines files."""
    folder = store.backend.local(f"runs/{run_id}")
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"id": run_id, "created": 100.0, "updated": 160.0}))
    (folder / "plan.json").write_text(json.dumps({"goals": ["a"], "steps": [{"key": "a", "inputs": {}}]}))
    for name, records in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_a_step_that_ran_has_no_curves_of_another_run_and_a_cached_one_only_its_own(store: ArtifactStore) -> None:
    made = "20260102-030405-toy-0006"
    metrics = [{"step": step, "index": 1, "values": {"loss": at}} for at, step in enumerate("ab")]
    samples = [{"step": step, "sample": {"response": step}} for step in "aab"]
    run_folder(store, made, metrics=metrics, samples=samples)
    events = [{"kind": "step_cached", "step": "a", "made_by": made, "summary": None}]
    folder = run_folder(store, "20260102-030405-toy-0007", events=events)
    (step,) = read_report(folder, store).steps
    assert step.curves == {"loss": [(1.0, 0.0)]}
    assert [sample["response"] for sample in step.samples] == ["a", "a"], "not alike because they are not numbered"
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**info, "steps": {"a": {"state": "ran"}}}))
    (ran,) = read_report(folder, store).steps
    assert (ran.curves, ran.samples) == ({}, [])


def test_an_output_that_is_gone_hides_no_other(store: ArtifactStore, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"x": 1}\n')
    there = store.add(tmp_path / "rows.jsonl", name="rows").ref
    folder = run_folder(store, "20260102-030405-toy-0009")
    info = json.loads((folder / "run.json").read_text())
    outputs = {"lost": "lost:v1", "rows": there, "odd": "not a reference"}
    (folder / "run.json").write_text(json.dumps({**info, "steps": {"a": {"state": "ran", "outputs": outputs}}}))
    assert list(read_report(folder, store).artifacts) == [there]


def test_a_plan_that_was_cut_off_is_an_empty_one(store: ArtifactStore) -> None:
    folder = run_folder(store, "20260102-030405-toy-0010")
    (folder / "plan.json").write_text('{"goals": ["a"], "ste')
    report = read_report(folder, store)
    assert (report.steps, report.goals, report.attempts) == ([], [], 1)
