"""Whose data is looked at before a run starts."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import DataError, PlanError
from nemotron_steps.manifest.typegraph import TypeGraph
from nemotron_steps.resolver.plan import Plan, StepOutput, SuppliedInput
from nemotron_steps.runs import prerequisites
from tests.runs.runner_toy_plan import TRAIN, make_plan


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
    """Neither Ray nor vLLM is installed, nor is there a sandbox."""

    def absent(name: str) -> str:
        raise prerequisites.PackageNotFoundError(name)

    monkeypatch.setattr(prerequisites, "version", absent)
    monkeypatch.setattr("shutil.which", lambda name: None)


def refuse_unready(plan: Plan, store: Any = None, types: TypeGraph | None = None) -> None:
    prerequisites.refuse_unready(plan, store, types or TypeGraph())


def refused(plan: Plan) -> list[tuple[str, str, tuple[str, ...]]]:
    with pytest.raises(PlanError) as caught:
        refuse_unready(plan)
    return [
        (problem.what.partition(", which")[0], problem.where or "", problem.hints) for problem in caught.value.problems
    ]


def test_every_package_that_a_step_still_to_run_asks_for_is_named_by_its_key(without: None) -> None:
    ray, vllm = {"cluster": {"backend": "ray"}}, {"policy": {"generation": {"backend": "vllm"}}, "backend": "process"}
    problems = refused(a_plan(ray, vllm, {**ray, **vllm}, cached=(1,)))
    assert [(keys, where) for keys, where, _ in problems] == [
        ("t0, t2 need ray", "cluster.backend=ray"),
        ("t2 needs vllm", "policy.generation.backend=vllm"),
    ]
    assert problems[1][2][:2] == (
        "pip install 'nemotron-steps[vllm]'",
        "policy.generation.backend=embedded   # does without",
    )
    refuse_unready(a_plan(ray, vllm, cached=(0, 1)))
    refuse_unready(a_plan({"backend": {"name": "x"}, "other": "ray"}))


def test_gpus_are_asked_for_unless_a_cluster_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prerequisites, "NEEDS", {"gpu": lambda: prerequisites.gpus(tmp_path)})
    monkeypatch.setattr(prerequisites, "version", lambda name: "1")
    for name in ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    on_gpus = {"cluster": {"backend": "process", "gpus_per_node": 8}}
    (tmp_path / "nvidiactl").touch()
    assert refused(a_plan(on_gpus))[0][:2] == ("t0 needs gpu", "cluster.gpus_per_node=8")
    elsewhere = {"cluster": {"gpus_per_node": 8, "ray_address": "auto"}}
    for fine in ({"cluster": {"gpus_per_node": 0}}, {"cluster": {**elsewhere["cluster"], "backend": "ray"}}):
        assert "gpu" not in prerequisites.needs_of(next(iter(a_plan(fine))))
    assert "gpu" in prerequisites.needs_of(next(iter(a_plan(elsewhere))))
    assert prerequisites.needs_of(next(iter(a_plan({"env": {"nemo_gym": None}})))) == {}
    for device in ("dxg", "kfd", "nvidia0"):
        (tmp_path / device).touch()
        refuse_unready(a_plan(on_gpus))
        (tmp_path / device).unlink()
    (tmp_path / "nvidia0").touch()
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert len(refused(a_plan(on_gpus))) == 1


def test_a_machine_without_the_engine_is_told_that_alone_of_the_steps_that_need_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "t.py").write_text("import torch\n")
    monkeypatch.setattr(prerequisites, "find_spec", lambda name: None)
    monkeypatch.setattr(prerequisites, "version", Mock(side_effect=prerequisites.PackageNotFoundError))
    monkeypatch.setattr(prerequisites, "entry_module", lambda planned: planned.key)
    monkeypatch.setattr(prerequisites, "import_closure", lambda key: {} if key == "t1" else {"t": tmp_path / "t.py"})
    ray = {"backend": "ray"}
    problems = refused(a_plan(ray, ray, ray, cached=(2,)))
    assert [(keys, hints[0]) for keys, _, hints in problems] == [
        ("t0 needs torch", "pip install 'nemotron-steps[engine]'"),
        ("t1 needs ray", "pip install 'nemotron-steps[ray]'"),
    ]


@pytest.mark.parametrize(
    ("settings", "declared", "needed"),
    [
        ({"swe_agent": {"image": "x/{instance_id}", "engine": "podman"}}, (), "podman"),
        ({"swe_agents_train": {"environment": "swe_agent", "engine": "apptainer", "image": "x"}}, (), "apptainer"),
        ({"swerl_gen": {}}, (), "docker"),
        ({"code_gen": {}}, (), "bubblewrap"),
        ({"math_with_judge": {}, "nowhere": {}, "swe_agents_val": {"environment": "remote_agent"}}, (), ""),
        ({}, ("pdflatex",), "pdflatex"),  # of a third party
    ],
)
def test_what_a_step_or_its_environments_declare_is_asked_before_its_prompts_are_made(
    without: None, settings: dict[str, Any], declared: tuple[str, ...], needed: str
) -> None:
    resources = TRAIN.resources.model_copy(update={"needs": declared})
    rows = TRAIN.consumes[0].model_copy(update={"type": "rl_prompts"})
    manifest = TRAIN.model_copy(update={"resources": resources, "consumes": (rows,)})
    vars(manifest).pop("inputs", None)  # of TRAIN, once anything asked for them
    plan = a_plan({"env": {"nemo_gym": {"environments": settings}}}, manifest=manifest)
    steps = tuple(replace(step, inputs={rows.name: StepOutput("made", "rows")}) for step in plan)
    if not needed:
        return refuse_unready(Plan(steps, ("t0",)))
    ((found, _, hints),) = refused(Plan(steps, ("t0",)))
    assert found == f"t0 needs {needed}" and hints[0]
    known = tuple(
        replace(s, inputs={rows.name: SuppliedInput("x", attributes={"environments": ["mcqa"]})}) for s in steps
    )
    if settings:
        refuse_unready(Plan(known, ("t0",)))


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
    done = replace(first, key="done", manifest=checked, cached={"rows": "x:v1"})
    steps = (plain, replace(first, manifest=checked), replace(second, key="again", manifest=checked), done)
    with pytest.raises(PlanError) as caught:
        refuse_unready(Plan(steps=steps, goals=()), store, TypeGraph())
    assert [inputs["rows"] is not None for inputs in given] == [True, False]
    assert [problem.where for problem in caught.value.problems] == [f"{tmp_path}/mine.jsonl:1", "None:1"]
