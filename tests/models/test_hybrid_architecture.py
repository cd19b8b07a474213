"""Nemotron-H's config.json, both generations, and the models that tests are made of."""

import dataclasses
import json
import math

import pytest

from nemotron_steps.artifacts.checkpoints import validate_model_folder
from nemotron_steps.config.layout.constraints import hints_of, model_violations
from nemotron_steps.config.layout.model_spec import ModelSpec
from nemotron_steps.config.layout.parallel_config import ParallelConfig
from nemotron_steps.errors import ArtifactError, UnsupportedError
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.mapping import hf_shapes
from tests.config.layout.memory.shapes import NANO_4B, NANO_30B, SUPER_120B
from tests.models.checkpoints import write_tokenizer
from tests.models.hybrid_twins import TWINS, write_hybrid

NANO = {
    **NANO_30B,
    "num_hidden_layers": 52,
    "max_position_embeddings": 262144,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "mlp_hidden_act": "relu2",
    "layer_norm_epsilon": 1e-5,
}
"""Nemotron 3 Nano's own, less what has no part in its arithmetic."""


SMALL = {**NANO, **NANO_4B, "num_hidden_layers": 42, "n_shared_experts": None}
SUPER = {**NANO, **SUPER_120B, "num_hidden_layers": 88}


@pytest.mark.parametrize(("config", "billions"), [(NANO, 31.58), (SMALL, 3.97), (SUPER, 120.67)])
def test_the_published_models_have_as_many_weights_as_published(config, billions):
    shapes = hf_shapes(Architecture.from_config(config)).values()
    assert sum(map(math.prod, shapes)) / 1e9 == pytest.approx(billions, abs=0.006)


def test_keys_that_transformers_5_still_takes_from_older_files_are_not_left_aside():
    older = {"mamba_conv_bias": False, "mamba_dt_limit": [0.01, 1.0]}
    mamba = Architecture.from_config({**NANO, "use_conv_bias": True, **older}).mamba
    assert (mamba.conv_bias, mamba.time_step_limit) == (False, (0.01, 1.0))


@pytest.mark.parametrize("name", TWINS)
def test_both_generations_of_config_files_say_the_same(name, tmp_path):
    for old in (False, True):
        write_hybrid(name, tmp_path / str(old), old_config=old)
    new, old = (Architecture.from_folder(tmp_path / str(old)) for old in (False, True))
    assert new == old
    assert "layers_block_type" not in json.loads((tmp_path / "True" / "config.json").read_text())
    assert new.pattern == TWINS[name][0]
    assert (new.mtp_layers, new.mtp_pattern) == ((1, "*E") if name == "mtp" else (0, ""))


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"num_hidden_layers": 51}, ArtifactError, "num_hidden_layers"),
        ({"hybrid_override_pattern": "MX*Q", "num_hidden_layers": 4}, ArtifactError, "found:    Q, X"),
        ({"hybrid_override_pattern": None}, ArtifactError, "layers_block_type"),
        ({"ssm_state_size": None}, ArtifactError, "lacks ssm_state_size"),
        ({"num_key_value_heads": 3}, ArtifactError, "do not divide evenly"),
        ({"layer_norm_epsilon": "small"}, ArtifactError, "layer_norm_epsilon cannot be"),
        ({"time_step_limit": [1.0, 0.1]}, ArtifactError, "time_step_limit leaves no time step"),
        ({"hidden_size": 10**400}, ArtifactError, "hidden_size cannot be"),
        ({"norm_topk_prob": "false"}, ArtifactError, "norm_topk_prob cannot be"),
        ({"mamba_num_heads": 60}, ArtifactError, "must divide evenly"),
        ({"n_group": 3}, ArtifactError, "must divide evenly"),
        ({"mlp_hidden_act": "gelu"}, UnsupportedError, "mlp_hidden_act"),
        *(
            ({key: True}, UnsupportedError, key)
            for key in ("use_bias", "mamba_proj_bias", "mlp_bias", "attention_bias")
        ),
        ({"sliding_window": 4096}, UnsupportedError, "sliding_window"),
        ({"n_shared_experts": 2}, UnsupportedError, "n_shared_experts"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(changes, error, said):
    with pytest.raises(error) as refused:
        Architecture.from_config({**NANO, **changes}, where="here/config.json")
    assert said in str(refused.value) and "here/config.json" in str(refused.value)
    assert refused.value.code and refused.value.hints


@pytest.mark.parametrize("old_config", [False, True])
@pytest.mark.parametrize("name", TWINS)
def test_what_is_recorded_of_a_checkpoint_says_as_much_of_layouts_as_its_config(name, old_config, tmp_path):
    write_hybrid(name, tmp_path, old_config=old_config)
    recorded = ModelSpec.from_attributes(validate_model_folder(tmp_path))
    facts = Architecture.from_folder(tmp_path).facts
    counted = "layers attention_heads key_value_heads experts shared_width mamba_heads mamba_groups mtp_layers"
    known = counted.split()
    assert {key: getattr(recorded, key) for key in known} == {key: getattr(facts, key) for key in known}
    assert facts.mtp_layers == (name == "mtp")
    assert facts.is_hybrid and facts.is_moe == (name != "dense")
    assert (facts.layers, facts.mamba_heads, facts.mamba_groups) == (len(TWINS[name][0]), 8, 4)


@pytest.mark.parametrize(
    ("name", "asked", "key", "mend"),
    [
        ("latent", {"mtp_layers": 1}, "mtp_num_layers", "mtp_num_layers=0"),
        ("mtp", {"mtp_layers": 2}, "mtp_num_layers", "mtp_use_repeated_layer=true"),
        ("two", {"mtp_layers": 1}, "mtp_num_layers", "mtp_num_layers=2"),
        ("two", {"mtp_layers": 3, "mtp_repeated": True}, "mtp_use_repeated_layer", "{}=false mtp_num_layers=2"),
    ],
)
def test_depths_of_prediction_that_the_checkpoint_has_no_blocks_for_are_refused(name, asked, key, mend, tmp_path):
    changes = {"num_nextn_predict_layers": 2} if name == "two" else {}
    write_hybrid("mtp" if name == "two" else name, tmp_path, **changes)
    facts, sizes = Architecture.from_folder(tmp_path).facts, ParallelConfig(**asked)
    (found,) = model_violations(sizes, facts)
    assert found.key == f"policy.megatron_cfg.{key}"
    assert ("no block" in found.what) == (name == "latent")
    full = mend.format("mtp_use_repeated_layer")
    assert hints_of([found]) == (" ".join(f"policy.megatron_cfg.{each}" for each in full.split()),)
    assert not any(
        model_violations(ParallelConfig(mtp_layers=3, mtp_repeated=True), dataclasses.replace(facts, mtp_layers=1))
    )


def test_vllm_is_refused_where_time_steps_are_bounded_and_the_embedded_generator_is_the_mend():
    sizes = ParallelConfig(samples=True, uses_vllm=True, generator_width=2)
    facts = dataclasses.replace(Architecture.from_config(NANO).facts, bounds_time_steps=True)
    assert not any(model_violations(sizes, Architecture.from_config(NANO).facts))
    (violation,) = model_violations(sizes, facts)
    assert violation.key == "policy.generation.backend" and violation.expected == "embedded"
    assert violation.hint[violation.key] == "embedded"
    assert not any(model_violations(dataclasses.replace(sizes, uses_vllm=False), facts))


@pytest.mark.parametrize(
    ("limit", "bounded"),
    [([0.0, math.inf], False), ([0.0, {"__float__": "Infinity"}], False), ([0.001, math.inf], True), ([0, 0.5], True)],
)
def test_whether_time_steps_are_bounded_is_recorded_of_a_checkpoint(limit, bounded, tmp_path):
    """So that a plan says so, which has no more than what is recorded."""
    config = {**NANO, "time_step_limit": limit}
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    attributes = validate_model_folder(tmp_path)
    assert ModelSpec.from_attributes(attributes).bounds_time_steps is bounded
    assert Architecture.from_config(config).facts.bounds_time_steps is bounded


@pytest.mark.parametrize("config", [NANO, SMALL])
def test_the_dtensor_policy_cuts_no_hybrid_over_ranks(config):
    facts = Architecture.from_config(config).facts
    sizes = ParallelConfig(dtensor=True, tensor=2)
    assert [(found.key, found.expected) for found in model_violations(sizes, facts)] == [
        ("policy.dtensor_cfg.tensor_parallel_size", "1")
    ]
    assert not any(model_violations(dataclasses.replace(sizes, tensor=1), facts))
