"""Overrides offered for what does not fit: tried, best first, none that a shorter mend does without."""

from __future__ import annotations

import json

import pytest
import yaml

from nemotron_steps.cli.asked import Asked
from nemotron_steps.cli.request import Workbench
from nemotron_steps.config.layout.memory.devices import step_memory
from nemotron_steps.config.layout.memory.mends import _generation, _ladders, _more_gpus, memory_mends, share_mends
from nemotron_steps.config.layout.memory.settings import MemorySettings
from nemotron_steps.config.layout.memory.shape import ModelShape
from nemotron_steps.config.layout.sizes import VLLM
from nemotron_steps.errors import PlanError
from nemotron_steps.manifest.models import Consumes, StepManifest, StepTable
from nemotron_steps.resolver.checks import CheckSubject
from nemotron_steps.resolver.memory import memory_fits
from tests.config.layout.memory.shapes import NANO_4B, NANO_30B, QWEN3_8B, QWEN3_30B_A3B, QWEN3_32B, SUPER_120B, flat
from tests.models.checkpoints import write_tokenizer

MODELS = {
    "nano": NANO_30B,
    "nano4b": NANO_4B,
    "super": SUPER_120B,
    "qwen8b": QWEN3_8B,
    "qwen30b": QWEN3_30B_A3B,
    "qwen32b": QWEN3_32B,
}
ROWS = {
    "prompts": {"responses_create_params": {"input": "A or B?"}, "agent_ref": {"name": "mcqa_simple_agent"}},
    "preferences": {"prompt": "A or B?", "chosen": "A", "rejected": "B"},
    "chats": {"messages": [{"role": "user", "content": "A or B?"}, {"role": "assistant", "content": "A"}]},
}
INPUTS = {
    "rl/nemo_rl/rlvr": ("policy", "prompts"),
    "rl/nemo_rl/swe": ("policy", "prompts"),
    "rl/nemo_rl/dpo": ("policy", "preferences"),
    "sft/megatron_bridge": ("model", "chats"),
}
"""Step → the port of its model, and its data."""


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Megatron checkpoints of full size, but for their weights."""
    root = tmp_path_factory.mktemp("given")
    for name, config in MODELS.items():
        hf = root / name / "hf"
        hf.mkdir(parents=True)
        (hf / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 262144}))
        write_tokenizer(hf)
        (root / name / "weights").mkdir()
        (root / name / "weights" / "common.json").write_text("{}")
    for name, row in ROWS.items():
        (root / name).mkdir()
        (root / name / "train.jsonl").write_text(json.dumps(row) + "\n")
    return root


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Workbench(home=str(tmp_path_factory.mktemp("home")))


def planned(bench, given, step, config, model, *overrides):
    port, data = INPUTS[step]
    inputs = {port: str(given / model), data: str(given / data)}
    return bench.plan(Asked(targets=(step,), config=config, inputs=inputs, overrides=overrides)).steps[-1]


def refused(bench, given, step, config, model, *overrides):
    """The problem with memory that a plan is refused for."""
    with pytest.raises(PlanError) as caught:
        planned(bench, given, step, config, model, *overrides)
    problem = caught.value.problems[0]
    assert problem.code == "E313", problem.render()
    return problem


GREEDY = ("rl/nemo_rl/rlvr", "one_node", "qwen8b", "policy.generation.vllm_cfg.gpu_memory_utilization=0.85")
UNSHARDED = (
    "sft/megatron_bridge",
    "one_node",
    "qwen8b",
    "policy.megatron_cfg.optimizer.use_distributed_optimizer=false",
)
LONG = (
    "sft/megatron_bridge",
    "one_node",
    "qwen8b",
    "policy.megatron_cfg.activation_checkpointing=false",
    "policy.max_total_sequence_length=16384",
)
WIDE = ("rl/nemo_rl/dpo", "one_node", "qwen8b", "policy.sequence_packing.train_mb_tokens=32768")
CASES = [
    ("rl/nemo_rl/rlvr", "one_gpu", "qwen8b"),
    ("rl/nemo_rl/rlvr", "one_node", "qwen30b", "policy.megatron_cfg.expert_model_parallel_size=4"),
    GREEDY,
    ("rl/nemo_rl/rlvr", "one_node", "qwen8b", "policy.generation.vllm_cfg.gpu_memory_utilization=0.1"),
    ("rl/nemo_rl/rlvr", "one_node", "qwen8b", "policy.generation.backend=embedded"),
    ("rl/nemo_rl/rlvr", "one_gpu", "nano"),
    ("rl/nemo_rl/rlvr", "one_gpu", "qwen30b"),
    ("rl/nemo_rl/rlvr", "one_gpu", "qwen32b"),
    ("rl/nemo_rl/rlvr", "test", "qwen32b"),
    WIDE,
    ("sft/megatron_bridge", "one_gpu", "qwen8b"),
    ("rl/nemo_rl/rlvr", "one_gpu", "nano4b", "policy.megatron_cfg.activation_checkpointing=false"),
    UNSHARDED,
    LONG,
    ("rl/nemo_rl/rlvr", "rlvr1", "super"),
    ("rl/nemo_rl/swe", "swe2", "super"),
]


@pytest.mark.parametrize("asked", CASES, ids=" ".join)
def test_every_hint_pasted_plans(asked, bench, given):
    problem = refused(bench, given, *asked)
    overriding = [hint for hint in problem.hints if not hint.startswith("steps show ")]
    assert overriding, problem.render()
    for hint in overriding:
        pasted = hint.partition("   #")[0].split(" ")
        assert len({override.partition("=")[0] for override in pasted}) == len(pasted), hint
        memory = planned(bench, given, *asked, *pasted).memory
        assert memory.shortages == [] and memory.devices, hint


def test_the_hint_is_what_takes_least_from_the_run(bench, given):
    """Free ones first, then smaller micro-batches and layers computed again, then host memory, then more GPUs."""
    first = refused(bench, given, *UNSHARDED).hints[0]
    assert first == "policy.megatron_cfg.optimizer.use_distributed_optimizer=true"
    first = refused(bench, given, *LONG).hints[0]
    assert first == "policy.megatron_cfg.activation_checkpointing=true"
    assert refused(bench, given, *WIDE).hints[0] == "policy.sequence_packing.train_mb_tokens=16384"
    by_rows = "policy.sequence_packing.enabled=false", "policy.train_micro_batch_size=2"
    assert refused(bench, given, *WIDE[:3], *by_rows).hints[0] == "policy.train_micro_batch_size=1"
    share = refused(bench, given, *GREEDY).hints[0]
    assert share == "policy.generation.vllm_cfg.gpu_memory_utilization=0.7"


SHARE = "vLLM's share of a GPU does not hold the generator's weights and one sequence"


POLICY = StepManifest(
    step=StepTable(id="s"), consumes=(Consumes(type="checkpoint", name="policy", bind="policy.checkpoint"),)
)


def problems(bench, config, shape, profile):
    """What is refused of RLVR's memory on a profile."""
    composed = bench.compose("rl/nemo_rl/rlvr", config, ())
    recorded = {"policy": {"model_type": "qwen3", "shape": shape}}
    return list(memory_fits(CheckSubject("key", POLICY, composed, profile, recorded)))


def test_a_share_that_holds_no_generator_has_no_hint_beside_what_mends_everything(bench):
    policy, share = problems(bench, "one_gpu", QWEN3_32B, {})
    assert "cluster.num_nodes=" in policy.hints[0] and share.what.endswith(SHARE) and share.hints == ()


def test_a_share_that_holds_no_generator_has_a_hint_of_its_own_where_nothing_mends_everything(bench):
    policy, share = problems(bench, "one_gpu", QWEN3_32B, {"nodes": 1, "gpus_per_node": 1})
    assert policy.hints == ("steps show s   # its configs, and the GPUs that each is for",)
    assert share.what.endswith(SHARE) and share.hints == ("policy.generation.vllm_cfg.gpu_memory_utilization=0.8",)


def test_memory_is_mended_with_what_a_profile_has(bench):
    wide = "cluster.num_nodes=4"
    hints = {
        nodes: problems(bench, "one_gpu", QWEN3_32B, {"nodes": nodes, "gpus_per_node": 8})[0].hints[0]
        for nodes in (1, 4)
    }
    assert wide in hints[4] and "num_nodes" not in hints[1] and "cluster.gpus_per_node=8" in hints[1]


def test_a_judges_share_is_offered_by_itself():
    shape = ModelShape.read(NANO_4B)
    key = "env.nemo_gym.genrm_model.responses_api_models.vllm_model"
    values = {
        f"{key}.model": "judge",
        f"{key}.backend": "vllm",
        f"{key}.gpu_memory_utilization": 0.05,
        "policy.train_global_batch_size": 8,
        "cluster.backend": "ray",
        "cluster.gpus_per_node": 1,
        "cluster.num_nodes": 2,
        "env.nemo_gym.num_gpu_nodes": 1,
        "cluster.gpu_memory_gib": 60,
    }
    offered = share_mends(values.get, lambda role: shape, key=f"{key}.gpu_memory_utilization")
    assert offered == [f"{key}.gpu_memory_utilization=0.2"]


def test_the_refusal_says_how_much_is_needed_of_what(bench, given):
    problem = refused(bench, given, "sft/megatron_bridge", "one_gpu", "qwen8b")
    assert problem.what == "sft/megatron_bridge: a GPU that trains has less memory than it needs while it trains"
    assert problem.expected == "at most 80.0 GiB (cluster.gpu_memory_gib)"
    assert "policy's optimizer 91.5" in problem.found and "allocator" not in problem.found


def test_where_nothing_mends_the_steps_other_configs_are_named(bench, given):
    problem = refused(bench, given, "sft/megatron_bridge", "one_gpu", "super")
    assert problem.hints == ("steps show sft/megatron_bridge   # its configs, and the GPUs that each is for",)


def test_a_model_that_nothing_fits_gets_no_override():
    """Of one process there are eight nodes more at most."""
    shape = ModelShape.read({**SUPER_120B, "hidden_size": 65536})
    values = {"policy": {"train_global_batch_size": 8}, "cluster": {"gpus_per_node": 1}}
    assert memory_mends(flat(values).get, lambda role: shape) == []


@pytest.mark.parametrize("gpus", [8, 16])
def test_what_is_mended_fits_by_the_same_arithmetic(gpus):
    shape = ModelShape.read(QWEN3_8B)
    values = {
        "policy": {"train_global_batch_size": 64, "max_total_sequence_length": 32768, "train_micro_batch_size": 4},
        "cluster": {"backend": "ray", "gpus_per_node": gpus},
    }
    found = memory_mends(flat(values).get, lambda role: shape)
    assert found
    for hint in found:
        changed = {key: yaml.safe_load(text) for key, _, text in (word.partition("=") for word in hint.split(" "))}
        settings = MemorySettings.read({**flat(values), **changed}.get)
        assert step_memory(settings, lambda role: shape).shortages == []


def test_a_judge_that_has_too_little_of_a_gpu_is_offered_more():
    shape = ModelShape.read(NANO_4B)
    key = "env.nemo_gym.genrm_model.responses_api_models.vllm_model"
    values = {
        f"{key}.model": "judge",
        f"{key}.backend": "vllm",
        f"{key}.gpu_memory_utilization": 0.05,
        "policy.train_global_batch_size": 8,
        "policy.megatron_cfg.optimizer.use_distributed_optimizer": True,
        "cluster.backend": "ray",
        "cluster.gpus_per_node": 8,
        "cluster.num_nodes": 2,
        "env.nemo_gym.num_gpu_nodes": 1,
    }
    assert memory_mends(values.get, lambda role: shape)[0] == f"{key}.gpu_memory_utilization=0.2"


def test_generators_that_are_cut_over_more_gpus_have_their_experts_cut_with_them():
    values = {
        "policy.generation.backend": "vllm",
        f"{VLLM}.tensor_parallel_size": 2,
        f"{VLLM}.expert_parallel_size": 2,
        "cluster.backend": "ray",
        "cluster.gpus_per_node": 8,
    }
    offered = list(
        _generation(MemorySettings.read(values.get), step_memory(MemorySettings.read(values.get), lambda role: None))
    )
    assert [((f"{VLLM}.tensor_parallel_size", n), (f"{VLLM}.expert_parallel_size", n)) for n in (4, 8)] in offered


def test_more_nodes_are_multiples_of_those_that_there_are():
    values = {"cluster.backend": "ray", "cluster.gpus_per_node": 8, "cluster.num_nodes": 3}
    *_, nodes = _more_gpus(MemorySettings.read(values.get), None)
    assert nodes == [(("cluster.num_nodes", count),) for count in (6, 12, 24)]


@pytest.mark.parametrize(("tensor", "together", "widths"), [(1, False, [2, 4, 8]), (4, False, [8]), (4, True, [8])])
def test_a_wider_cut_is_offered_with_what_it_needs(tensor, together, widths):
    section = "policy.megatron_cfg"
    values = {
        "cluster.backend": "ray",
        "cluster.gpus_per_node": 8,
        f"{section}.tensor_model_parallel_size": tensor,
        f"{section}.sequence_parallel": together,
    }
    first, *_ = _more_gpus(MemorySettings.read(values.get), None)
    needed = () if together else ((f"{section}.sequence_parallel", True),)
    assert first == [((f"{section}.tensor_model_parallel_size", width), *needed) for width in widths]


@pytest.mark.parametrize(("chunk", "offered"), [(2048, [1024, 512]), (1024, [512]), (512, [])])
def test_smaller_chunks_of_logprobs_are_offered_down_to_512(chunk, offered):
    settings = MemorySettings.read({"policy.logprob_chunk_size": chunk}.get)
    ladders = list(_ladders(settings, step_memory(settings, lambda role: None), None))
    found = [dict(step) for ladder in ladders for step in ladder]
    assert [step["policy.logprob_chunk_size"] for step in found if "policy.logprob_chunk_size" in step] == offered


@pytest.mark.parametrize(("offloads", "share", "offered"), [(False, 1.0, True), (True, 0.5, True), (True, 1.0, False)])
def test_moments_in_host_memory_are_offered_where_some_are_not_there_yet(offloads, share, offered):
    keys = {"optimizer_cpu_offload": offloads, "optimizer_offload_fraction": share}
    settings = MemorySettings.read({f"policy.megatron_cfg.optimizer.{key}": each for key, each in keys.items()}.get)
    ladders = list(_ladders(settings, step_memory(settings, lambda role: None), None))
    assert any(key.endswith("optimizer_offload_fraction") for ladder in ladders for key in dict(ladder[0])) is offered
