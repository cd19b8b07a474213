import json
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts.lineage import lineage
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import (
    ArtifactError,
    DataError,
    JudgeUnavailableError,
    NonFiniteLossError,
    StepFailedError,
)
from nemotron_steps.resolver.plan import Plan
from nemotron_steps.runs.execute import execute
from nemotron_steps.runs.run_folder import get_run, read_events
from tests.runs.runner_toy_plan import make_plan, run

Records = list[dict[str, Any]]


def kinds(records: Records) -> list[str]:
    return [record["kind"] for record in records]


def test_chain_runs_commits_and_journals(store: ArtifactStore) -> None:
    records: Records = []
    result = run(store, records)
    model = store.open("toy/train/model:v1")
    assert json.loads((model.path / "deep/er/weights.json").read_text()) == {"step": 10, "sum": 285}
    assert result.step("toy/train").outputs["model"].digest == model.digest
    assert model.producer is not None and model.producer.run == result.id
    assert [(e.port, e.ref) for e in model.inputs] == [("rows", "toy/make/rows:v1")]
    assert store.find("toy/make/rows").attributes == {"tokenizer": "toy", "rows": {"train": 20}}
    for name in ("plan.json", "config.yaml", "events.jsonl", "metrics.jsonl", "samples.jsonl", "log.txt", "run.json"):
        assert (result.folder / name).stat().st_size > 0, name
    metrics = read_events(store, result.id, "metrics")
    assert [m["index"] for m in metrics] == list(range(1, 11))
    assert metrics[-1]["values"] == {"sum": 285, "loss": 0.1} and metrics[-1]["step"] == "toy/train"
    assert kinds(records)[0] == "run_started" and kinds(records)[-1] == "run_finished"
    info = get_run(store, "latest")
    assert (info.status, info.steps["toy/train"]["state"]) == ("done", "ran")
    assert result.step("toy/train").summary == {"sum": {"before": 0, "after": 285}, "steps": 10}
    assert list((store.backend.scratch / "work").glob("*/")) == []


def test_only_what_changed_runs_again(store: ArtifactStore) -> None:
    run(store)
    assert [s.state for s in run(store, train={"steps": 11}).steps] == ["cached", "ran"]
    assert [s.state for s in run(store, make={"rows": 21}).steps] == ["ran", "ran"]
    assert [s.state for s in run(store, make={"api_key": "another-credential"}).steps] == ["cached", "cached"]


def test_failed_step_keeps_its_checkpoint_and_the_next_run_continues(store: ArtifactStore) -> None:
    with pytest.raises(StepFailedError) as caught:
        run(store, train={"fail": "bug"})
    assert "KeyError" in caught.value.what and caught.value.where and "runner_toy_steps.py" in caught.value.where
    info = get_run(store, "latest")
    assert info.status == "failed" and info.error is not None and info.error["code"] == "E601"
    assert "Traceback" in (store.backend.scratch / "runs" / info.id / "log.txt").read_text()
    records: Records = []
    run(store, records, train={"fail": "bug"})
    loaded = next(r for r in records if r["kind"] == "event" and r["name"] == "loaded")
    assert loaded["fields"]["step"] == 5
    assert json.loads((store.open("toy/train/model").path / "deep/er/weights.json").read_text())["sum"] == 285


def test_failures_carry_the_manifests_advice(store: ArtifactStore) -> None:
    with pytest.raises(NonFiniteLossError) as nan:
        run(store, train={"fail": "nan"})
    assert nan.value.hints[-1] == "steps=3   # nan: lower the learning rate"
    with pytest.raises(JudgeUnavailableError) as judge:
        run(store, train={"fail": "judge"})
    assert "start the judge first" in judge.value.hints[-1] and judge.value.exit_code == 3
    with pytest.raises(StepFailedError) as oom:
        run(store, train={"fail": "oom", "steps": 10})
    assert any("halve it" in hint and "steps=5" in hint for hint in oom.value.hints)


def test_user_file_is_an_input_and_part_of_the_lineage(store: ArtifactStore, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"value": 3}\n')
    result = run(store, rows=path)
    model = result.step("toy/train").outputs["model"]
    assert [link.parent for link in lineage(store, model).ancestors] == ["input/mine:v1"]
    assert run(store, rows="input/mine:v1").nothing_ran
    path.write_text('{"value": 4}\n')
    assert not run(store, rows=path).nothing_ran


def test_truncated_user_file_stops_the_run_before_any_step(store: ArtifactStore, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"value": 3}\n{"value": ')
    with pytest.raises(DataError, match="truncated") as caught:
        run(store, rows=path)
    assert caught.value.where == f"{path}:2"
    assert get_run(store, "latest").status == "failed"


def test_corrupt_input_stops_the_run_and_force_repairs_it(store: ArtifactStore) -> None:
    run(store)
    path = store.find("toy/make/rows").path / "train.jsonl"
    path.chmod(0o644)
    path.write_text("spoiled\n")
    with pytest.raises(ArtifactError, match="corrupt") as caught:
        run(store, train={"steps": 3})
    assert caught.value.where == str(path) and "steps run toy/make --force" in caught.value.hints[0]
    plan = make_plan()
    execute(Plan(steps=plan.steps[:1], goals=("toy/make",), name="make"), store, force=True)
    assert [s.state for s in run(store, train={"steps": 3}).steps] == ["cached", "ran"]


def test_corrupt_goal_is_noticed_by_a_no_op_run(store: ArtifactStore) -> None:
    model = run(store).step("toy/train").outputs["model"]
    (model.path / "deep/er/weights.json").unlink()
    with pytest.raises(ArtifactError, match="corrupt"):
        run(store)
    assert [step.state for step in run(store, force=True).steps] == ["cached", "ran"]
    assert run(store).nothing_ran


def test_secrets_reach_no_file_of_the_run(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "env-secret-value-77")
    request = {"overrides": ["make.api_key=sk-config-secret-1", "url=https://user:hunter22@host/x"]}
    result = run(store, make={"api_key": "sk-config-secret-1"}, request=request)
    tracker_secret = "env-secret-value-77"
    with pytest.raises(StepFailedError):
        run(store, entry="tests.runs.runner_toy_steps:leak", request=request)
    home = store.backend.scratch
    files = [path for path in home.rglob("*") if path.is_file()]
    assert len(files) > 15 and (result.folder / "config.yaml").read_text().count("***") == 1
    for path in files:
        content = path.read_bytes()
        for secret in (b"sk-config-secret-1", b"hunter22", tracker_secret.encode()):
            assert secret not in content, path
