"""The hint for what does not fit: it plans when pasted, and begins with what an expert would try."""

import json

import pytest

from nemotron_steps.errors import PlanError
from nemotron_steps.session.run_request import RunRequest
from nemotron_steps.session.session import Session
from tests.config.layout.memory.shapes import NANO_30B, QWEN3_8B, QWEN3_30B_A3B, SUPER_120B
from tests.models.checkpoints import write_tokenizer

MODELS = {
    "nano": NANO_30B,
    "super": SUPER_120B,
    "qwen8b": QWEN3_8B,
    "qwen30b": QWEN3_30B_A3B,
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
RLVR, SFT, MEGATRON = "rl/nemo_rl/rlvr", "sft/megatron_bridge", "policy.megatron_cfg"
SHARE = "policy.generation.vllm_cfg.gpu_memory_utilization"


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


PACKED = "policy.sequence_packing.train_mb_tokens"
CASES = {  # of a step, its config, its model and overrides: what the hint begins with; "steps show" where none helps
    (RLVR, "one_gpu", "qwen8b"): PACKED,
    (RLVR, "one_node", "qwen30b", f"{MEGATRON}.expert_model_parallel_size=4"): SHARE,
    (RLVR, "one_node", "qwen8b", f"{SHARE}=0.85"): f"{SHARE}=0.",
    (RLVR, "one_node", "qwen8b", f"{SHARE}=0.1"): f"{SHARE}=0.",
    (RLVR, "one_node", "qwen8b", "policy.generation.backend=embedded"): "policy.generation.max_sequences=",
    (RLVR, "one_node", "qwen30b", f"{MEGATRON}.optimizer.use_distributed_optimizer=false"): SHARE,  # of many measures
    (SFT, "one_gpu", "super"): "steps show",
    (SFT, "one_node", "qwen8b", f"{MEGATRON}.optimizer.use_distributed_optimizer=false"):
        f"{MEGATRON}.optimizer.use_distributed_optimizer=true",
    (SFT, "one_node", "qwen8b", f"{MEGATRON}.activation_checkpointing=false", "policy.max_total_sequence_length=16384"):
        f"{MEGATRON}.activation_checkpointing=true",
    ("rl/nemo_rl/dpo", "one_node", "qwen8b", "policy.sequence_packing.enabled=false",
     "policy.train_micro_batch_size=2"): "policy.train_micro_batch_size=1",
    ("rl/nemo_rl/swe", "swe2", "super", "cluster.gpu_memory_gib=80"): "",
}  # fmt: skip


@pytest.mark.parametrize(("asked", "first"), CASES.items(), ids=str)
def test_every_hint_pasted_plans(asked, first, bench, given):
    problem = refused(bench, given, *asked)
    assert problem.hints[0].startswith(first), problem.render()
    assert problem.expected.endswith(("(cluster.gpu_memory_gib)", f"({SHARE})"))
    for hint in problem.hints:
        if not hint.startswith("steps show "):
            memory = planned(bench, given, *asked, *hint.partition("   #")[0].split(" ")).memory
            assert memory.shortages == [] and memory.devices, hint
