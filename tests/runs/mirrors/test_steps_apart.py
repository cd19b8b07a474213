"""Each step is mirrored by itself, and ends as it ended: what every mirror hands to its package, a stand-in here."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.artifacts.models import Artifact, Edge
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.config.mirrors import MlflowSettings, TensorBoardSettings, WandbSettings
from nemotron_steps.errors import UnknownNameError
from nemotron_steps.runs.mirrors.base import leaves
from nemotron_steps.runs.mirrors.mlflow import MlflowMirror
from nemotron_steps.runs.mirrors.tensorboard import TensorBoardMirror
from nemotron_steps.runs.mirrors.wandb import WandbMirror
from nemotron_steps.runs.run_folder import RunFolder
from tests.runs.runner_toy_plan import make_plan

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class Recorded:
    """An object any method of which is called, noted, and answered with None or what it is given to answer."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[Call] = []
        self._answers = answers

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, arguments, options))
            return self._answers.get(name)

        return call

    def named(self, *names: str) -> list[Call]:
        return [call for call in self.calls if call[0] in names]


def tell(mirror: Callable[[dict[str, Any]], None], *records: tuple[str, dict[str, Any]]) -> None:
    """Two steps, the first of which reports a training step and a sample and fails; the second ends without a word."""
    failed = ("step_failed", {"error": {"what": "it broke"}})
    reported = [("metrics", {"index": 7, "values": {"loss": 0.5}}), ("sample", {"sample": {"response": "a"}})]
    for step, told in (("toy/make", [*reported, failed]), ("toy/train", records)):
        for kind, fields in (("step_started", {}), *told):
            mirror({"kind": kind, "time": 12.5, "step": step, **fields})
    mirror.close()  # type: ignore[attr-defined]


def test_wandb(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []

    def init(**options: Any) -> Any:
        runs.append(Recorded())
        runs[-1].summary = {}
        return runs[-1]

    wandb = SimpleNamespace(init=init, Settings=dict, Table=lambda **options: options["data"])
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    folder = RunFolder(store, "run-1")
    tell(WandbMirror(WandbSettings(project="p"), folder, make_plan(), store, lambda value: value))
    (first, second) = (run.named("log", "finish") for run in runs)
    assert first == [
        ("log", ({"loss": 0.5, "training_step": 7},), {}),
        ("log", ({"samples": [["a"]]},), {}),
        ("finish", (), {"exit_code": 1}),
    ]
    assert runs[0].summary == {"error": "it broke"}
    assert second == [("finish", (), {"exit_code": 130})]


def test_mlflow(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Recorded(create_experiment="1")
    made = iter("ab")
    client.create_run = lambda *_, **__: SimpleNamespace(info=SimpleNamespace(run_id=next(made)))  # type: ignore[attr-defined]
    entities = SimpleNamespace(Param=lambda *fields: fields, Metric=lambda *fields: fields)
    mlflow = SimpleNamespace(MlflowClient=lambda **_: client, entities=entities)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    folder = RunFolder(store, "run-1")
    mirror = MlflowMirror(MlflowSettings(), folder, make_plan(), store, lambda value: value)
    tell(mirror, ("summary", {"values": {"rows": 3}}))
    logged = [call for call in client.named("log_batch") if "metrics" in call[2]]
    assert [(run, *options["metrics"]) for _, (run,), options in logged] == [
        ("a", ("loss", 0.5, 12500, 7)),
        ("b", ("summary/rows", 3.0, 12500, 0)),
    ]
    assert [arguments[0] for _, arguments, _ in client.named("log_text")] == ["a"]
    assert [arguments for _, arguments, _ in client.named("set_terminated")] == [("a", "FAILED"), ("b", "KILLED")]


def test_tensorboard(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    writers: dict[str, Recorded] = {}

    def open_writer(folder: str, **_: Any) -> Recorded:
        return writers.setdefault(folder, Recorded())

    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=open_writer))
    folder = RunFolder(store, "run-1")
    tell(TensorBoardMirror(TensorBoardSettings(), folder), ("summary", {"values": {"rows": 3}}))
    make, train = (writers[f"{folder.path}/tensorboard/{step}"] for step in ("toy/make", "toy/train"))
    assert make.named("add_scalar") == [("add_scalar", ("loss", 0.5, 7), {"walltime": 12.5})]
    assert [(name, at) for _, (name, _, at), _ in make.named("add_text")] == [("samples", 7), ("error", 7)]
    assert train.named("add_scalar") == [("add_scalar", ("summary/rows", 3, 0), {})]
    assert [writer.calls[-1][0] for writer in (make, train)] == ["close", "close"]


@pytest.fixture
def board(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> tuple[TensorBoardMirror, Recorded]:
    """A TensorBoard mirror of a step that has begun, and its writer."""
    writer = Recorded()
    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=lambda *_, **__: writer))
    mirror = TensorBoardMirror(TensorBoardSettings(), RunFolder(store, "run-1"))
    mirror({"kind": "step_started", "time": 1.0, "step": "toy/train"})
    return mirror, writer


def test_tensorboard_has_samples_by_environment_and_signals_at_their_training_step(
    board: tuple[TensorBoardMirror, Recorded],
) -> None:
    mirror, writer = board
    mirror({"kind": "metrics", "time": 1.0, "step": "toy/train", "index": 7, "values": {"loss": 0.5, "note": "x"}})
    sample = {"environment": "maths", "which": "best", "step": 3, "response": "a\nb"}
    mirror({"kind": "sample", "time": 1.0, "step": "toy/train", "sample": sample})
    mirror({"kind": "signal", "time": 1.0, "step": "toy/train", "name": "kl_spike", "numbers": {"kl": 2.0, "at": 7}})
    told = [arguments for _, arguments, _ in writer.named("add_text")]
    assert [(name, at) for name, _, at in told] == [("samples/maths/best", 3), ("signals", 7)]
    assert "**response**\n\n    a\n    b" in told[0][1] and told[1][1] == "**kl_spike** kl=2.0, at=7"
    assert [arguments[0] for _, arguments, _ in writer.named("add_scalar")] == ["loss"]


def test_a_summarys_empty_part_is_a_value_of_its_own_and_no_name_begins_with_a_separator() -> None:
    assert list(leaves({"a": {}, "b": {"c": {"d": 1}}, "e": 2}, "", ".")) == [("a", {}), ("b.c.d", 1), ("e", 2)]
    assert list(leaves({"a": {"b": 1}}, "summary", "/")) == [("summary/a/b", 1)]
    assert list(leaves({}, "", ".")) == [] and list(leaves({}, "x", ".")) == [("x", {})]


def test_a_folder_of_boards_may_be_below_the_users(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setenv("HOME", str(tmp_path))
    module = SimpleNamespace(SummaryWriter=lambda folder, **_: opened.append(folder))
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    mirror = TensorBoardMirror(TensorBoardSettings(folder="~/boards"), RunFolder(store, "run-1"))
    mirror({"kind": "step_started", "time": 1.0, "step": "toy/train"})
    assert opened == [f"{tmp_path}/boards/run-1/toy/train"]


@pytest.fixture
def tracked(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[MlflowMirror, Recorded]]:
    """An MLflow mirror of a step with this config that has begun, and its client."""

    def tracked(config: dict[str, Any]) -> tuple[MlflowMirror, Recorded]:
        client = Recorded(create_experiment="1")
        made = SimpleNamespace(info=SimpleNamespace(run_id="a"))
        client.create_run = lambda *_, **__: made  # type: ignore[attr-defined]
        entities = SimpleNamespace(Param=lambda *fields: fields, Metric=lambda *fields: fields)
        mlflow = SimpleNamespace(MlflowClient=lambda **_: client, entities=entities)
        monkeypatch.setitem(sys.modules, "mlflow", mlflow)
        plan = make_plan()
        plan = replace(plan, steps=(replace(plan.steps[0], config=config),))
        hidden = lambda value: {**value, "api_key": "***"}  # noqa: E731
        mirror = MlflowMirror(MlflowSettings(), RunFolder(store, "run-1"), plan, store, hidden)
        mirror({"kind": "step_started", "time": 1.0, "step": "toy/make"})
        return mirror, client

    return tracked


def test_mlflow_is_asked_no_more_at_once_and_told_no_longer_texts_than_its_servers_take(
    tracked: Callable[..., tuple[MlflowMirror, Recorded]],
) -> None:
    config = {f"k{at}": at for at in range(198)}
    mirror, client = tracked({**config, "long": "x" * 1000, "k" * 300: 1, "api_key": "sk-not-for-mlflow"})
    asked = [options["params"] for _, _, options in client.named("log_batch")]
    told = dict(pair for part in asked for pair in part)
    assert [len(part) for part in asked] == [100, 100, 1] and len(told) == 201
    assert (told["long"], told["k" * 250], told["api_key"]) == ("x" * 500, "1", "***")
    mirror({"kind": "summary", "time": 1.0, "step": "toy/make", "values": {"note": "y" * 1000, "nothing": None}})
    tags = [arguments for name, arguments, _ in client.named("set_tag") if arguments[1].startswith("summary")]
    assert tags == [("a", "summary/note", "y" * 500)]


def test_mlflow_is_told_how_patient_to_be_where_the_environment_does_not_say(
    tracked: Callable[..., tuple[MlflowMirror, Recorded]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "7")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    tracked({})
    names = ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    assert [os.environ[name] for name in names] == ["7", "2"]


def test_an_input_is_called_by_its_digest_where_it_has_no_name(
    tracked: Callable[..., tuple[MlflowMirror, Recorded]], store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, client = tracked({})
    edges = (Edge("rows", "d" * 64, "rows:v1"), Edge("policy", "e" * 64))
    monkeypatch.setattr(store, "find", lambda ref: Artifact("t", "f" * 64, Path("/"), inputs=edges))
    mirror({"kind": "step_finished", "time": 1.0, "step": "toy/make", "outputs": {"model": "m:v1"}})
    tags = {arguments[1]: arguments[2] for _, arguments, _ in client.named("set_tag")}
    assert tags == {"output.model": "m:v1", "input.rows": "rows:v1", "input.policy": "e" * 64}


@pytest.fixture
def bench(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> tuple[WandbMirror, list[Any], list[dict[str, Any]]]:
    """A W&B mirror of a step that has begun, its runs, and what was made as artifacts."""
    runs: list[Any] = []
    made: list[dict[str, Any]] = []

    def init(**options: Any) -> Any:
        runs.append(Recorded())
        runs[-1].summary, runs[-1].options = {}, options
        runs[-1].settings = SimpleNamespace(_offline=False)
        return runs[-1]

    def artifact(**options: Any) -> Any:
        made.append(options)
        return SimpleNamespace(
            add_reference=lambda address, **_: made[-1].update(address=address), label=options["name"]
        )

    module = SimpleNamespace(
        init=init,
        Settings=dict,
        Table=lambda **options: (options["columns"], options["data"]),
        Artifact=artifact,
        AlertLevel=SimpleNamespace(WARN="warn"),
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    hidden = lambda value: {**value, "api_key": "***"}  # noqa: E731
    plan = make_plan(make={"api_key": "sk-not-for-wandb"})
    mirror = WandbMirror(WandbSettings(project="p"), RunFolder(store, "run-1"), plan, store, hidden)
    mirror({"kind": "step_started", "time": 1.0, "step": "toy/make"})
    return mirror, runs, made


def told(mirror: WandbMirror, kind: str, **fields: Any) -> None:
    mirror({"kind": kind, "time": 1.0, "step": "toy/make", **fields})


def test_wandb_has_a_named_run_a_flat_summary_alerts_and_every_column_of_the_samples(bench: Any) -> None:
    mirror, (run,), _ = bench
    assert (run.options["name"], run.options["group"]) == ("toy/make run-1", "run-1")
    assert run.options["config"]["api_key"] == "***"
    told(mirror, "summary", values={"reward": {"before": 1, "after": 2}, "rows": 3})
    told(mirror, "signal", name="kl_spike", numbers={"kl": 2.0, "at": 7})
    told(mirror, "signal", name="silent", numbers={})
    for sample in ({"response": "a"}, {"response": None, "judge": [{"verdict": "é"}], "ok": True}):
        told(mirror, "sample", sample=sample)
    told(mirror, "step_finished", outputs={})
    rows = [["a", None, None], [None, '[{"verdict": "é"}]', True]]
    assert run.named("log")[-1][1] == ({"samples": (["response", "judge", "ok"], rows)},)
    assert [options["text"] for _, _, options in run.named("alert")] == ["kl=2.0, at=7", "silent"]
    assert run.summary == {"reward/before": 1, "reward/after": 2, "rows": 3}


def test_wandbs_artifacts_lie_where_the_home_has_them_and_an_input_that_is_gone_hides_no_other(
    bench: Any, store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, (run,), made = bench
    edges = (Edge("lost", "1" * 64, "lost:v1"), Edge("rows", "2" * 64), Edge("again", "2" * 64))
    found = {
        "m:v3": Artifact("model", "3" * 64, tmp_path, name="toy/m", version=3, inputs=edges),
        "2" * 64: Artifact("rows", "2" * 64, tmp_path, location=str(tmp_path / "mine")),
    }

    def find(ref: str) -> Artifact:
        if ref not in found:
            raise UnknownNameError("gone")
        return found[ref]

    monkeypatch.setattr(store, "find", find)
    told(mirror, "step_finished", outputs={"model": "m:v3"})
    assert [(each["name"], each["address"]) for each in made] == [
        ("2" * 12, (tmp_path / "mine").as_uri()),
        ("toy-m", (store.backend.scratch / "artifacts/objects" / ("3" * 64)).as_uri()),
    ]
    (logged,) = run.named("log_artifact")
    assert logged[2] == {"aliases": ["latest", "toy-m-v3"]} and len(run.named("use_artifact")) == 1
    monkeypatch.setattr(store.backend, "url", "s3://bucket/home/")
    assert mirror._address(found["m:v3"]) == f"s3://bucket/home/artifacts/objects/{'3' * 64}"


def test_a_wandb_that_wants_a_key_is_told_with_what_does_without(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    mirror, (run,), _ = bench

    def refuse(values: Any) -> None:
        raise ValueError("API key must be 40 characters long")

    run.log = refuse
    with caplog.at_level(logging.WARNING):
        told(mirror, "metrics", index=1, values={"loss": 0.5})
        told(mirror, "metrics", index=2, values={"loss": 0.5})
    assert caplog.text.count("the W&B mirror stops here") == 1 and "export WANDB_MODE=offline" in caplog.text
