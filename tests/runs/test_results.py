"""How a run went, from its steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.resolver.plan import Instance
from nemotron_steps.runs.execute import RunResult, StepResult


def result(*states: str, fanned: bool = False) -> RunResult:
    steps = tuple(
        StepResult(f"t-{at}", "toy/t", state, {}, 1.0, {"x": float(at)}, (), Instance("t", {"seed": str(at)}))
        if fanned
        else StepResult(f"t-{at}", "toy/t", state, {}, 1.0, {"x": float(at)})
        for at, state in enumerate(states)
    )
    return RunResult("r1", Path("/runs/r1"), steps, 3.0)


def test_nothing_ran_where_every_step_was_there_or_made_by_another_run() -> None:
    assert result("cached", "reused").nothing_ran and result().nothing_ran
    assert not result("cached", "ran").nothing_ran


def test_a_step_is_found_by_its_key() -> None:
    assert result("ran", "cached").step("t-1").state == "cached"
    with pytest.raises(KeyError):
        result("ran").step("t-1")


def test_only_instances_of_a_fanned_out_stage_are_averaged() -> None:
    assert result("ran", "ran").spreads == {}
    assert str(result("ran", "ran", fanned=True).spreads["over seed"]["t"]["x"]) == "0.5 ± 0.7071"
