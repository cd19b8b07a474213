"""The hint for what does not fit: it plans when pasted, and takes least from the run."""

from __future__ import annotations

import json

import pytest
import yaml

from nemotron_steps.config.layout.memory.devices import step_memory
from nemotron_steps.config.layout.memory.settings import MemorySettings
from nemotron_steps.config.layout.memory.shape import ModelShape
from nemotron_steps.config.layout.memory.suggestions import _cuts, least_share, memory_suggestion
from nemotron_steps.errors import PlanError
from nemotron_steps.manifest.models import Consumes, StepManifest, StepTable
from nemotron_steps.resolver.checks import CheckSubject
from nemotron_steps.resolver.memory import memory_fits
from nemotron_steps.session.run_request import RunRequest
from nemotron_steps.session.session import Session
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
    return Session(home=str(tmp_path_factory.mktemp("home")))


def planned(bench, given, step, config, model, *overrides):
    port, data = INPUTS[step]
    inputs = {port: str(given / model), data: str(given / data)}
    return bench.plan(RunRequest(targets=(step,), config=config, inputs=inputs, overrides=overrides)).steps[-1]


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
    ("rl/nemo_rl/rlvr", "rlvr1", "super", "cluster.gpu_memory_gib=80"),
    ("rl/nemo_rl/swe", "swe2", "super", "cluster.gpu_memory_gib=80"),
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
    assert share == "policy.generation.vllm_cfg.gpu_memory_utilization=0.75"


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
    assert "cluster.gpus_per_node=8" in policy.hints[0] and share.what.endswith(SHARE) and share.hints == ()


def test_a_share_that_holds_no_generator_has_a_hint_of_its_own_where_nothing_mends_everything(bench):
    policy, share = problems(bench, "one_gpu", QWEN3_32B, {"nodes": 1, "gpus_per_node": 1})
    assert policy.hints == ("steps show s   # its configs, and the GPUs that each is for",)
    assert share.what.endswith(SHARE) and share.hints == ("policy.generation.vllm_cfg.gpu_memory_utilization=0.8",)


def test_memory_is_mended_with_what_a_profile_has(bench):
    has = {gpus: problems(bench, "one_gpu", QWEN3_32B, {"gpus_per_node": gpus})[0].hints[0] for gpus in (8, 4)}
    assert "cluster.gpus_per_node=8" in has[8] and has[4].startswith("steps show ")


@pytest.mark.parametrize(("node", "widths"), [(8, [4, 8]), (4, [4]), (6, []), (1, [])])
def test_tensor_parallelism_stays_within_a_node(node, widths):
    assert _cuts(2, node) == widths


@pytest.mark.parametrize(("needed", "share"), [(0, 0.05), (4, 0.05), (5, 0.1), (64, 0.8), (76, 0.95), (77, None)])
def test_a_share_holds_what_is_needed_in_twentieths_and_leaves_one(needed, share):
    assert least_share(needed, 80) == share


def test_the_refusal_says_how_much_is_needed_of_what(bench, given):
    problem = refused(bench, given, "sft/megatron_bridge", "one_gpu", "qwen8b")
    assert problem.what == "sft/megatron_bridge: a GPU that trains has less memory than it needs while it trains"
    assert problem.expected == "at most 80.0 GiB (cluster.gpu_memory_gib)"
    assert "policy's optimizer 91.5" in problem.found and "allocator" not in problem.found


def test_where_nothing_mends_the_steps_other_configs_are_named(bench, given):
    problem = refused(bench, given, "sft/megatron_bridge", "one_gpu", "super")
    assert problem.hints == ("steps show sft/megatron_bridge   # its configs, and the GPUs that each is for",)


def test_a_model_that_nothing_fits_gets_no_override():
    shape = ModelShape.read({**SUPER_120B, "hidden_size": 65536})
    values = {"policy": {"train_global_batch_size": 8}, "cluster": {"gpus_per_node": 1}}
    assert memory_suggestion(flat(values).get, lambda role: shape) == []


@pytest.mark.parametrize("gpus", [8, 16])
def test_what_is_mended_fits_by_the_same_arithmetic(gpus):
    shape = ModelShape.read(QWEN3_8B)
    values = {
        "policy": {"train_global_batch_size": 64, "max_total_sequence_length": 32768, "train_micro_batch_size": 4},
        "cluster": {"backend": "ray", "gpus_per_node": gpus},
    }
    found = memory_suggestion(flat(values).get, lambda role: shape)
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
    assert memory_suggestion(values.get, lambda role: shape)[0] == f"{key}.gpu_memory_utilization=0.15"
