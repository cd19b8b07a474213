"""Advice for what went wrong: which it is, in which order, and as what command."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemotron_steps.errors import JudgeUnavailableError, NonFiniteLossError, StepFailedError
from nemotron_steps.manifest.models import ErrorHint, StepManifest, StepTable, Strategy
from nemotron_steps.resolver.plan import Plan, PlannedStep, StepOutput, SuppliedInput
from nemotron_steps.runs.hints import Signal, hints_for_failure, hints_for_signals, of_its_own

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


def test_what_the_error_says_comes_before_what_was_seen_on_the_way() -> None:
    said = RuntimeError("cuda out of memory")  # whatever its letters
    assert names(said, Signal("kl_spike")) == ["does_not_fit", "out_of_memory", "kl_spike"]


def test_memory_that_ran_out_and_a_judge_that_is_silent_are_found_behind_the_error() -> None:
    for behind, name in ((MemoryError(), "out_of_memory"), (JudgeUnavailableError("silent"), "judge_unavailable")):
        error = StepFailedError("it broke")
        error.__cause__ = behind
        assert names(error) == [name]
        meanwhile = ValueError("while it was told")
        meanwhile.__context__ = behind
        assert names(meanwhile) == [name]
    assert names(ValueError("no")) == []


def test_a_strategy_that_answers_several_signals_is_told_once_with_the_first_and_its_numbers() -> None:
    seen = [Signal("kl_runaway", {"kl": 2.0}), Signal("kl_spike", {"kl": 1.0}), Signal("out_of_memory", {}, 3)]
    found = hints_for_signals(seen, MANIFEST, {})
    assert [hint.because for hint in found] == ["out_of_memory (3 times)", "kl_runaway (kl=2)"]
    assert [hint.name for hint in hints_for_failure(MemoryError(), seen, MANIFEST, {})] == [
        "out_of_memory",
        "kl_runaway",
    ]
    assert found[0].to_dict()["overrides"] == ["a=1"] and found[0].render().startswith("a=1   # out_of_memory")


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


def test_where_several_steps_were_asked_for_the_reader_is_named() -> None:
    several = Plan(steps=(IMPORT, TRAIN, planned("score")), goals=("score", "train"))
    assert of_its_own("rows=3", IMPORT, several).endswith("   # then --input train.prompts=toy/import/rows")


@pytest.mark.parametrize(
    ("hint", "step", "plan"),
    [
        ("steps logs r1", IMPORT, PLAN),  # no override
        ("rows=3", replace(IMPORT, inserted=False), PLAN),  # it was asked for
        ("rows=3", replace(IMPORT, inputs={**IMPORT.inputs, "more": StepOutput("other", "x")}), PLAN),
        ("rows=3", IMPORT, Plan(steps=(IMPORT, planned("train", x=StepOutput("other", "rows"))), goals=("train",))),
    ],
)
def test_any_other_hint_is_as_it_was(hint: str, step: PlannedStep, plan: Plan) -> None:
    assert of_its_own(hint, step, plan) == hint


def test_an_error_is_found_by_its_code_in_what_it_came_from() -> None:
    manifest = MANIFEST.model_copy(update={"errors": (ErrorHint(name="nan", match="E600", recovery="r"),)})
    error = ValueError("it broke")
    error.__context__ = NonFiniteLossError("the loss is NaN")
    assert [hint.name for hint in hints_for_failure(error, [], manifest, {})] == ["nan"]
