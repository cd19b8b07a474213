"""Advice for what went wrong: which it is, in which order, and as what command."""

from __future__ import annotations

from dataclasses import replace

from nemotron_steps.errors import StepFailedError
from nemotron_steps.manifest.models import ErrorHint, StepManifest, StepTable, Strategy
from nemotron_steps.resolver.plan import Plan, PlannedStep, StepOutput, SuppliedInput
from nemotron_steps.runs.hints import (
    Signal,
    hints_for_failure,
    of_its_own,
)

MANIFEST = StepManifest(
    step=StepTable(id="s"),
    strategies=(
        Strategy(when="it does not fit", then="halve it", signal="out_of_memory", override="a=1"),
        Strategy(when="nobody judges", then="start it", signal="judge_unavailable"),
        Strategy(when="it leaves", then="hold it", signal=["kl_spike", "kl_runaway"]),
    ),
    errors=(ErrorHint(name="does_not_fit", match="CUDA OUT of", recovery="a larger one"),),
)


def names(error: BaseException, *signals: Signal) -> list[str]:
    return [hint.name for hint in hints_for_failure(error, signals, MANIFEST, {})]


def planned(key: str, *, config: str = "default", inserted: bool = False, **inputs: SuppliedInput | StepOutput):
    manifest = StepManifest(step=StepTable(id=f"toy/{key}"))
    return PlannedStep(key, f"toy/{key}", manifest, config, (), {}, inputs, {}, inserted=inserted)


IMPORT = planned("import", config="tiny", inserted=True, table=SuppliedInput("my rows.csv"))
TRAIN = planned("train", prompts=StepOutput("import", "rows"), policy=SuppliedInput("m:v1"))
PLAN = Plan(steps=(IMPORT, TRAIN), goals=("train",))


def test_an_override_for_a_step_that_was_put_there_becomes_a_command_of_its_own() -> None:
    command = "steps run toy/import -c tiny --input 'table=my rows.csv' rows=3"
    assert of_its_own("rows=3   # too few", IMPORT, PLAN) == (
        f"{command}   # then --input prompts=toy/import/rows (too few)"
    )
    assert of_its_own("rows=3", IMPORT, PLAN) == f"{command}   # then --input prompts=toy/import/rows"
    default = replace(IMPORT, config_name="default")
    assert " -c " not in of_its_own("rows=3", default, PLAN)


def test_failure_matches_by_code_class_cause_and_pattern() -> None:
    def names(error: BaseException, *entries: ErrorHint) -> list[str]:
        manifest = StepManifest(step=StepTable(id="s"), errors=entries)
        return [hint.name for hint in hints_for_failure(error, [], manifest, {})]

    entries = (
        ErrorHint(name="code", match="E601", recovery="r"),
        ErrorHint(name="class", match="LookupError", recovery="r"),
        ErrorHint(name="pattern", match=["nothing", "port [0-9]+ in use"], recovery="r"),
        ErrorHint(name="other", match="E600", recovery="r"),
        ErrorHint(name="none", recovery="r"),
    )
    error = StepFailedError("it broke")
    error.__cause__ = KeyError("x")
    assert names(error, *entries) == ["class"], "the wrapper around an unexpected exception matches nothing itself"
    assert names(StepFailedError("it broke"), *entries) == ["code"]
    assert names(OSError("port 8080 in use"), *entries) == ["pattern"]
    cycle = ValueError("a")
    cycle.__context__ = cycle
    assert names(cycle, *entries) == []
