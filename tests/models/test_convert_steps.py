"""The two conversion steps: what goes in comes out, and plain transformers reads it."""

from __future__ import annotations

import json

import pytest
import torch

from nemotron_steps.config.schema.convert import ConvertConfig
from nemotron_steps.models.huggingface import load_hf_weights
from nemotron_steps.models.mapping import EXACT
from nemotron_steps.runs.context import plain_context
from nemotron_steps.steps.convert import hf_to_megatron, megatron_to_hf
from tests.models.hybrid_twins import write_hybrid


def converted(step, model, place, precision="keep"):
    outputs = {"checkpoint": "checkpoint_" + step.__name__.rpartition("_to_")[2]}
    context = plain_context(ConvertConfig(precision=precision), place, inputs={"model": model}, outputs=outputs)
    step(context)
    return context.outputs["checkpoint"].path


def test_greedy_text_is_the_same_after_both_conversions(checkpoint, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    back = converted(megatron_to_hf, converted(hf_to_megatron, checkpoint, tmp_path / "1"), tmp_path / "2")
    texts = []
    for folder in (checkpoint, back):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], return_tensors="pt")
        out = model.generate(**chat, max_new_tokens=12, do_sample=False, pad_token_id=0)
        texts.append(tokenizer.decode(out[0]))
    assert texts[0] == texts[1] and len(texts[0]) > 12


@pytest.mark.parametrize(("there", "back"), [("bfloat16", "keep"), ("keep", "bfloat16"), ("bfloat16", "float32")])
def test_weights_are_written_in_the_precision_that_is_asked_for(there, back, tmp_path):
    """Prediction tensors with them, and the exact ones in float32 always."""
    write_hybrid("mtp", tmp_path / "hub")
    megatron = converted(hf_to_megatron, tmp_path / "hub", tmp_path / "1", there)
    folder = converted(megatron_to_hf, megatron, tmp_path / "2", back)
    before, after = load_hf_weights(tmp_path / "hub"), load_hf_weights(folder)
    assert before.keys() == after.keys()
    dtype = torch.float32 if back == "float32" else torch.bfloat16
    for name, tensor in before.items():
        exact = name.endswith(EXACT)
        assert after[name].dtype == (torch.float32 if exact else dtype), name
        assert torch.equal(after[name], tensor if exact else tensor.bfloat16().to(dtype)), name
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
