"""`--from STAGE`: a plan whose earlier stages left nothing goes without them where it can."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nemotron_steps.errors import PlanError
from nemotron_steps.manifest.models import Consumes, StepManifest, StepTable
from nemotron_steps.resolver.plan import Instance, Plan, PlannedStep, StepOutput, SuppliedInput
from nemotron_steps.resolver.problems import MissingInput
from nemotron_steps.session.resume_from_stage import without_absent


def step(key: str, _earlier: bool = False, _cached: bool = False, **inputs: str) -> PlannedStep:
    """`port="key"`: reads that step's output; a colon makes it a reference. `__` stands for the dot of a port."""
    sources = {
        port.replace("__", "."): SuppliedInput(source) if ":" in source else StepOutput(source, "out")
        for port, source in inputs.items()
    }
    manifest = StepManifest(step=StepTable(id="x"), consumes=tuple(Consumes(type="t", name=port) for port in sources))
    cached = {"out": f"{key}:v1"} if _cached else None
    return PlannedStep(key, "x", manifest, "default", (), {}, sources, {"out": "t"}, earlier=_earlier, cached=cached)


def plan(*steps: PlannedStep, goals: tuple[str, ...], **more: Any) -> Plan:
    return Plan(steps, goals, "p", **more)


def keys(plan: Plan) -> list[str]:
    return [step.key for step in plan]


def whats(problems: Any) -> list[str]:
    return [problem.what.partition(", a stage")[0] for problem in problems]


def test_what_an_earlier_stage_would_have_left_is_missed_by_each_port() -> None:
    left = plan(step("a", True), step("b", rows="a", base="a", other="x:v1"), goals=("b",))
    with pytest.raises(PlanError) as caught:
        without_absent(left)
    assert whats(caught.value.problems) == ["'rows' of b is what a leaves", "'base' of b is what a leaves"]
    (first, _) = caught.value.problems
    assert isinstance(first, MissingInput) and first.chain == ("a", "b.rows")
    assert first.hints == ("--input b.rows=PATH", "--from a   # makes it")


def test_a_converter_of_what_is_absent_is_absent_for_the_stage_and_its_instances() -> None:
    instance = replace(step("train-1", True), instance=Instance("train", {"train.seed": "1"}))
    converters = [replace(step(key, m=source), inserted=True) for key, source in (("up", "train-1"), ("on", "up"))]
    other = replace(step("own", m="x:v1"), inserted=True)
    left = plan(instance, *converters, other, step("b", model="on", judge="own"), goals=("b",))
    with pytest.raises(PlanError) as caught:
        without_absent(left)
    (problem,) = caught.value.problems
    assert problem.what.startswith("'model' of b is what train leaves")
    assert problem.hints[1] == "--from train   # makes it"


@pytest.mark.parametrize(
    ("inputs", "goes_without"),
    [
        ({"models__a": "a", "models__b": "x:v1"}, ["models.a"]),
        ({"models__a": "a", "models_b": "b"}, None),
        ({"models__a": "a", "judges__b": "b"}, None),
        ({"models__a": "a", "models__c": "a"}, None),
    ],
)
def test_one_of_several_is_gone_without_where_another_is_fed(
    inputs: dict[str, str], goes_without: list[str] | None
) -> None:
    left = plan(step("a", True), step("b", True, True), step("c", **inputs), goals=("c",), warnings=("before",))
    if goes_without is None:
        with pytest.raises(PlanError):
            without_absent(left)
        return
    found = without_absent(left)
    last = found.steps[-1]
    kept = [port.replace("__", ".") for port in inputs if port.replace("__", ".") not in goes_without]
    assert list(last.inputs) == kept == [port.name for port in last.manifest.consumes]
    assert found.warnings[0] == "before" and "c goes without models.a" in found.warnings[1]
    assert keys(found) == (["b", "c"] if "b" in inputs.values() else ["c"])
