"""A row has the logprobs of transformers' model of that row alone, whatever rows are computed beside it: every family
and rotary scaling, packed and padded, or a refusal."""

import json
from typing import Any

import pytest
import torch

from nemotron_steps.engine.policy.dtensor import DTensorPolicy
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.errors import UnsupportedError
from tests.engine.policy.batches import grouped_batch, hf_token_logprobs, policy_config, rl_loss
from tests.models.checkpoints import LLAMA3, SIZES, YARN, write_tokenizer
from tests.models.defaults import REQUIRED

_THETA = {"rope_theta": 10000.0}
ROPES: dict[str, dict[str, Any]] = {
    "default": {**_THETA, "rope_type": "default"},
    "linear": {**_THETA, "rope_type": "linear", "factor": 2.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 16},
    "yarn": {**YARN, "original_max_position_embeddings": 16},
    "dynamic": {**_THETA, "rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        **_THETA, "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 8, "long_factor": [1.0 + number for number in range(8)],
    },
}  # fmt: skip
VARYING = ("dynamic", "longrope")
"""Their frequencies depend on the longest row past 32 positions."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"head_dim": None},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
OTHERS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "olmo2": {},
    "phi3": {"original_max_position_embeddings": 32, "sliding_window": 8},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
}
"""Known to the dtensor policy alone."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {"train_micro_batch_size": 1, "logprob_batch_size": 1},
    "together": {},
    "packed": {"sequence_packing": {"enabled": True}},
    "padded": {"make_sequence_length_divisible_by": 64},
}


def written(folder, family: str, own: dict[str, Any], rope: str) -> Any:
    """A checkpoint of a random model, and the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    positions = 32 if rope == "dynamic" else 256
    settings = {**SIZES, "num_hidden_layers": 2, "max_position_embeddings": positions, "pad_token_id": 0, **own}
    if family != "gemma3_text":
        settings["rope_parameters"] = dict(ROPES[rope])
    settings = {key: value for key, value in settings.items() if value is not None}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, bos_token_id=1, eos_token_id=2, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


CASES = [
    *((family, own, rope) for family, own in FAMILIES.items() for rope in ROPES),
    *((family, OTHERS[family], "default") for family in ("mistral", "olmo2", "gemma3_text")),
    *(("mistral", OTHERS["mistral"], rope) for rope in VARYING),
    ("phi3", OTHERS["phi3"], "longrope"),
]


@pytest.mark.parametrize(("family", "own", "rope"), CASES, ids=lambda each: each if isinstance(each, str) else "")
def test_a_row_is_the_same_alone_together_packed_and_padded(family, own, rope, tmp_path) -> None:
    model = written(tmp_path, family, own, rope)
    batch = grouped_batch(prompts=((20, 2), (5, 1), (7, 1)))
    short = grouped_batch(prompts=((9, 2), (5, 2)), width=32)
    with torch.no_grad():
        expected = {id(each): hf_token_logprobs(model, each) for each in (batch, short)}
    for layout, settings in LAYOUTS.items():
        if family in FAMILIES and rope in VARYING:
            with pytest.raises(UnsupportedError, match="rotary scaling"):
                MegatronPolicy(policy_config(**settings), tmp_path, rl_loss())
        elif family in FAMILIES:
            policy = MegatronPolicy(policy_config(**settings), tmp_path, rl_loss())
            torch.testing.assert_close(policy.logprobs(batch), expected[id(batch)], atol=2e-5, rtol=0)
        if layout == "packed":
            continue
        config = {"dtensor_cfg": {"enabled": True}, **settings}
        rows = batch
        if rope in VARYING:
            with pytest.raises(UnsupportedError, match="would change the rows beside them"):
                DTensorPolicy(policy_config(max_total_sequence_length=60, **config), tmp_path, rl_loss())
            if layout == "padded":
                continue
            config, rows = {**config, "max_total_sequence_length": 32}, short
        of_hf = DTensorPolicy(policy_config(**config), tmp_path, rl_loss())
        torch.testing.assert_close(of_hf.logprobs(rows), expected[id(rows)], atol=2e-5, rtol=0)
        if rope in VARYING:  # whatever the config said
            with pytest.raises(UnsupportedError, match="would change the rows beside them"):
                of_hf.logprobs(batch)


@pytest.mark.parametrize("family", REQUIRED)
def test_logprobs_at_transformers_defaults_are_within_what_the_docs_say(family: str, tmp_path) -> None:
    """docs/models.md: 1e-5, and for nemotron_h 5e-3 of transformers as it is, which holds time steps up."""
    from transformers import AutoConfig, AutoModelForCausalLM

    bare = {"model_type": family, **REQUIRED[family]}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**bare), dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("dt_bias", "bias")):
            torch.nn.init.normal_(parameter, mean=-4.0 if name.endswith("dt_bias") else 0.0, std=1.0)
        elif parameter.dim() > 1 and "conv1d" not in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(bare))
    write_tokenizer(tmp_path)
    batch = grouped_batch(prompts=((20, 2), (5, 1), (7, 1)))
    with torch.no_grad():
        expected = hf_token_logprobs(model, batch)
        as_it_is = expected
        if family == "nemotron_h":
            for layer in model.model.layers:
                layer.mixer.time_step_limit = model.config.time_step_limit
            expected = hf_token_logprobs(model, batch)
            assert not torch.allclose(as_it_is, expected, atol=1e-5, rtol=0)
    for kind, settings in ((MegatronPolicy, {}), (DTensorPolicy, {"dtensor_cfg": {"enabled": True}})):
        found = kind(policy_config(**settings), tmp_path, rl_loss()).logprobs(batch)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(found, as_it_is, atol=5e-3, rtol=0)
