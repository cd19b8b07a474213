"""A hybrid policy against transformers in float32: logprobs, logits and the gradient of every parameter."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemotron_steps.engine.generation.embedded.generator import EmbeddedGenerator
from nemotron_steps.engine.losses.loss import count_normalizers
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.engine.policy.token_layout import build_layout
from nemotron_steps.engine.types import GenerationRequest, SamplingParams, TrainBatch
from nemotron_steps.models.huggingface import load_hf_weights, save_hf_checkpoint
from nemotron_steps.models.mapping import split
from tests.engine.generation.embedded.test_generator import drain
from tests.engine.policy.batches import hf_token_logprobs, policy_config, rl_loss
from tests.models.hybrid_twins import TWINS, hybrid_model, write_hybrid


def hf_gradients(model):
    """Gradients of a transformers model under the names it saves: experts are one tensor in memory only."""
    for name, parameter in model.named_parameters():
        name = name.replace("model.", "backbone.", 1) if name.startswith("model.") else name
        stem, _, kind = name.rpartition(".")
        if stem.endswith(".experts"):
            for expert, gradient in enumerate(parameter.grad):
                yield f"{stem}.{expert}.{kind}.weight", gradient
        else:
            yield name, parameter.grad


def gradients(policy):
    for buffer in policy.buffers:
        for slot in buffer.slots:
            gradient = buffer.grads[slot.start : slot.end].view(slot.tensor.shape)
            yield from split(slot.parameter, gradient, policy.architecture)


@pytest.mark.parametrize("name", sorted(TWINS))
def test_logprobs_and_every_gradient_equal_transformers(name, hybrid_folders, batch):
    model = hybrid_model(name, initializer_range=0.1)
    policy = MegatronPolicy(policy_config(max_grad_norm=1e9), hybrid_folders(name), rl_loss())
    expected = hf_token_logprobs(model, batch)
    torch.testing.assert_close(policy.logprobs(batch), expected.detach(), atol=1e-5, rtol=0)

    loss, _ = rl_loss()(expected, batch, count_normalizers(batch))
    loss.backward()
    metrics = policy.train_step(batch)
    assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    theirs, ours = dict(hf_gradients(model)), dict(gradients(policy))
    norm = torch.stack([gradient.norm() for gradient in theirs.values()]).norm()
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert set(ours) == set(theirs)
    for parameter, gradient in theirs.items():
        torch.testing.assert_close(
            ours[parameter], gradient, atol=1e-4 * float(gradient.abs().max()), rtol=1e-4, msg=parameter
        )


def test_time_steps_below_the_published_least_one_are_those_of_decoding(tmp_path, batch):
    """Weights are drawn for steps of 0.001 and more, and trained ones go below. transformers then bounds them, but not
    where it decodes; policy and generators never do."""
    write_hybrid("dense", tmp_path, initializer_range=0.1, time_step_min=0.001)
    weights = load_hf_weights(tmp_path)
    for name, tensor in weights.items():
        if name.endswith("dt_bias"):
            tensor.fill_(-9.0)  # 1.2e-4 after softplus
        elif name.endswith("in_proj.weight"):
            tensor.mul_(3)
    save_hf_checkpoint(tmp_path / "trained", weights.items(), tmp_path)
    policy = MegatronPolicy(policy_config(), tmp_path / "trained", rl_loss())
    found = policy.logprobs(batch)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float32).eval()
    with torch.no_grad():
        bounded = hf_token_logprobs(model, batch)
        for layer in model.model.layers:
            if hasattr(layer.mixer, "time_step_limit"):
                assert layer.mixer.time_step_limit == (0.001, float("inf"))
                layer.mixer.time_step_limit = (0.0, float("inf"))
        torch.testing.assert_close(found, hf_token_logprobs(model, batch), atol=1e-5, rtol=0)
    assert float((found - bounded).abs().max()) > 1e-4
    generator = EmbeddedGenerator(
        policy.architecture, policy.weights(), max_sequences=4, max_total_length=64, eos_token_ids=[]
    )
    generator.submit(GenerationRequest("r", list(range(5, 25)), SamplingParams(20, seed=0), 1))
    completion = drain(generator)["r", 0]
    ids = torch.tensor([[*range(5, 25), *completion.token_ids]])
    with torch.no_grad():
        expected = torch.log_softmax(model(ids).logits[0, 19:-1], -1)
    sampled = expected.gather(1, ids[0, 20:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(completion.logprobs), sampled, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", sorted(TWINS))
def test_logits_equal_transformers_to_1e_5(name, hybrid_folders):
    policy = MegatronPolicy(policy_config(), hybrid_folders(name), rl_loss())
    ids = torch.randint(3, 200, (1, 120), generator=torch.Generator().manual_seed(0))
    everything = TrainBatch(ids, torch.tensor([120]), torch.ones(1, 120), torch.ones(1), *(torch.zeros(1, 120),) * 2)
    layout = build_layout(everything, [0])
    with torch.no_grad():
        hidden = policy.model.predictors(policy.model(layout), layout.source)
        logits = hidden @ policy.model.output_weight().T
        expected = hybrid_model(name, initializer_range=0.1)(ids).logits[0, :-1]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
