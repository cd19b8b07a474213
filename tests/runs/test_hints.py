"""Advice for what went wrong: which it is, in which order, and as what command."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import JudgeUnavailableError, StepFailedError
from nemotron_steps.manifest.models import ErrorHint, StepManifest, StepTable, Strategy
from nemotron_steps.manifest.pipeline_models import StageCheck
from nemotron_steps.resolver.plan import Plan, PlannedStep, StepOutput, SuppliedInput
from nemotron_steps.runs.hints import (
    Signal,
    blocked,
    failed_checks,
    flat_numbers,
    hints_for_failure,
    hints_for_signals,
    of_its_own,
)
from nemotron_steps.runs.run_folder import RunFolder
from tests.runs.runner_toy_plan import make_plan

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


@pytest.fixture
def made(store: ArtifactStore) -> ArtifactStore:
    """Run r1, in which `a` worked under key k and `b` under another."""
    folder = RunFolder(store, "r1")
    steps = {"a": {"state": "ran", "cache_key": "k"}, "b": {"state": "ran", "cache_key": "other"}}
    folder.update(folder.create("toy", {}), status="done", steps=steps)
    values = [("a", {"kl": 9.0, "loss": 1.0}), ("b", {"kl": 5.0, "only_b": 1.0}), ("a", {"kl": 2.0})]
    lines = [json.dumps({"kind": "metrics", "step": step, "values": each}) + "\n" for step, each in values]
    (folder.path / "metrics.jsonl").write_text("".join(lines))
    return store


def found(store: ArtifactStore, summary: dict[str, Any], *metrics: str, run: str = "r1") -> dict[str, str]:
    checks = [StageCheck(metric=metric, at_most=-1.0) for metric in metrics]
    return {each.check.metric: each.found for each in failed_checks(checks, summary, store, run, "k")}


def test_a_summarys_number_comes_before_a_metric_of_that_name(made: ArtifactStore) -> None:
    assert found(made, {"kl": 4.0}, "kl", "loss") == {"kl": "4", "loss": "1"}
    assert found(made, {}, "kl") == {"kl": "2"}


def test_numbers_of_a_summary_are_named_by_their_way() -> None:
    table = {"a": {"x": 1, "y": "nan"}, "change": {"before": 1, "after": 2, "better": "higher"}, "after": {"after": 5}}
    numbers = flat_numbers({**table, "text": "many", "flag": True, "empty": {}, "none": 0})
    assert str(numbers) == str(
        {
            "a/x": 1.0,
            "a/y": float("nan"),
            "change": 2.0,
            "change/before": 1.0,
            "change/after": 2.0,
            "after/after": 5.0,
            "none": 0.0,
        }
    )


def test_every_check_that_blocks_is_in_the_error(made: ArtifactStore) -> None:
    step: PlannedStep = make_plan().steps[1]
    checks = [StageCheck(metric="kl", at_most=1.0), StageCheck(metric="loss", at_least=2.0)]
    failed = failed_checks(checks, {}, made, "r1", "k")
    error = blocked(failed, step, "r7")
    assert error.what == "'toy/train' does not pass its checks; its results are kept"
    assert (error.where, error.expected) == ("stage toy/train: kl, loss", "at most 1.0; at least 2.0")
    assert error.found == "2; 1" and error.hints[0].startswith("steps run --resume r7 --ignore-checks toy/train ")
