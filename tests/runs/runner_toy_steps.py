"""Small real steps for the runner's tests: they write files, keep checkpoints in their work folder, and can be slow."""

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from nemotron_steps.errors import RESUME, DataError, JudgeUnavailableError, NonFiniteLossError, WorkerLostError
from nemotron_steps.runs.context import StepContext

logger = logging.getLogger(__name__)


class MakeConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: int = 20
    delay: float = 0.0
    api_key: str = ""


class TrainConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    data_path: str | None = None
    validation_path: str | None = None
    steps: int = 10
    delay: float = 0.0
    fail: str = ""
    file_bytes: int = 0


def make(context: StepContext[MakeConfig]) -> None:
    with (context.outputs["rows"].path / "train.jsonl").open("w") as file:
        for index in range(context.config.rows):
            file.write(json.dumps({"id": index, "value": index * index}) + "\n")
            file.flush()
            time.sleep(context.config.delay)
    logger.warning("key in a log line: %s", context.config.api_key)
    context.outputs["rows"].attributes["tokenizer"] = "toy"


def train(context: StepContext[TrainConfig]) -> None:
    """Sums the rows, one addition a step, with a checkpoint after every step."""
    rows = [json.loads(line) for line in Path(context.config.data_path or "").read_text().splitlines()]
    checkpoint = context.work / "checkpoint.json"
    state = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"step": 0, "sum": 0}
    context.tracker.event("loaded", step=state["step"])
    while state["step"] < context.config.steps:
        state["sum"] += rows[state["step"] % len(rows)]["value"]
        state["step"] += 1
        time.sleep(context.config.delay)
        temporary = checkpoint.with_suffix(".tmp")
        temporary.write_text(json.dumps(state))
        temporary.replace(checkpoint)
        context.tracker.metrics(state["step"], {"sum": state["sum"], "loss": 1.0 / state["step"]})
        context.tracker.progress("training", state["step"], context.config.steps)
        while state["step"] == 4 and os.path.exists(os.environ.get("TOY_GATE", "")):
            time.sleep(0.01)
        if state["step"] == 5:
            _fail(context.config.fail, context)
    model = context.outputs["model"].path
    (model / "deep" / "er").mkdir(parents=True)
    (model / "deep" / "er" / "weights.json").write_text(json.dumps(state))
    if context.config.file_bytes:
        with (model / "large.bin").open("wb") as file:
            for _ in range(context.config.file_bytes >> 16):
                file.write(os.urandom(1 << 16) if context.config.fail == "random" else b"x" * (1 << 16))
    (context.outputs["report"].path / "report.json").write_text(json.dumps({"metrics": {"sum": state["sum"]}}))
    context.tracker.sample({"prompt": "2+2", "response": "<b>4</b>", "reward": 1.0, "step": state["step"]})
    context.tracker.summary({"sum": {"before": 0, "after": state["sum"]}, "steps": state["step"]})


def _fail(kind: str, context: StepContext[Any]) -> None:
    if kind == "nan":
        raise NonFiniteLossError("the loss is NaN at step 5", where="step 5")
    if kind == "judge":
        raise JudgeUnavailableError("the judge did not answer after 3 tries")
    if kind == "lost":
        raise WorkerLostError("the worker is lost", hints=["steps doctor", f"{RESUME}   # goes on"])
    if kind.startswith("row "):
        raise DataError("the row is no good", where=kind.removeprefix("row "))
    if kind == "bug":
        raise KeyError("a bug in the step")
    if kind == "table":
        context.tracker.summary({"heldout_reward": {"org/model": {"math": 0.5, "code": 0.25}}, "column": "question"})
    if kind == "signal":
        context.tracker.signal("kl_spike", kl=0.75, step=5)
        context.tracker.signal("kl_spike", kl=0.9123456, step=6)
    if kind == "oom":
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
    if kind == "bad-output":
        (context.outputs["report"].path / "report.json").write_text('{"metrics": {"sum": "many"}}')
        (context.outputs["model"].path / "weights").write_text("x")


def broken_report(context: StepContext[TrainConfig]) -> None:
    (context.outputs["model"].path / "weights").write_text("x")
    (context.outputs["report"].path / "report.json").write_text('{"metrics": {"sum": "many"}}')


def forgets_the_model(context: StepContext[TrainConfig]) -> None:
    (context.outputs["report"].path / "report.json").write_text('{"metrics": {"sum": 1}}')


def leak(context: StepContext[TrainConfig]) -> None:
    secret = os.environ["SOME_SERVICE_TOKEN"]
    context.tracker.event("request", header=f"Bearer {secret}")
    context.tracker.sample({"prompt": secret, "judge": [{"reasoning": secret, "verdict": f"it has {secret} in it"}]})
    logger.warning("calling with %s", secret)
    raise RuntimeError(f"401 for token {secret}")
