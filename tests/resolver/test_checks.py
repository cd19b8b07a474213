"""Batch-size and GPU arithmetic, on the recipes' own numbers."""

import copy
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nemotron_steps.manifest.models import Consumes, StepManifest, StepTable
from nemotron_steps.resolver.checks import (
    CHECKS,
    CheckSubject,
    prompts_are_graded,
)
from nemotron_steps.resolver.request import StepConfig

MANIFEST = StepManifest(
    step=StepTable(id="rl"), consumes=(Consumes(type="checkpoint", name="policy", bind="policy.checkpoint"),)
)


def config(**changes: Any) -> dict[str, Any]:
    """RLHF of Super3 without its environment nodes: 64 nodes of 8, half of them for generation."""
    values: dict[str, Any] = {
        "grpo": {"num_prompts_per_step": 128, "num_generations_per_prompt": 16},
        "loss_fn": {"force_on_policy_ratio": True},
        "policy": {
            "train_global_batch_size": 2048,
            "megatron_cfg": {
                "enabled": True,
                "tensor_model_parallel_size": 4,
                "pipeline_model_parallel_size": 1,
                "context_parallel_size": 4,
                "expert_model_parallel_size": 8,
            },
            "generation": {
                "backend": "vllm",
                "vllm_cfg": {"tensor_parallel_size": 4},
                "colocated": {"enabled": False, "generation_devices": 256},
            },
        },
        "cluster": {"num_nodes": 64, "gpus_per_node": 8},
    }
    for dotted, value in changes.items():
        node = values
        *parents, last = dotted.split("__")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return values


def found(
    values: dict[str, Any], profile: dict[str, Any] | None = None, model: dict[str, Any] | None = None
) -> list[tuple[str, str, tuple[str, ...]]]:
    subject = CheckSubject("rl", MANIFEST, StepConfig(values), profile or {}, {"policy": model or {}})
    return [(p.code, str(p.found), p.hints) for check in CHECKS for p in check(subject)]


def pasted(values: dict[str, Any], hint: str) -> dict[str, Any]:
    """The config under the overrides of a hint."""
    changed = copy.deepcopy(values)
    for override in hint.split():
        key, _, text = override.partition("=")
        *parents, last = key.split(".")
        node = changed
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = yaml.safe_load(text)
    return changed


def test_the_recipe_passes() -> None:
    assert found(config()) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"policy__train_global_batch_size": 1024}, ("E309", "1024", ("policy.train_global_batch_size=2048",))),
        ({"cluster__num_nodes": 63}, ("E310", "248 GPUs", ("policy.megatron_cfg.context_parallel_size=2",))),
        (
            {"policy__generation__vllm_cfg__tensor_parallel_size": 512},
            ("E310", "512", ("policy.generation.vllm_cfg.tensor_parallel_size=8",)),
        ),
        (
            {"policy__generation__vllm_cfg__tensor_parallel_size": 6},
            ("E310", "256", ("policy.generation.colocated.generation_devices=252",)),
        ),
        (
            {"policy__megatron_cfg__context_parallel_size": 16, "policy__train_global_batch_size": 2048 + 2},
            ("E309", "2050", ("policy.train_global_batch_size=2048",)),
        ),
    ],
)
def test_each_rule(changes: dict[str, Any], expected: tuple[str, str, tuple[str, ...]]) -> None:
    problems = found(config(**changes))
    assert expected in problems
    for hint in expected[2]:
        assert expected[:2] not in [problem[:2] for problem in found(pasted(config(**changes), hint))]


def test_ranks_on_cpu_hold_whole_copies_of_the_model() -> None:
    values: dict[str, Any] = {  # an SFT step: no rollouts, no generation
        "policy": {"train_global_batch_size": 64, "megatron_cfg": {"enabled": True, "tensor_model_parallel_size": 2}},
        "cluster": {"backend": "ray", "policy_workers": 3},
    }
    assert found(values) == [("E310", "3 ranks", ("cluster.policy_workers=4",))]
    values["cluster"]["policy_workers"] = 4
    assert found(values) == []
    del values["cluster"]["policy_workers"]
    ((code, ranks, hints),) = found(values)
    assert (code, ranks) == ("E310", "1 rank")
    assert "cluster.policy_workers=2" in hints and all(found(pasted(values, hint)) == [] for hint in hints)


MODELS = {
    "Qwen3-0.6B": ("qwen3", 28, 16, 8, 3072, 0),
    "Qwen3-8B": ("qwen3", 36, 32, 8, 12288, 0),
    "Llama-3.1-70B": ("llama", 80, 64, 8, 28672, 0),
    "Qwen3-30B-A3B": ("qwen3_moe", 48, 32, 4, 768, 128),
    "Qwen3-235B-A22B": ("qwen3_moe", 94, 64, 4, 1536, 128),
    "Nemotron-3-Nano": ("nemotron_h", 52, 32, 2, 1856, 128),
}
HYBRID = {"mamba_num_heads": 64, "mamba_groups": 8, "shared_expert_width": 3712}
"""What Nemotron 3 Nano has beside."""


def attributes(name: str) -> dict[str, Any]:
    family, layers, heads, shared, width, experts = MODELS[name]
    width_key = "moe_intermediate_size" if experts else "intermediate_size"
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        width_key: width,
        **({"num_experts": experts} if experts else {}),
        **(HYBRID if family == "nemotron_h" else {}),
    }


DENSE = {"policy__megatron_cfg__expert_model_parallel_size": 1}


def test_lengths_beyond_the_models_positions_are_part_of_what_is_refused_and_mended() -> None:
    values = config(policy__max_total_sequence_length=65_536, policy__generation__max_new_tokens=65_536, **DENSE)
    values["policy"]["max_total_sequence_length_end"] = 131_072
    model = {"model_type": "qwen3", "sequence_length": 40_960}
    ((code, lengths, hints),) = found(values, model=model)
    assert code == "E310"
    assert lengths == ("max_total_sequence_length: 65536; max_total_sequence_length_end: 131072; max_new_tokens: 65536")
    assert [found(pasted(values, hint), model=model) for hint in hints] == [[]]
    model["sequence_length"] = 100_000
    ((_, lengths, hints),) = found(values, model=model)
    assert lengths == "131072" and hints == ("policy.max_total_sequence_length_end=100000",)


def test_a_judge_and_an_evaluated_model_have_positions_for_what_is_asked_of_them() -> None:
    judge = "env.nemo_gym.genrm_model.responses_api_models.vllm_model"
    for key, length in (
        (f"{judge}.model", f"{judge}.max_total_sequence_length"),
        ("model", "evaluation.max_total_sequence_length"),
    ):
        manifest = StepManifest(step=StepTable(id="rl"), consumes=(Consumes(type="hf", name="it", bind=key),))
        values = pasted({}, f"{length}=4096")
        model = {"it": {"model_type": "qwen3", "sequence_length": 2048}}
        subject = CheckSubject("rl", manifest, StepConfig(values), {}, model)
        (problem,) = [problem for check in CHECKS for problem in check(subject)]
        assert (problem.code, problem.hints) == ("E312", (f"{length}=2048",))
        mended = CheckSubject("rl", manifest, StepConfig(pasted(values, problem.hints[0])), {}, model)
        assert [problem for check in CHECKS for problem in check(mended)] == []


def test_a_model_without_a_chat_template_or_with_another_tokenizer_is_refused() -> None:
    values, seen = config(**DENSE), {"model_type": "qwen3", "tokenizer": "sha256:1"}
    ((code, _, hints),) = found(values, model=seen)
    assert code == "E312" and hints[0].startswith("cp TEMPLATE.jinja")
    assert found(values, model={**seen, "chat_template": "sha256:2"}) == []
    larger = {**seen, "chat_template": "sha256:2", "vocab_size": 100, "tokenizer_size": 101}
    assert [problem[:2] for problem in found(values, model=larger)] == [("E312", "101")]
    assert found(values, model={**larger, "tokenizer_size": 100}) == []


SIZES = st.sampled_from([1, 2, 3, 4, 8])


@given(SIZES, SIZES, SIZES, SIZES, st.integers(1, 6), SIZES, st.sampled_from([None, *MODELS]), st.booleans())
def test_a_refused_layout_has_a_hint_that_mends_it(
    tp: int, pp: int, cp: int, ep: int, nodes: int, per_node: int, name: str | None, samples: bool
) -> None:
    """And one that passes divides everything."""
    values: dict[str, Any] = {
        "policy": {
            "megatron_cfg": {
                "enabled": True,
                "tensor_model_parallel_size": tp,
                "pipeline_model_parallel_size": pp,
                "context_parallel_size": cp,
                "expert_model_parallel_size": ep,
                "sequence_parallel": True,
            }
        },
        "cluster": {"num_nodes": nodes, "gpus_per_node": per_node, "backend": "ray"},
    }
    if samples:
        generation = {"backend": "vllm", "vllm_cfg": {"tensor_parallel_size": tp}, "colocated": {"enabled": True}}
        values["policy"]["generation"] = generation
    model = attributes(name) if name is not None else {}
    problems = found(values, model=model)
    gpus = nodes * per_node
    even = per_node % tp == 0 and gpus % (tp * pp * cp) == 0 and gpus // pp % ep == 0
    if samples:
        even = even and per_node % tp == 0
    if name is not None:
        family, layers, heads, shared, width, experts = MODELS[name]
        even = even and heads % tp == 0 and (shared % tp == 0 or tp % shared == 0)
        if family == "nemotron_h":  # stages may be unequal; 64 Mamba heads in 8 groups
            even = even and 8 % tp == 0 and 64 // tp % cp == 0
        else:
            even = even and layers % pp == 0
        even = even and (experts % ep == 0 if experts else ep == 1 and width % tp == 0)
        if samples:
            even = even and heads % tp == 0 and width % tp == 0
    assert (not problems) == even
    for _ in range(6):  # each hint meets its own constraint, and all of them one after another all
        if not problems:
            break
        said = problems[0]
        values = pasted(values, said[2][0])
        problems = found(values, model=model)
        assert said not in problems
    assert not problems


@pytest.mark.parametrize(
    ("by_row", "attributes", "judged", "hint"),
    [
        (True, {"environments": []}, False, "reward=FILE.py:FUNCTION"),
        (True, {"environments": []}, True, "env.should_use_nemo_gym=false env.environment=genrm_compare"),
        (False, {"environments": []}, False, None),
    ],
)
def test_prompts_that_nothing_grades_are_refused_with_what_would(
    by_row: bool, attributes: dict[str, Any], judged: bool, hint: str | None
) -> None:
    manifest = StepManifest(
        step=StepTable(id="rl"),
        consumes=(
            Consumes(type="rl_prompts", name="prompts"),
            Consumes(type="reward_model_hf", name="reward_model", required=judged),
        ),
    )
    config = StepConfig({"env": {"should_use_nemo_gym": by_row}})
    problems = list(prompts_are_graded(CheckSubject("rl", manifest, config, {}, {"prompts": attributes})))
    assert [(p.code, p.hints[0], p.chain) for p in problems] == ([("E304", hint, ("rl.prompts",))] if hint else [])
