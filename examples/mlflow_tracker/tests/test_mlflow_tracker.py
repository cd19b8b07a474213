"""The MLflow tracker over a tracking store on disk: what it wrote is read back through MLflow's own client."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow_tracker import MlflowSettings, MlflowTracker
from toy_run import make_plan, run

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.config.profiles import MirrorSettings, load_environment
from nemotron_steps.errors import ConfigError, InterruptedRunError, NonFiniteLossError
from nemotron_steps.runs.execute import execute
from nemotron_steps.runs.run_folder import RunFolder


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "home")


@pytest.fixture
def mirrored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MirrorSettings:
    """A folder: creating MLflow's database takes seconds, and the mirror is the same."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return MirrorSettings(
        others={"mlflow": MlflowSettings(tracking_uri=(tmp_path / "tracked").as_uri(), experiment="toys")}
    )


def runs_in(mirrored: MirrorSettings) -> tuple[Any, dict[str, Any]]:
    """MLflow's client, and its runs by step."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=mirrored.others["mlflow"].tracking_uri)
    experiment = client.get_experiment_by_name("toys")
    return client, {each.data.tags["step"]: each for each in client.search_runs([experiment.experiment_id])}


def test_a_step_is_a_run_with_config_metrics_summary_samples_and_lineage(
    store: ArtifactStore, mirrored: MirrorSettings, tmp_path: Path
) -> None:
    began = time.time()
    result = run(store, mirrored=mirrored, make={"api_key": "sk-not-for-mlflow"}, train={"fail": "signal"})
    client, runs = runs_in(mirrored)
    train, make = runs["toy/train"], runs["toy/make"]
    assert train.info.status == make.info.status == "FINISHED"
    assert train.data.params["steps"] == "10" and make.data.params["api_key"] == "***"
    losses = client.get_metric_history(train.info.run_id, "loss")
    assert [(each.step, each.value) for each in losses] == [(index, 1 / index) for index in range(1, 11)]
    assert 1000 * began - 1 <= losses[0].timestamp <= losses[-1].timestamp <= 1000 * time.time(), "milliseconds"
    assert train.data.metrics["summary/sum/after"] == 285 and train.data.metrics["summary/steps"] == 10
    tags = train.data.tags
    assert tags["run"] == result.id and tags["signal.kl_spike"] == "kl=0.9123456, step=6"
    assert tags["output.report"] == "toy/train/report:v1" and tags["input.rows"] == "toy/make/rows:v1"
    (samples,) = (tmp_path / "tracked").rglob("samples.jsonl")
    assert json.loads(samples.read_text())["response"] == "<b>4</b>"
    for path in (tmp_path / "tracked").rglob("*"):
        assert not path.is_file() or b"sk-not-for-mlflow" not in path.read_bytes(), path


def test_a_summary_has_its_tables_as_metrics_and_its_texts_as_tags(
    store: ArtifactStore, mirrored: MirrorSettings
) -> None:
    run(store, mirrored=mirrored, train={"fail": "table"})
    train = runs_in(mirrored)[1]["toy/train"].data
    assert train.metrics["summary/heldout_reward/org/model/math"] == 0.5
    assert train.metrics["summary/heldout_reward/org/model/code"] == 0.25
    assert train.tags["summary/column"] == "question"


def test_names_that_are_paths_or_come_out_alike_do_not_end_the_mirror(
    store: ArtifactStore, mirrored: MirrorSettings
) -> None:
    plan = make_plan()
    train = plan.step("toy/train")
    many = {f"k{at}": at for at in range(198)} | {"long": "x" * 1000, "k" * 300: 1}  # more than a server takes at once
    plan = replace(
        plan, steps=tuple(replace(s, config={**s.config, **many, "a:b": 1, "a b?": 2, "a?b": 3}) for s in plan.steps)
    )
    mirror = MlflowTracker(mirrored.others["mlflow"], RunFolder(store, "a-run"), plan, store, lambda value: value)  # type: ignore[arg-type]
    record = {"time": 1.0, "step": train.key}
    mirror({"kind": "step_started", **record})
    mirror({"kind": "summary", "values": {"heldout": {"./models/a": 1.0, "/models//b/": 2.0, "../c": 3.0}}, **record})
    mirror({"kind": "step_finished", "outputs": {}, **record})
    made = runs_in(mirrored)[1][train.key]
    assert made.data.metrics == {
        "summary/heldout/_/models/a": 1.0,
        "summary/heldout/models/b": 2.0,
        "summary/heldout/_/c": 3.0,
    }
    assert (made.data.params["long"], made.data.params["k" * 250]) == ("x" * 500, "1") and "k197" in made.data.params
    assert made.data.params["a_b"] == "3" and made.info.status == "FINISHED"


def test_a_failed_step_leaves_its_numbers_and_its_error(store: ArtifactStore, mirrored: MirrorSettings) -> None:
    with pytest.raises(NonFiniteLossError):
        run(store, mirrored=mirrored, train={"fail": "nan"})
    client, runs = runs_in(mirrored)
    train = runs["toy/train"]
    assert train.info.status == "FAILED" and train.data.tags["error"] == "the loss is NaN at step 5"
    assert len(client.get_metric_history(train.info.run_id, "loss")) == 5


def test_a_store_that_cannot_be_reached_does_not_stop_the_run(
    store: ArtifactStore, mirrored: MirrorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    nobody = MirrorSettings(others={"mlflow": MlflowSettings(tracking_uri="http://127.0.0.1:9")})
    result = run(store, mirrored=nobody)
    assert result.step("toy/train").outputs
    assert "the MLflow mirror stops here" in (result.folder / "log.txt").read_text()


def test_a_store_of_samples_that_raises_an_error_of_its_own_does_not_stop_the_run(
    store: ArtifactStore, mirrored: MirrorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    class NoCredentialsError(Exception):
        pass

    def log_text(*_: Any) -> None:
        raise NoCredentialsError("Unable to locate credentials")

    monkeypatch.setattr(mlflow.MlflowClient, "log_text", log_text)
    result = run(store, mirrored=mirrored)
    assert result.step("toy/train").outputs
    (log,) = [line for line in (result.folder / "log.txt").read_text().splitlines() if "MLflow mirror stops" in line]
    assert "Unable to locate credentials (NoCredentialsError)" in log
    assert runs_in(mirrored)[1]["toy/train"].info.status == "FINISHED"


def test_an_interrupted_run_ends_as_one_where_its_mirror_cannot_be_closed(
    store: ArtifactStore, mirrored: MirrorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    def refuse(*_: Any) -> None:
        raise AssertionError("an error of the store")

    def interrupt(record: dict[str, Any]) -> None:
        if record["kind"] == "sample":
            raise KeyboardInterrupt

    monkeypatch.setattr(mlflow.MlflowClient, "set_terminated", refuse)
    monkeypatch.setattr("mlflow_tracker.MlflowTracker._on_step_failed", lambda *_: None)
    with pytest.raises(InterruptedRunError):
        execute(make_plan(), store, listeners=[interrupt], mirrored=mirrored)
    (folder,) = (store.backend.scratch / "runs").iterdir()
    assert "the MLflow mirror stops here" in (folder / "log.txt").read_text()


def test_the_table_is_checked_and_a_wrong_key_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "env.toml").write_text('[mlflow]\nuri = "x"\n')
    monkeypatch.chdir(tmp_path)
    environment = load_environment()
    assert environment.names == ()
    with pytest.raises(ConfigError) as caught:
        _ = environment.mirrors
    assert caught.value.where == f"{tmp_path / 'env.toml'}:2"
    (tmp_path / "env.toml").write_text('[mlflow]\nexperiment = "x"\n')
    assert load_environment().mirrors.others == {"mlflow": MlflowSettings(experiment="x")}
