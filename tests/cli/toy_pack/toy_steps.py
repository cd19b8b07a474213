"""Steps small enough to run in milliseconds, with every way a step can end."""

import json
import logging
import os
import signal
import time
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

from nemotron_steps.errors import DataError, JudgeUnavailableError, NonFiniteLossError, show_line
from nemotron_steps.runs.context import StepContext


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MakeConfig(Section):
    count: PositiveInt = 4


class Data(Section):
    path: str | None = None


class Optimizer(Section):
    name: Literal["adam", "sgd"] = "adam"
    lr: PositiveFloat = 0.1


class Judge(Section):
    model: str | None = None
    api_key: str | None = None


class TrainConfig(Section):
    steps: PositiveInt = 6
    seed: int | None = None
    seconds_per_step: float = 0.0
    end: Literal[
        "done", "diverge", "judge", "bug", "interrupt", "interrupt_once", "stubborn", "row", "vanish", "killed"
    ] = "done"
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    judge: Judge = Judge()
    passthrough: tuple[str, ...] = ()
    last_kl: float | None = None


def make(context: StepContext[MakeConfig]) -> None:
    print("a library that prints")
    rows = [json.dumps({"number": number}) for number in range(context.config.count)]
    (context.outputs["rows"].path / "train.jsonl").write_text("\n".join(rows) + "\n")
    context.tracker.summary({"rows": len(rows)})


def train(context: StepContext[TrainConfig]) -> None:
    config = context.config
    logging.getLogger("nemotron_steps.toy").warning("this toy is small; hint: steps list")
    file = context.inputs["rows"].require_jsonl()
    if config.end == "row":
        where = f"{file}:1"
        raise DataError("the row is no good", where=where, hints=show_line(where))
    rows = file.read_text().splitlines()
    for step in range(1, config.steps + 1):
        time.sleep(config.seconds_per_step)
        context.tracker.metrics(
            step, {"reward/mean": step / config.steps, "loss": 1 / step, "kl_penalty": 0.001 * step}
        )
        if step == config.steps and config.last_kl is not None:
            context.tracker.metrics(step, {"kl_penalty": config.last_kl})
        context.tracker.progress(f"reward {step / config.steps:.2f}", step, config.steps)
    if config.end == "diverge" and config.optimizer.lr > 0.01:
        raise NonFiniteLossError("the loss is NaN at step 2", found="loss=nan")
    if config.end == "judge":
        raise JudgeUnavailableError("the judge did not answer", hints=("env.judge=other",))
    if config.end == "bug":
        raise ZeroDivisionError("a mistake of the step's author")
    if config.end == "vanish":
        os._exit(0)
    if config.end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if config.end == "interrupt":
        raise KeyboardInterrupt
    if config.end == "stubborn":
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            (context.work / "will_not_stop").touch()
            time.sleep(60)
    if config.end == "interrupt_once" and not (context.work / "interrupted").exists():
        (context.work / "interrupted").touch()
        raise KeyboardInterrupt
    context.tracker.signal("reward_saturated", share=0.99)
    model: dict[str, Any] = {"rows": len(rows), "lr": config.optimizer.lr, "passthrough": list(config.passthrough)}
    (context.outputs["model"].path / "model.json").write_text(json.dumps(model))
    context.tracker.summary({"held_out_reward": {"before": 0.25, "after": 0.75}, "loss": {"before": 2.0, "after": 0.5}})
    if (seed := config.seed) is not None:
        context.tracker.summary({"seeded_reward": {"before": 0.25, "after": 0.25 + 0.05 * seed}})


def convert(context: StepContext[dict[str, Any]]) -> None:
    source = context.inputs["model"].path / "model.json"
    (context.outputs["export"].path / "export.json").write_text(source.read_text())


def score(context: StepContext[dict[str, Any]]) -> None:
    model = json.loads((context.inputs["export"].path / "export.json").read_text())
    (context.outputs["score"].path / "report.json").write_text(json.dumps({"metrics": {"rows": model["rows"]}}))
    context.tracker.summary({"rows": model["rows"]})


def compare(context: StepContext[dict[str, Any]]) -> None:
    """For a port that takes many: a table of how long each model's file is, in the order of the models."""
    table = {
        port.removeprefix("models."): {"files": len(list(artifact.path.iterdir()))}
        for port, artifact in context.inputs.items()
    }
    assert context.config["models"] == {port.removeprefix("models."): str(a.path) for port, a in context.inputs.items()}
    (context.outputs["score"].path / "score.json").write_text(json.dumps(table))
    context.tracker.summary({"sizes": table})
