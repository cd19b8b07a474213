"""Each step is mirrored by itself, and ends as it ended: what every mirror hands to its package, a stand-in here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.config.mirrors import MlflowSettings, TensorBoardSettings, WandbSettings
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
