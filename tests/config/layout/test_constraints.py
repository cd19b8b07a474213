"""What of a layout violates which constraint, under which key, and what its hint makes of it."""

from typing import Any

import pytest
import yaml

from nemotron_steps.config.layout.constraints import raise_if_violated, violations
from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.config.layout.parallel_config import KEYS, JudgeLayout, ParallelConfig, TeacherLayout, judge_copies
from nemotron_steps.errors import ConfigError

TENSOR, PIPELINE, CONTEXT, EXPERT, WIDTH = (
    KEYS[name] for name in ("tensor", "pipeline", "context", "expert", "generator_width")
)
DTENSOR = "policy.dtensor_cfg.tensor_parallel_size"
BATCH, NODES, GENERATING, WORKERS = (KEYS[name] for name in ("batch", "nodes", "generation_devices", "workers"))
NODE: dict[str, Any] = {"backend": "ray", "gpus_per_node": 8}
APART: dict[str, Any] = {**NODE, "samples": True, "colocated": False}
VLLM: dict[str, Any] = {"samples": True, "uses_vllm": True}


def dense(**sizes: Any) -> ModelSpec:
    return ModelSpec("llama", **sizes)


def mixture(**sizes: Any) -> ModelSpec:
    return ModelSpec("qwen3_moe", experts=8, **sizes)


def mamba(heads: int, groups: int) -> ModelSpec:
    return ModelSpec("nemotron_h", mamba_heads=heads, mamba_groups=groups)


HEADS = dense(attention_heads=32, key_value_heads=2, head_dim=128)

ACCEPTED: list[tuple[dict[str, Any], ModelSpec | None]] = [
    ({"tensor": 8, "context": 8}, HEADS),  # more than key-value heads
    ({"tensor": 6}, dense(attention_heads=36, key_value_heads=2, head_dim=96)),
    ({"pipeline": 3}, ModelSpec("nemotron_h", layers=4)),
    ({"context": 8}, mamba(8, 4)),  # two ranks share a group
    ({**VLLM, "generator_width": 4}, mamba(8, 8)),
    ({**VLLM, "generator_width": 4}, mamba(8, 1)),  # which vLLM repeats
    ({"length": 512, "length_end": 512, "new_tokens": 512}, dense(positions=512)),
    ({"tensor": 3}, None),  # of one process nothing is placed
    ({**NODE, "nodes": 2, "tensor": 8, "pipeline": 2}, None),
    ({**NODE, "judge_nodes": 1, "nodes": 2, "judges": (JudgeLayout("a", width=8),)}, None),
]
REFUSED: list[tuple[dict[str, Any], ModelSpec | None, str, str, str]] = [
    ({"model_type": "qwen3"}, dense(), KEYS["model_type"], "the config is for qwen3 models", "null"),
    ({"tensor": 4}, dense(attention_heads=6, key_value_heads=2), TENSOR, "does not divide 6 attention heads", "3"),
    ({"tensor": 6}, dense(attention_heads=36, key_value_heads=2, head_dim=64), TENSOR,
     "does not divide 2560 rows of queries, keys and values", "5"),
    ({"tensor": 4, "sequence_parallel": True}, mixture(shared_width=6), TENSOR, "rows of the shared expert", "3"),
    ({"pipeline": 5}, ModelSpec("nemotron_h", layers=4), PIPELINE, "is more than the 4 layers", "1"),
    ({"expert": 2}, dense(), EXPERT, "needs a mixture of experts", "1"),
    ({"expert": 3}, mixture(), EXPERT, "does not divide 8 experts", "2"),
    ({"router_replay": True}, dense(), KEYS["router_replay"], "needs a mixture of experts", "false"),
    ({"tensor": 2}, mixture(), KEYS["sequence_parallel"], "needs sequence parallelism", "true"),
    ({"router_bias_update_rate": 0.1, "samples": True}, mixture(), KEYS["router_bias_update_rate"], "generator", "0"),
    ({"mtp_layers": 1}, dense(mtp_layers=0), KEYS["mtp_layers"], "no block of multi-token prediction", "0"),
    ({"mtp_layers": 2}, dense(mtp_layers=1), KEYS["mtp_layers"], "not as many blocks",
     f"{KEYS['mtp_repeated']}=true"),
    ({"mtp_layers": 2, "mtp_repeated": True}, dense(mtp_layers=2), KEYS["mtp_repeated"], "the model has 2", "false"),
    ({"context": 16}, mamba(8, 4), CONTEXT, "does not divide 8 Mamba heads of a tensor-parallel rank", "8"),
    ({"tensor": 4}, mamba(8, 2), TENSOR, "does not divide 2 Mamba heads and their groups", "2"),
    ({"dtensor": True, "tensor": 4}, dense(key_value_heads=6), DTENSOR, "does not divide 6 key-value heads", "3"),
    ({"dtensor": True, "tensor": 2}, mixture(), DTENSOR, "does not cut experts", "1"),
    ({"dtensor": True, "tensor": 2}, mamba(8, 8), DTENSOR, "does not cut hybrid models", "1"),
    ({**VLLM, "generator_width": 4}, mamba(8, 2), WIDTH, "does not divide 2 groups of Mamba heads (vLLM)", "2"),
    ({**VLLM}, ModelSpec("nemotron_h", bounds_time_steps=True), KEYS["uses_vllm"], "time_step_limit", "embedded"),
    ({"length": 513}, dense(positions=512), KEYS["length"], "is more than the positions of the model", "512"),
    ({"new_tokens": 513}, dense(positions=512), KEYS["new_tokens"], "is more than the positions", "512"),
    ({**NODE, "tensor": 16, "nodes": 2}, None, TENSOR, "=16 does not divide the 8 GPUs of a node", "8"),
    ({**NODE, "pipeline": 3}, None, NODES, "PP=3 does not divide the 8 GPUs that train", f"{PIPELINE}=1"),
    ({**NODE, "tensor": 4, "pipeline": 2, "context": 2}, None, NODES, "TP×PP×CP=16 does not divide the 8 GPUs",
     f"{CONTEXT}=1"),
    ({**NODE, "expert": 16}, None, EXPERT, "does not divide the 8 GPUs of a pipeline stage", "8"),
    ({**NODE, "workers": 4}, None, WORKERS, "follows from the devices", "null"),
    ({"backend": "ray", "tensor": 2, "pipeline": 2, "expert": 4}, None, WORKERS, "TP×PP=4 does not divide the 1 policy",
     "8"),
    ({**NODE, "judge_nodes": 2}, None, KEYS["judge_nodes"], "judges take 2 of 1 node", f"{NODES}=3"),
    ({**NODE, "teachers": (TeacherLayout("a"),)}, None, NODES, "teachers take 8 GPUs of 8", "2"),
    ({**APART, "generation_devices": 8}, None, GENERATING, "generation takes 8 GPUs of 8", "4"),
    ({**APART, "generation_devices": 3, "generator_width": 2}, None, GENERATING, "do not make whole generators", "2"),
    ({**NODE, **VLLM, "generator_width": 16}, None, WIDTH, "needs more than the 8 that generate on a node", "8"),
    ({**NODE, "judges": (JudgeLayout("genrm_model", width=2),)}, None,
     f"{JudgeLayout('genrm_model').section}.tensor_parallel_size", "needs nodes that are kept for judges", "1"),
    ({**NODE, "nodes": 2, "judge_nodes": 1, "judges": (JudgeLayout("a", 8, replicas=2),)}, None, KEYS["judge_nodes"],
     "too few GPUs", "2"),
    ({**NODE, "batch": 13}, None, BATCH, "8 data-parallel ranks do not divide the training batch", "16"),
    ({"batch": 3, "prompts": 4, "group": 2}, None, BATCH, "do not fill whole training batches", "4"),
    ({"on_policy": True, "batch": 4, "prompts": 4, "group": 2}, None, BATCH, "needs one update per step", "8"),
]  # fmt: skip


def under(sizes: ParallelConfig, hint: str) -> dict[str, Any]:
    """Fields that a hint sets."""
    fields = {key: name for name, key in KEYS.items()} | {DTENSOR: "tensor"}
    said = (word.partition("=") for word in hint.split(" "))
    changed = {fields[key]: yaml.safe_load(text) for key, _, text in said if key in fields}
    return changed if "uses_vllm" not in changed else {**changed, "uses_vllm": False}


@pytest.mark.parametrize(("sizes", "model"), ACCEPTED, ids=str)
def test_what_divides_is_accepted(sizes: dict[str, Any], model: ModelSpec | None) -> None:
    assert violations(ParallelConfig(**sizes), model) == []


@pytest.mark.parametrize(("sizes", "model", "key", "what", "fix"), REFUSED, ids=str)
def test_what_does_not_divide_is_refused_at_its_key_and_its_hint_helps(
    sizes: dict[str, Any], model: ModelSpec | None, key: str, what: str, fix: str
) -> None:
    layout = ParallelConfig(**sizes)
    with pytest.raises(ConfigError) as caught:
        raise_if_violated(violations(layout, model))
    error = caught.value
    assert error.where == key and what in error.what
    (hint,) = error.hints
    assert (fix if "=" in fix else f"{key}={fix}") in hint.split(" ")
    changed = under(layout, hint)
    if changed:
        after = violations(ParallelConfig(**{**sizes, **changed}), model)
        assert error.what not in [violation.what for violation in after]


def test_judges_fill_an_equal_share_of_their_nodes_each() -> None:
    kept = ParallelConfig(nodes=4, judge_nodes=2, gpus_per_node=8)
    judges = (JudgeLayout("a", width=2), JudgeLayout("b", width=3))
    assert judge_copies(kept, judges) == {"a": 4, "b": 2}  # of width 3 a node holds two
    assert judge_copies(kept, (*judges[:1], JudgeLayout("b", width=8, replicas=2))) == {"a": 4, "b": 2}
    assert judge_copies(ParallelConfig(), judges) == {"a": 1, "b": 1}
