"""The memory of distillation's teachers: against what models and passes were counted to take, and by hand."""

from typing import Any

import pytest
import torch

from nemotron_steps.config.layout.memory.devices import StepMemory, step_memory
from nemotron_steps.config.layout.memory.policy import compared_bytes, stage_memory
from nemotron_steps.config.layout.memory.settings import MemorySettings
from nemotron_steps.config.layout.memory.shape import ModelShape
from nemotron_steps.engine.losses.distillation import TeacherKl
from nemotron_steps.engine.policy.logprob import (
    OutputLayer,
    TopkTokens,
    WholeDistributions,
    linear_divergence,
    linear_topk,
)
from tests.config.layout.memory.peak import Peak
from tests.config.layout.memory.shapes import QWEN3_8B, on_a_node

SHAPE = ModelShape.read(QWEN3_8B)
SECTION = "on_policy_distillation"
TEACHERS = {"a": "x", "b": "y"}


def values_of(**changes: Any) -> dict[str, Any]:
    values = {
        "grpo.num_prompts_per_step": 64,
        "grpo.num_generations_per_prompt": 1,
        "policy.train_micro_batch_size": 1,
        "policy.logprob_batch_size": 2,
        f"{SECTION}.teachers": TEACHERS,
        f"{SECTION}.topk_logits_k": 64,
        f"{SECTION}.offload": True,
    }
    return on_a_node(values, **changes)


def memory(**changes: Any) -> StepMemory:
    return step_memory(MemorySettings.read(values_of(**changes).get), lambda role: SHAPE)


def test_offloaded_teachers_take_the_device_one_at_a_time():
    assert SHAPE is not None
    weights = 2 * SHAPE.parameters
    found = memory()
    (device,) = found.devices
    assert list(device.phases) == ["generate", "teach", "train"]
    assert device.phases["teach"]["teacher", "weights"] == weights
    assert ("policy", "gradients") not in device.phases["teach"] and ("teacher", "weights") not in device.phases[
        "train"
    ]
    assert device.phases["train"]["teacher", "scores"] == 2 * 4096 * (64 * 8 + 4)  # as they come, and as they are read
    assert found.host["teachers' weights"] == 2 * weights
    assert found.host["teachers' scores"] == 64 * 4096 * (64 * 8 + 4)
    (kept,) = memory(on_policy_distillation__offload=False).devices
    assert {kept.phases[phase]["teacher", "weights"] for phase in kept.phases} == {2 * weights}
    # No process of their own: the same CUDA contexts as without them.
    (alone,) = memory(on_policy_distillation__teachers={}).devices
    contexts = {each.phases["train"]["device", "context"] for each in (device, kept, alone)}
    assert len(contexts) == 1 and "teach" not in alone.phases


@pytest.mark.parametrize(("topk", "zero"), [(16, False), (16, True), (None, False)])
def test_the_logits_of_a_comparison_are_predicted(topk, zero):
    rows, vocabulary = 32, 30_000
    hidden, weight = torch.randn(rows, 8, dtype=torch.bfloat16), torch.randn(vocabulary, 8, dtype=torch.bfloat16)
    targets, layer = torch.randint(vocabulary, (rows,)), OutputLayer(chunk=rows, vocab_size=vocabulary)
    with Peak() as passed:
        _, heaviest, tokens = linear_topk(16, hidden, weight, targets, layer)
    assert passed.most / (rows * vocabulary) <= 2 + 4 + 4  # logits twice, and logsumexp's own, which is not seen here
    kl = TeacherKl("mixed", 0.5, zero)
    whole = WholeDistributions(kl, [weight])
    given = (whole, hidden.float(), torch.zeros(rows, dtype=torch.int64)) if topk is None else None
    comparison, first, second = given or (TopkTokens(kl), heaviest, tokens)
    with Peak() as compared:
        linear_divergence(comparison, hidden.requires_grad_(), weight, targets, first, second, layer)
    settings = MemorySettings.read(
        values_of(on_policy_distillation__topk_logits_k=topk, loss_fn__zero_outside_topk=zero).get
    )
    assert compared.most / (rows * vocabulary) == pytest.approx(compared_bytes(settings), rel=0.05)
    assert SHAPE is not None  # and that is what the plan counts of a chunk
    chunks = [
        stage_memory(SHAPE, MemorySettings.read({**values_of(), "policy.logprob_chunk_size": n}.get), 0)
        for n in (256, 512)
    ]
    more = chunks[1].trains["logprobs"] - chunks[0].trains["logprobs"]
    assert more == 256 * QWEN3_8B["vocab_size"] * 16
    # Beside them the output layer's gradient, and states of 2048 answers, of which two stay for the backward pass.
    beside = QWEN3_8B["vocab_size"] * 4096 * (4 + 2 * 2) + (3 + 2) * 2048 * 4096 * 2
    assert chunks[0].trains["logprobs"] - more == beside
