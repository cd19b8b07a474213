"""Checks of one step's config against the artifacts at its ports and its profile, each by itself."""

from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.manifest.models import Constraint, Consumes, StepManifest, StepTable
from nemotron_steps.resolver.checks import (
    CHECKS,
    CheckSubject,
    chats_can_be_written,
    check_attributes,
    judges_are_asked_as_trained,
    sorted_data_is_served_in_order,
)
from nemotron_steps.resolver.layout import generators_have_gpus, layout_fits, profile_size, teachers_fit
from nemotron_steps.resolver.request import StepConfig


def subject(
    *ports: Consumes,
    config: dict[str, Any] | None = None,
    profile: dict[str, Any] | None = None,
    **artifacts: dict[str, Any],
) -> CheckSubject:
    manifest = StepManifest(step=StepTable(id="s"), consumes=ports)
    return CheckSubject("key", manifest, StepConfig(config or {}), profile or {}, artifacts)


def port(name: str, bind: Any = None) -> Consumes:
    return Consumes(type="t", name=name, bind=bind)


@pytest.mark.parametrize(
    ("roles", "written", "missing"),
    [
        (("user", "tool"), ["user"], "tool messages"),
        (("user",), None, None),
        (("user", "tool", "tools"), ["user"], "tool messages and tools"),
    ],
)
def test_messages_of_every_role_and_tools_are_written(
    roles: tuple[str, ...], written: Any, missing: str | None
) -> None:
    model = {"model_type": "qwen3", **({} if written is None else {"chat_roles": written, "chat_tools": False})}
    ports = (port("start", "policy.checkpoint"), port("prompts"))
    found = list(chats_can_be_written(subject(*ports, start=model, prompts={"roles": roles})))
    assert bool(found) == bool(missing)
    if missing:
        assert f"has {missing}, which the chat template of 'start' does not write" in found[0].what
        assert found[0].expected == ", ".join(roles)
        assert found[0].found == (", ".join(written) or "no message of any role")


UNGRADED = {"environments": []}
BY_ROW = {"env": {"should_use_nemo_gym": True}}


@pytest.mark.parametrize(
    ("trained", "settings", "hint"),
    [
        ("plain", {}, "genrm_compare.layout=plain"),
        ("roles", {}, None),
        ("roles", {"genrm_compare": {"layout": "plain"}}, "genrm_compare.layout=roles"),
        ("roles", {"mine": {"layout": "plain"}}, "mine.layout=roles"),
    ],
)
def test_a_judge_is_asked_in_the_layout_that_it_was_trained_on(
    trained: str | None, settings: dict[str, Any], hint: str | None
) -> None:
    judge = "env.nemo_gym.genrm_model.responses_api_models.vllm_model.model"
    config = {"env": {"nemo_gym": {"environments": settings}}}
    recorded = {} if trained is None else {"comparison_layout": trained}
    found = list(judges_are_asked_as_trained(subject(port("judge", judge), config=config, judge=recorded)))
    assert [problem.hints for problem in found] == ([(f"env.nemo_gym.environments.{hint}",)] if hint else [])
    assert not list(judges_are_asked_as_trained(subject(port("checkpoint_hf"), config=config, checkpoint_hf=recorded)))


@pytest.mark.parametrize(
    ("cluster", "profile", "told"),
    [
        ({"num_nodes": 2, "gpus_per_node": 8}, {"nodes": 2, "gpus_per_node": 8}, []),
        ({"num_nodes": 3, "gpus_per_node": 9}, {"nodes": 2, "gpus_per_node": 8}, ["3", "9"]),
        ({"num_nodes": 3}, {"nodes": True}, []),
        ({"num_nodes": 1}, {"nodes": 0}, ["1"]),
    ],
)
def test_no_more_is_asked_for_than_a_profile_has(
    cluster: dict[str, Any], profile: dict[str, Any], told: list[str]
) -> None:
    assert [problem.found for problem in profile_size(subject(config={"cluster": cluster}, profile=profile))] == told


@pytest.mark.parametrize(("shuffle", "told"), [(True, ["key.b"]), (False, []), (None, []), ("yes", [])])
def test_every_port_with_sorted_data_is_told_where_it_would_be_shuffled(shuffle: Any, told: list[str]) -> None:
    step = subject(port("a"), port("b"), config={"data": {"shuffle": shuffle}}, b={"order": "length"})
    assert [problem.chain for problem in sorted_data_is_served_in_order(step)] == [(chain,) for chain in told]


def test_every_check_is_asked_of_every_plan() -> None:
    ports = (port("policy", "policy.checkpoint"), port("prompts"))
    step = subject(
        *ports,
        config={**BY_ROW, "data": {"shuffle": True}, "cluster": {"num_nodes": 2}},
        profile={"nodes": 1},
        policy={"model_type": "qwen3", "chat_roles": ["user"], "tokenizer": "sha256:1"},
        prompts={**UNGRADED, "order": "length", "roles": ("tool",)},
    )
    assert teachers_fit in CHECKS and layout_fits in CHECKS
    found = [problem.what for check in CHECKS for problem in check(step)]
    for said in ("does not write", "nothing grades", "more than its profile", "would be shuffled", "chat template"):
        assert any(said in what for what in found), said


def constrained(*constraints: tuple[str, ...], **attributes: Any) -> StepManifest:
    ports = [Consumes(type="t", name="a", attributes=attributes), *(Consumes(type="t", name=name) for name in "bc")]
    rules = tuple(Constraint(same=same) for same in constraints)
    return StepManifest(step=StepTable(id="s"), consumes=tuple(ports), constraints=rules)


def test_each_attribute_of_a_port_is_required_where_it_is_known() -> None:
    manifest = constrained(kind="x", size=[1, 2])
    for known, told in (
        ({}, []),
        ({"kind": "x", "size": 2}, []),
        ({"kind": "y", "size": 3}, ["y", "3"]),
        ({"size": 3}, ["3"]),
        ({"kind": None}, ["None"]),
    ):
        found = check_attributes(manifest, {"a": known})
        assert [problem.found for problem in found] == told
    (problem,) = check_attributes(manifest, {"a": {"size": 3}}, key="k", sources={"a": "make.out"})
    assert (problem.chain, problem.expected) == (("make.out", "k.a"), "1 or 2")
    assert check_attributes(manifest, {"a": {"size": 3}})[0].chain == ("s.a",)
    (problem,) = check_attributes(constrained(("a.x", "b.x")), {"a": {"x": 1}, "b": {"x": 2}})
    assert (problem.expected, problem.found) == ("b.x = 1 (as a.x)", "2")


def laid_out(folder: Path, cluster: dict[str, Any], profile: dict[str, Any] | None = None, **more: Any) -> CheckSubject:
    for name in ("one_gpu", "one_node"):
        (folder / f"{name}.yaml").touch()
    policy = {"megatron_cfg": {"enabled": True, "tensor_model_parallel_size": more.pop("tensor", 1)}}
    if "grpo" in more:
        policy["train_global_batch_size"] = 3  # type: ignore[assignment]
    values = {"policy": policy, "cluster": {"num_nodes": 1, "backend": "ray", **cluster}, **more}
    manifest = StepManifest(step=StepTable(id="s"), consumes=(port("policy", "policy.checkpoint"),), config_dir=folder)
    model = {"model_type": "qwen3", "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 16}
    return CheckSubject("key", manifest, StepConfig(values), profile or {}, {"policy": model})


def test_a_config_for_a_single_one_is_offered_where_the_profile_has_no_more(tmp_path: Path) -> None:
    problems = profile_size(laid_out(tmp_path, {"num_nodes": 2}, {"nodes": 1}))
    assert [problem.hints[0] for problem in problems] == ["-c one_node"]


def test_memory_is_predicted_for_what_trains_on_a_layout_that_fits(tmp_path: Path) -> None:
    fits = laid_out(tmp_path, {"gpus_per_node": 1})
    assert fits.memory is not None
    assert laid_out(tmp_path, {"gpus_per_node": 1}, tensor=2).memory is None
    for part in ("policy", "cluster"):
        assert subject(config={part: fits.config.values[part]}).memory is None


TENSOR = "generation.vllm_cfg.tensor_parallel_size"


@pytest.mark.parametrize(
    ("width", "experts", "gpus", "hints"),
    [
        (16, 1, 8, (f"{TENSOR}=8", "cluster.gpus_per_node=16")),
        (12, 12, 8, (f"{TENSOR}=4 generation.vllm_cfg.expert_parallel_size=4", "cluster.gpus_per_node=12")),
        (8, 1, 8, None),
        (16, 1, 0, None),  # processes on CPU
    ],
)
def test_a_generator_has_its_gpus_on_one_node(
    width: int, experts: int, gpus: int, hints: tuple[str, ...] | None
) -> None:
    sizes = {"tensor_parallel_size": width, "expert_parallel_size": experts}
    values: dict[str, Any] = {"generation": {"backend": "vllm", "vllm_cfg": sizes}}
    values["cluster"] = {"backend": "ray", "gpus_per_node": gpus}
    told = list(generators_have_gpus(subject(config=values)))
    assert [problem.hints for problem in told] == ([] if hints is None else [hints])
