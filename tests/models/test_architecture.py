"""What is read from a config.json, and what follows from it."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nemotron_steps.config.families import FAMILIES
from nemotron_steps.errors import ArtifactError, UnsupportedError
from nemotron_steps.models.architecture import Architecture, facts_of, hf_folder, inverse_frequencies, read_config
from tests.models.checkpoints import SIZES
from tests.models.defaults import REQUIRED

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "initializer_range": 0.01,
    "rope_theta": 5e5,
}


MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


def read(**changes: Any) -> Architecture:
    config = {key: value for key, value in {**QWEN3, **changes}.items() if value is not ...}
    return Architecture.from_config(config)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"num_attention_heads": 7}, ArtifactError, "do not divide"),
        ({"num_hidden_layers": 2**31 - 1}, ArtifactError, "num_hidden_layers cannot be"),
        ({**MOE, "num_experts_per_tok": 5}, ArtifactError, "as many experts"),
        ({"head_dim": None, "num_attention_heads": 128}, ArtifactError, "no width"),
        ({"layer_types": 3}, ArtifactError, "layer_types cannot be"),
        ({"decoder_sparse_step": None}, ArtifactError, "decoder_sparse_step"),
        ({"model_type": "gpt2"}, UnsupportedError, "no Megatron mapping"),
        ({"model_type": "llama", "sliding_window": 4096}, UnsupportedError, "sliding_window is not implemented"),
        ({"quantization_config": {"quant_method": "fp8"}}, UnsupportedError, "quantised"),
        ({"hidden_act": "gelu"}, UnsupportedError, "SiLU"),
        *(({key: True}, UnsupportedError, key) for key in ("attention_bias", "mlp_bias", "use_sliding_window")),
        ({"layer_types": ["full_attention", "sliding_attention"]}, UnsupportedError, "full attention"),
        ({"decoder_sparse_step": 2}, UnsupportedError, "every layer"),
        ({"partial_rotary_factor": 0.5}, UnsupportedError, "partial rotary"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, UnsupportedError, "not implemented"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "extra": 1}}, UnsupportedError, "unknown rotary"),
    ],
)
def test_a_config_that_cannot_be_is_refused(change: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        read(**change)


COUNTS = [*(key for key, value in QWEN3.items() if type(value) is int), *(key for key in MOE if key != "model_type")]
NO_COUNTS = ("64", 64.0, 1.5, 0, -1, True, [64], {"a": 1}, 10**400, math.inf, math.nan)


def refusal(**changes: Any) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        read(**changes)
    assert caught.value.where == "config.json" and caught.value.expected and caught.value.hints
    return caught.value


@pytest.mark.parametrize("key", COUNTS)
def test_a_size_of_equal_layers_is_a_count_or_refused_by_name(key: str) -> None:
    for value in NO_COUNTS:
        if (key, value) != ("intermediate_size", 0):  # a mixture has no use for it
            assert key in refusal(**{**MOE, key: value}).what
    if key not in ("head_dim", "num_key_value_heads"):
        assert refusal(**{**MOE, key: None}).found == "null"
        assert refusal(**{**MOE, key: ...}).found == "no such key"
    assert "intermediate_size" in refusal(intermediate_size=0).what and read(**MOE, intermediate_size=0).is_moe


@pytest.mark.parametrize("key", ["rms_norm_eps", "initializer_range", "rope_theta"])
def test_a_number_of_equal_layers_is_finite_and_above_zero(key: str) -> None:
    for value in ("1e-5", None, True, [1.0], {}, 0, -1.0, 10**400, math.inf, math.nan):
        refused = refusal(**{key: value})
        assert f"{key} cannot be" in refused.what and refused.expected == "a number above 0"
    assert read(rope_theta=10000).rope_theta == 1e4


@pytest.mark.parametrize("model_type", [["qwen3"], None])
def test_a_family_that_is_no_name_is_refused(model_type: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no Megatron mapping"):
        read(model_type=model_type)
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, "model_type": model_type}))
    assert facts_of(tmp_path) is None


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ([1], ""),
        *(({"rope_type": "linear", "factor": bad}, ".factor") for bad in ("2", 0, -2, None, [2], True, math.nan)),
        ({"rope_type": "yarn", "original_max_position_embeddings": 0, "factor": 2.0}, ".original_max_position_emb"),
        ({"rope_type": "yarn", "beta_fast": 0, "factor": 2.0}, ".beta_fast"),
        ({"rope_type": "yarn", "truncate": "false", "factor": 2.0}, ".truncate"),
    ],
)
def test_a_rotary_scaling_that_cannot_be_is_refused_with_its_key(key: str, scaling: Any, said: str) -> None:
    assert f"{key}{said}" in refusal(**{key: scaling}).what


def test_rotary_parameters_without_a_base_take_the_one_beside_them() -> None:
    assert read(rope_parameters={"rope_type": "linear", "factor": 2.0}).rope_theta == 5e5
    assert read(rope_parameters={"rope_type": "default"}, rope_theta=...).rope_theta == 1e4


def test_null_stands_for_what_transformers_works_out_itself() -> None:
    worked_out = {"num_key_value_heads": None, "head_dim": None, "rope_scaling": None, "sliding_window": None}
    found = read(**worked_out, rope_parameters=None, layer_types=None, mlp_only_layers=None)
    assert (found.num_key_value_heads, found.head_dim, found.rope_scaling) == (8, 8, None)
    absent = dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim", "original_max_position_embeddings"))
    yarn = {"type": "yarn", "factor": 2.0}
    assert read(rope_scaling={**yarn, **absent}) == read(rope_scaling=yarn)


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        (None, 512),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 512),
        ({"rope_type": "linear", "factor": 2.0}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 512),
        ({"type": "yarn", "factor": 1.5}, 768),
    ],
)
def test_scaled_positions_reach_as_far_as_the_scaling_was_made_for(scaling: Any, positions: int) -> None:
    assert read(rope_scaling=scaling).positions == positions
    parameters = {"rope_theta": 7.0, **(scaling or {"rope_type": "default"})}
    new = read(rope_parameters=parameters, rope_theta=1.0)
    assert (new.positions, new.rope_theta) == (positions, 7.0)


def test_a_folder_is_itself_or_holds_its_config_in_hf(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    assert hf_folder(tmp_path) == tmp_path / "hf" and hf_folder(tmp_path / "hf") == tmp_path / "hf"
    config = tmp_path / "hf" / "config.json"
    for text, said in (("[" * 100_000, "is not JSON"), ("[1]", "is not an object"), ("{}", "is not JSON")):
        config.write_text(text, encoding="utf-16" if text == "{}" else "utf-8")
        with pytest.raises(ArtifactError, match=said):
            read_config(config)
    config.write_text(json.dumps(QWEN3))
    assert Architecture.from_folder(tmp_path) == read()
    (tmp_path / "hf" / "hf_quant_config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="quantised"):
        Architecture.from_folder(tmp_path)
    with pytest.raises(ArtifactError, match=r"no config\.json"):
        read_config(tmp_path / "config.json")


PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_has_the_table():
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| `(\w+)\.py` \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [(family.name, family.kind, family.module) for family in FAMILIES.values()]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_is_not_there_is_transformers_default(family: str) -> None:
    from transformers import AutoConfig

    bare: dict[str, Any] = {"model_type": family, **REQUIRED[family]}
    full = AutoConfig.for_model(**bare).to_dict()
    architecture = Architecture.from_config(full)
    assert Architecture.from_config(bare) == architecture
    assert REQUIRED[family].keys() < full.keys()
    for key in full.keys() - {"model_type"}:
        rest = {name: value for name, value in full.items() if name != key}
        if key not in REQUIRED[family]:
            assert Architecture.from_config(rest) == architecture, key
            continue
        with pytest.raises(ArtifactError, match="lacks "):
            Architecture.from_config(rest)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        {**LLAMA3, "original_max_position_embeddings": 64},
        {**LLAMA3, "original_max_position_embeddings": 8192},
        YARN,
        {**YARN, "truncate": False},
        {**YARN, "original_max_position_embeddings": 4096, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        {**YARN, "attention_factor": 1.25},
        # Past half of the head's size even the slowest pair turns often: the ramp ends behind the last of them.
        {**YARN, "original_max_position_embeddings": 2**20},
    ],
    ids=lambda scaling: "-".join(str(value) for value in scaling.values()),
)
def test_scaled_frequencies_are_those_of_transformers(scaling: dict[str, Any]) -> None:
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_theta": 10000.0, **scaling}
    config = Qwen3Config(**{**SIZES, "head_dim": 64}, rope_parameters=parameters)
    frequencies, factor = inverse_frequencies(Architecture.from_config(config.to_dict()))
    expected, expected_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-6)


def test_two_descriptions_of_positions_are_one_or_are_refused() -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    both = read(rope_parameters={**linear, "rope_theta": 5e5}, rope_scaling={"type": "linear", "factor": 2.0})
    assert both.rope_scaling is not None and both.rope_scaling.factor == 2.0 and both.rope_theta == 5e5
    for stated in (linear, {"rope_type": "default", "rope_theta": 5e5}):
        assert "different positions" in refusal(rope_parameters=stated, rope_scaling={**linear, "factor": 4.0}).what
