"""The toy chain as a plan, and a command line for it in a process of its own: `runner_toy_plan.py HOME [k=v ...]`."""

import sys
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import StepsError
from nemotron_steps.manifest.models import Consumes, ErrorHint, Produces, StepManifest, StepTable, Strategy
from nemotron_steps.resolver.plan import Plan, PlannedStep, StepOutput, SuppliedInput
from nemotron_steps.runs.execute import RunResult, execute
from nemotron_steps.runs.log_format import render
from nemotron_steps.runs.run_folder import get_run

MAKE = StepManifest(
    step=StepTable(
        id="toy/make", entry="tests.runs.runner_toy_steps:make", config_schema="tests.runs.runner_toy_steps:MakeConfig"
    ),
    produces=(Produces(type="training_jsonl", name="rows"),),
)
TRAIN = StepManifest(
    step=StepTable(
        id="toy/train",
        entry="tests.runs.runner_toy_steps:train",
        config_schema="tests.runs.runner_toy_steps:TrainConfig",
    ),
    consumes=(
        Consumes(
            type="training_jsonl",
            name="rows",
            bind={"data_path": "train.jsonl", "validation_path": "validation.jsonl"},
        ),
    ),
    produces=(Produces(type="toy_model", name="model"), Produces(type="eval_report", name="report")),
    strategies=(
        Strategy(when="the policy leaves its reference", then="raise the penalty", signal="kl_spike", override="kl=2"),
        Strategy(when="the batch does not fit", then="halve it", signal="out_of_memory", override="steps*=0.5|1"),
    ),
    errors=(
        ErrorHint(name="nan", match="E600", recovery="lower the learning rate", override="steps=3"),
        ErrorHint(name="judge", match="JudgeUnavailableError", recovery="start the judge first"),
        ErrorHint(name="bug", match="a bug in .* step", recovery="report it"),
    ),
)


def make_plan(
    *, rows: Any = None, make: dict[str, Any] | None = None, train: dict[str, Any] | None = None, entry: str = ""
) -> Plan:
    """make → train; with `rows` (a path or reference) only train."""
    first = PlannedStep(
        key="toy/make",
        step_id="toy/make",
        manifest=MAKE,
        config_name="default",
        overrides=(),
        config={"rows": 20, "delay": 0.0, "api_key": "", **(make or {})},
        inputs={},
        produces={"rows": "training_jsonl"},
    )
    manifest = TRAIN
    if entry:
        manifest = TRAIN.model_copy(update={"step": TRAIN.step.model_copy(update={"entry": entry})})
    second = PlannedStep(
        key="toy/train",
        step_id="toy/train",
        manifest=manifest,
        config_name="default",
        overrides=(),
        config={"steps": 10, "delay": 0.0, "fail": "", **(train or {})},
        inputs={"rows": SuppliedInput(str(rows)) if rows is not None else StepOutput("toy/make", "rows")},
        produces={"model": "toy_model", "report": "eval_report"},
    )
    return Plan(steps=(second,) if rows is not None else (first, second), goals=("toy/train",), name="toy")


def run(store: ArtifactStore, records: list[dict[str, Any]] | None = None, **kwargs: Any) -> RunResult:
    plan_arguments = {k: kwargs.pop(k) for k in ("rows", "make", "train", "entry") if k in kwargs}
    listeners = [records.append] if records is not None else []
    return execute(make_plan(**plan_arguments), store, listeners=listeners, **kwargs)


def main(arguments: list[str]) -> int:
    home, *settings = arguments
    store = ArtifactStore(Path(home))
    # A job finds what was asked for in the run that it is to go on with.
    for run in [word.partition("=")[2] for word in settings if word.startswith("resume=")]:
        settings += get_run(store, run).request.get("overrides", [])
    sections: dict[str, dict[str, Any]] = {"make": {}, "train": {}}
    options: dict[str, Any] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        section, _, key = name.rpartition(".")
        parsed: Any = float(value) if key == "delay" else int(value) if value.isdigit() else value
        (sections[section] if section else options)[key] = parsed

    def show(record: dict[str, Any]) -> None:
        line = render(record)
        if line is not None:
            print(line, flush=True)

    try:
        execute(make_plan(**sections), store, listeners=[show], **options)
    except StepsError as error:
        print(error.render(), flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
