"""A run of two small steps, make → train, as a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import NonFiniteLossError
from nemotron_steps.manifest.models import Consumes, Produces, StepManifest, StepTable
from nemotron_steps.resolver.plan import Plan, PlannedStep, StepOutput
from nemotron_steps.runs.context import StepContext
from nemotron_steps.runs.execute import RunResult, execute


class MakeConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: int
    api_key: str


class TrainConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    data_path: str
    steps: int
    fail: str


def make(context: StepContext[MakeConfig]) -> None:
    rows = [json.dumps({"value": index * index}) for index in range(context.config.rows)]
    (context.outputs["rows"].path / "train.jsonl").write_text("\n".join(rows) + "\n")


def train(context: StepContext[TrainConfig]) -> None:
    """Sums the rows, one addition a step."""
    values = [json.loads(line)["value"] for line in Path(context.config.data_path).read_text().splitlines()]
    for index in range(1, context.config.steps + 1):
        context.tracker.metrics(index, {"loss": 1.0 / index})
        if index == 5 and context.config.fail == "nan":
            raise NonFiniteLossError("the loss is NaN at step 5", where="step 5")
        if index == 5 and context.config.fail == "signal":
            context.tracker.signal("kl_spike", kl=0.75, step=5)
            context.tracker.signal("kl_spike", kl=0.9123456, step=6)
    if context.config.fail == "table":
        context.tracker.summary({"heldout_reward": {"org/model": {"math": 0.5, "code": 0.25}}, "column": "question"})
    total = sum(values[: context.config.steps])
    (context.outputs["report"].path / "report.json").write_text(json.dumps({"metrics": {"sum": total}}))
    context.tracker.sample({"prompt": "2+2", "response": "<b>4</b>", "reward": 1.0, "step": context.config.steps})
    context.tracker.summary({"sum": {"before": 0, "after": total}, "steps": context.config.steps})


def _manifest(name: str, **ports: Any) -> StepManifest:
    config = f"{__name__}:{name.capitalize()}Config"
    return StepManifest(step=StepTable(id=f"toy/{name}", entry=f"{__name__}:{name}", config_schema=config), **ports)


def make_plan(make: dict[str, Any] | None = None, train: dict[str, Any] | None = None) -> Plan:
    rows = Produces(type="training_jsonl", name="rows")
    first = PlannedStep(
        key="toy/make",
        step_id="toy/make",
        manifest=_manifest("make", produces=(rows,)),
        config_name="default",
        overrides=(),
        config={"rows": 20, "api_key": "", **(make or {})},
        inputs={},
        produces={"rows": "training_jsonl"},
    )
    port = Consumes(type="training_jsonl", name="rows", bind={"data_path": "train.jsonl"})
    second = PlannedStep(
        key="toy/train",
        step_id="toy/train",
        manifest=_manifest("train", consumes=(port,), produces=(Produces(type="eval_report", name="report"),)),
        config_name="default",
        overrides=(),
        config={"steps": 10, "fail": "", **(train or {})},
        inputs={"rows": StepOutput("toy/make", "rows")},
        produces={"report": "eval_report"},
    )
    return Plan(steps=(first, second), goals=("toy/train",), name="toy")


def run(store: ArtifactStore, *, mirrored: Any, **configs: dict[str, Any]) -> RunResult:
    return execute(make_plan(**configs), store, mirrored=mirrored)
