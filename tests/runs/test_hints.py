"""Advice for what went wrong: which it is, in which order, and as what command."""

from dataclasses import replace

from nemotron_steps.errors import StepFailedError
from nemotron_steps.manifest.models import ErrorHint, StepManifest, StepTable
from nemotron_steps.resolver.plan import Plan, PlannedStep, StepOutput, SuppliedInput
from nemotron_steps.runs.hints import hints_for_failure, of_its_own


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


def test_what_went_wrong_is_found_behind_the_error() -> None:
    table = StepTable(id="s")
    manifest = StepManifest(step=table, errors=(ErrorHint(name="full", match="MemoryError", recovery="less"),))
    error = StepFailedError("it broke")
    error.__cause__ = MemoryError()
    assert [hint.name for hint in hints_for_failure(error, (), manifest, {})] == ["full"]
