"""A hybrid policy against transformers in float32: logprobs, logits and the gradient of every parameter."""

from __future__ import annotations

import pytest
import torch

from nemotron_steps.engine.losses.reduction import count_normalizers
from nemotron_steps.engine.policy.megatron import MegatronPolicy
from nemotron_steps.engine.policy.token_layout import build_layout
from nemotron_steps.engine.types import TrainBatch
from nemotron_steps.models.mapping import split
from tests.engine.policy.batches import hf_token_logprobs, policy_config, rl_loss
from tests.models.hybrid_twins import TWINS, hybrid_model


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
