"""One layer of experts against transformers' nemotron_h: router, groups, latent and shared experts."""

from __future__ import annotations

import pytest
import torch

from nemotron_steps.engine.policy.distributed import parallel_dims as parallel
from nemotron_steps.engine.policy.distributed.parallel_dims import ParallelDims
from nemotron_steps.engine.policy.model import transformer_config
from nemotron_steps.engine.policy.moe.moe_layer import MoeLayer, _ToChoices, inverse, permute
from nemotron_steps.engine.policy.moe.router import counting
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.megatron_core import on_available_device

HIDDEN, EXPERTS, TOKENS = 48, 12, 70


def theirs_and_ours(latent=0, groups=1, top_groups=1, normalized=True, scale=2.5):
    """transformers' layer and the policy's with the same random weights and biases."""
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE

    config = NemotronHConfig(
        hidden_size=HIDDEN,
        layers_block_type=["moe"],
        n_routed_experts=EXPERTS,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        moe_shared_expert_intermediate_size=36,
        moe_latent_size=latent or None,
        n_group=groups,
        topk_group=top_groups,
        norm_topk_prob=normalized,
        routed_scaling_factor=scale,
    )
    torch.manual_seed(0)
    theirs = NemotronHMoE(config, layer_idx=0).float()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    theirs.gate.e_score_correction_bias.normal_(std=0.3)
    architecture = Architecture(
        family="nemotron_h",
        hidden_size=HIDDEN,
        num_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        ffn_hidden_size=64,
        vocab_size=100,
        rope_theta=1.0,
        norm_eps=1e-5,
        max_position_embeddings=64,
        num_experts=EXPERTS,
        experts_per_token=3,
        moe_ffn_hidden_size=20,
        norm_topk_prob=normalized,
        router_bias=True,
        activation="relu2",
        router_score="sigmoid",
        router_groups=groups,
        router_top_groups=top_groups,
        routed_scaling_factor=scale,
        shared_ffn_hidden_size=36,
        moe_latent_size=latent,
    )
    layout = ParallelDims()
    parallel.initialize(layout)
    with on_available_device():
        ours = MoeLayer(transformer_config(architecture, layout, torch.float32), architecture, layout, False)
    pairs = {
        "router.weight": theirs.gate.weight,
        "router.expert_bias": theirs.gate.e_score_correction_bias,
        "experts.linear_fc1.weight": theirs.experts.up_proj,
        "experts.linear_fc2.weight": theirs.experts.down_proj,
        "shared_experts.linear_fc1.weight": theirs.shared_experts.up_proj.weight,
        "shared_experts.linear_fc2.weight": theirs.shared_experts.down_proj.weight,
    }
    if latent:
        pairs["fc1_latent_proj.weight"] = theirs.fc1_latent_proj.weight
        pairs["fc2_latent_proj.weight"] = theirs.fc2_latent_proj.weight
    own = dict(ours.named_parameters())
    assert set(own) == set(pairs)
    for name, tensor in pairs.items():
        own[name].data.copy_(tensor.detach())
    return theirs, ours, pairs


@pytest.mark.parametrize(
    "changes",
    [{}, {"latent": 16}, {"groups": 4, "top_groups": 2}, {"normalized": False, "latent": 16, "scale": 1.0}],
    ids=str,
)
def test_experts_equal_transformers_with_every_gradient(changes):
    theirs, ours, pairs = theirs_and_ours(**changes)
    states = torch.randn(TOKENS, HIDDEN)
    direction = torch.randn(TOKENS, HIDDEN)
    inputs = [states.clone().requires_grad_() for _ in range(2)]
    expected = theirs(inputs[0][None])[0]
    with counting([ours.router]):
        found = ours.mix(inputs[1][:, None], torch.ones(TOKENS))[:, 0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    (expected * direction).sum().backward()
    (found * direction).sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, atol=1e-4, rtol=1e-4)
    for name, parameter in ours.named_parameters():
        if name != "router.expert_bias":
            torch.testing.assert_close(parameter.grad, pairs[name].grad, atol=1e-4, rtol=1e-4, msg=name)
    assert int(ours.router.load.sum()) == TOKENS * 3


def test_groups_and_biases_choose_and_scores_weigh():
    _, ours, _ = theirs_and_ours(groups=4, top_groups=1)
    states = torch.randn(TOKENS, HIDDEN)
    ours.router.expert_bias.data.zero_()
    ours.router.expert_bias.data[3:6] = 10.0  # the second group of three
    weights, chosen = ours.router(states, torch.ones(TOKENS))
    assert bool((chosen.sort().values == torch.tensor([3, 4, 5])).all())
    scores = (states @ ours.router.weight.T).sigmoid().gather(1, chosen)
    torch.testing.assert_close(weights, 2.5 * scores / scores.sum(-1, keepdim=True))


def test_the_router_is_exact_in_bfloat16():
    _, ours, _ = theirs_and_ours()
    states = torch.randn(TOKENS, HIDDEN).bfloat16()
    weights, chosen = ours.router(states, torch.ones(TOKENS))
    again, same = ours.router(states.float(), torch.ones(TOKENS))
    assert weights.dtype is torch.float32 and torch.equal(weights, again) and torch.equal(chosen, same)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathers_have_autograds_gradients_summed_once(dtype):
    """The way to the experts and back on a GPU, whose gradients are gathers."""
    chosen = torch.stack([torch.randperm(EXPERTS)[:5] for _ in range(TOKENS)])
    order = chosen.flatten().argsort(stable=True)
    back = inverse(order)
    states = torch.randn(TOKENS, 8, dtype=dtype)
    direction = (torch.randint(-255, 256, (TOKENS * 5, 8)) / 64).to(dtype)  # whose sums float32 holds, in any order
    plain, gathered = (states.clone().requires_grad_() for _ in range(2))
    expected = plain.index_select(0, order // 5).index_select(0, back)
    found = permute(_ToChoices.apply(gathered, order, back), back, order)
    assert torch.equal(found, expected)
    (found * direction).sum().backward()
    exact = direction.double().view(TOKENS, 5, 8).sum(1)
    assert torch.equal(gathered.grad, exact.to(dtype))
    (expected * direction).sum().backward()
    if dtype is torch.float32:
        assert torch.equal(gathered.grad, plain.grad)
