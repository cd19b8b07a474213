"""Whose data is looked at before a run starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import DataError, PlanError
from nemotron_steps.manifest.typegraph import TypeGraph
from nemotron_steps.resolver.plan import Plan
from nemotron_steps.runs import prerequisites
from tests.runs.runner_toy_plan import TRAIN, make_plan


def test_only_steps_that_are_still_to_run_are_asked_about_their_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(config: Any, inputs: Any) -> None:
        raise DataError("no rows")

    monkeypatch.setattr(prerequisites, "imported", lambda reference, planned: check)
    monkeypatch.setattr(prerequisites, "validated_config", lambda planned, opened: None)
    manifest = SimpleNamespace(step=SimpleNamespace(preflight="steps.own:check"))
    planned: Any = SimpleNamespace(key="own", cached={"rows": "digest"}, manifest=manifest, inputs={})
    plan: Any = [planned]
    nothing: Any = None
    prerequisites.refuse_unusable_data(plan, nothing, nothing)
    planned.cached = None
    with pytest.raises(PlanError) as caught:
        prerequisites.refuse_unusable_data(plan, nothing, nothing)
    assert [problem.what for problem in caught.value.problems] == ["no rows"]


def a_plan(*configs: dict[str, Any], cached: tuple[int, ...] = (), **fields: Any) -> Plan:
    """Steps t0, t1, ... with these configs, the `cached` ones of which need not run."""
    train = make_plan().steps[1]
    steps = [
        replace(train, key=f"t{at}", config=config, inputs={}, cached={"x": "x:v1"} if at in cached else None, **fields)
        for at, config in enumerate(configs)
    ]
    return Plan(steps=tuple(steps), goals=("t0",))


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither Ray nor vLLM is installed."""
    monkeypatch.setattr(prerequisites, "find_spec", lambda name: None if name in ("ray", "vllm") else object())
    monkeypatch.setattr(prerequisites, "_needs_engine", lambda planned: True)


def refused(plan: Plan) -> list[tuple[str, str, tuple[str, ...]]]:
    with pytest.raises(PlanError) as caught:
        prerequisites.refuse_missing_packages(plan)
    return [(problem.what.partition(" ")[0], problem.where or "", problem.hints) for problem in caught.value.problems]


def test_every_package_that_a_step_still_to_run_asks_for_is_named_by_its_key(without: None) -> None:
    ray, vllm = {"cluster": {"backend": "ray"}}, {"policy": {"generation": {"backend": "vllm"}}, "backend": "process"}
    problems = refused(a_plan(ray, vllm, {**ray, **vllm}, cached=(1,)))
    assert [(key, where) for key, where, _ in problems] == [
        ("t0", "cluster.backend=ray"),
        ("t2", "cluster.backend=ray"),
        ("t2", "policy.generation.backend=vllm"),
    ]
    assert problems[2][2][:2] == (
        "pip install 'nemotron-steps[vllm]'",
        "policy.generation.backend=embedded   # does without",
    )
    prerequisites.refuse_missing_packages(a_plan(ray, vllm, cached=(0, 1)))
    prerequisites.refuse_missing_packages(a_plan({"backend": {"name": "x"}, "other": "ray"}))


def test_a_machine_without_the_engine_is_told_that_alone_of_the_steps_that_need_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prerequisites, "find_spec", lambda name: None)
    monkeypatch.setattr(prerequisites, "_needs_engine", lambda planned: planned.key != "t1")
    ray = {"backend": "ray"}
    problems = refused(a_plan(ray, ray, ray, cached=(2,)))
    assert [(key, hints[0]) for key, _, hints in problems] == [
        ("t0", "pip install 'nemotron-steps[engine]'"),
        ("t1", "pip install 'nemotron-steps[ray]'"),
    ]


def test_every_step_without_code_that_is_still_to_run_is_named() -> None:
    bare = TRAIN.model_copy(update={"step": TRAIN.step.model_copy(update={"entry": None})})
    with pytest.raises(PlanError) as caught:
        prerequisites.refuse_unimplemented(a_plan({}, {}, {}, cached=(1,), manifest=bare))
    assert len(caught.value.problems) == 2
    prerequisites.refuse_unimplemented(a_plan({}, cached=(0,), manifest=bare))


def test_a_preflight_gets_every_port_and_what_it_says_of_a_copy_names_the_users_file(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.jsonl").write_text('{"value": 3}\n')
    given: list[dict[str, Any]] = []

    def check(config: Any, inputs: dict[str, Any]) -> None:
        given.append(inputs)
        raise DataError("the row is no good", where=f"{config.data_path}:1")

    monkeypatch.setattr(prerequisites, "imported", lambda reference, planned: check)
    checked = TRAIN.model_copy(update={"step": TRAIN.step.model_copy(update={"preflight": "steps.own:check"})})
    store.add(tmp_path / "mine.jsonl", name="mine")
    plain, first, second = make_plan(rows="mine").steps[0], make_plan(rows="mine").steps[0], make_plan().steps[1]
    steps = (plain, replace(first, manifest=checked), replace(second, key="again", manifest=checked))
    with pytest.raises(PlanError) as caught:
        prerequisites.refuse_unusable_data(Plan(steps=steps, goals=()), store, TypeGraph())
    assert [inputs["rows"] is not None for inputs in given] == [True, False]
    assert [problem.where for problem in caught.value.problems] == [f"{tmp_path}/mine.jsonl:1", "None:1"]
