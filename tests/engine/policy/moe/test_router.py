"""The router against its rules written as loops, and experts against transformers, replayed and balanced."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemotron_steps.engine.policy import moe as replay
from nemotron_steps.engine.policy.distributed import parallel_dims as parallel
from nemotron_steps.engine.policy.distributed.parallel_dims import ParallelDims
from nemotron_steps.engine.policy.micro_batches import check_routed_experts
from nemotron_steps.engine.policy.model import transformer_config
from nemotron_steps.engine.policy.moe import (
    MoeLayer,
    Router,
    _ToChoices,
    counting,
    inverse,
    permute,
    replay_metrics,
)
from nemotron_steps.errors import EngineError
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.megatron_core import on_available_device

EXPERTS, HIDDEN, TOKENS = 6, 5, 40


def router(**changes: Any) -> Router:
    shape: dict[str, Any] = {
        "experts_per_token": 2, "norm_topk_prob": True, "router_score": "softmax", "routed_scaling_factor": 1.0,
        "router_groups": 1, "router_top_groups": 1, "num_experts": EXPERTS, "hidden_size": HIDDEN, "router_bias": False,
    }  # fmt: skip
    made = Router(SimpleNamespace(**{**shape, **changes}), torch.float32, frozen=False)  # type: ignore[arg-type]
    g = torch.Generator().manual_seed(1)
    made.weight.data.copy_(torch.randn(EXPERTS, HIDDEN, generator=g))
    if made.expert_bias is not None:
        made.expert_bias.data.copy_(torch.randn(EXPERTS, generator=g))
    return made


def by_hand(made: Router, state: list[float], **shape: Any) -> dict[int, float]:
    """Experts of one token and their weights."""
    logits = [sum(w * x for w, x in zip(row, state, strict=True)) for row in made.weight.tolist()]
    if shape.get("router_score") == "sigmoid":
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    else:
        scores = [math.exp(logit) / sum(map(math.exp, logits)) for logit in logits]
    biased = [score + bias for score, bias in zip(scores, bias_of(made), strict=True)]
    groups, top = shape.get("router_groups", 1), shape.get("router_top_groups", 1)
    size = EXPERTS // groups
    ranked = sorted(range(groups), key=lambda g: -sum(sorted(biased[g * size : (g + 1) * size])[-2:]))
    allowed = [expert for group in ranked[:top] for expert in range(group * size, (group + 1) * size)]
    chosen = sorted(allowed, key=lambda expert: -biased[expert])[: shape.get("experts_per_token", 2)]
    total = sum(scores[expert] for expert in chosen) if shape.get("norm_topk_prob", True) else 1.0
    return {expert: shape.get("routed_scaling_factor", 1.0) * scores[expert] / total for expert in chosen}


def bias_of(made: Router) -> list[float]:
    return [0.0] * EXPERTS if made.expert_bias is None else made.expert_bias.tolist()


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"norm_topk_prob": False},
        {"router_score": "sigmoid", "routed_scaling_factor": 2.5},
        {"router_score": "sigmoid", "router_bias": True, "experts_per_token": 3},
        {"router_bias": True, "norm_topk_prob": False},
        {"router_groups": 3, "router_top_groups": 2, "router_bias": True},
        {"router_groups": 2, "router_top_groups": 1, "router_score": "sigmoid"},
    ],
    ids=str,
)
def test_experts_and_weights_are_those_of_the_rules(shape: dict[str, Any]) -> None:
    made = router(**shape)
    states = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))
    weights, chosen = made(states, torch.ones(TOKENS))
    for state, weight, experts in zip(states.tolist(), weights.tolist(), chosen.tolist(), strict=True):
        assert dict(zip(experts, weight, strict=True)) == pytest.approx(by_hand(made, state, **shape), rel=1e-4)


def test_scores_that_are_all_0_weigh_nothing() -> None:
    made = router(router_score="sigmoid")
    made.weight.data.fill_(-100.0)
    weights, _ = made(torch.full((3, HIDDEN), 9.0), torch.ones(3))
    assert torch.equal(weights, torch.zeros(3, 2))


def test_the_load_counts_how_often_tokens_occur_where_passes_count_and_there_is_a_bias() -> None:
    made, plain = router(router_bias=True), router()
    states = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3))
    often = torch.arange(float(TOKENS))
    made(states, often)
    assert not made.load.any()
    with counting([made, plain]), torch.no_grad():
        _, chosen = made(states, often)
        plain(states, often)
        with counting([made], on=False):  # a layer computed again
            made(states, often)
    made(states, often)
    expected = [sum(n for n, row in enumerate(chosen.tolist()) if expert in row) for expert in range(EXPERTS)]
    assert made.load.tolist() == expected and not plain.load.any()


def test_replayed_experts_are_taken_and_weighed_by_the_router_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = router()
    states = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(4))
    _, own = made(states, torch.ones(4))
    replayed = own.flip(-1).clone()  # in another order: the same experts
    replayed[1] = torch.tensor([e for e in range(EXPERTS) if e not in own[1].tolist()][:2])
    replayed[2] = -1
    with counting([made]):
        weights, chosen = made(states, torch.tensor([1.0, 2.0, 3.0, 4.0]), replayed.int())
    expected = torch.where(replayed < 0, own, replayed)
    assert torch.equal(chosen, expected)
    scores = (states @ made.weight.T).softmax(-1).gather(1, chosen)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))
    assert made.replays.tolist() == [10.0, 7.0, 2.0]
    made(states, torch.ones(4), replayed.int())
    assert made.replays.tolist() == [10.0, 7.0, 2.0]
    monkeypatch.setattr(replay, "dist", SimpleNamespace(get_world_size=lambda group: 1))
    groups: Any = SimpleNamespace(stage_ranks=None, pipeline=None)
    found = replay_metrics([made, router()], groups, torch.device("cpu"))
    assert found == {"router_replay_share": 0.7, "router_replay_mismatch": pytest.approx(2 / 7)}
    assert replay_metrics([made], groups, torch.device("cpu")) == {}  # counted anew


@pytest.mark.parametrize(
    ("experts", "right"),
    [
        ([0, 5], True),
        ([5, 0], True),
        ([-1, -1], True),
        ([0, 0], False),
        ([-1, 0], False),
        ([0, 6], False),
        ([-2, 1], False),
    ],
)
def test_only_different_experts_of_the_model_or_none_at_all_can_be_replayed(experts: list[int], right: bool) -> None:
    architecture: Any = SimpleNamespace(mixtures=(0, 1), experts_per_token=2, num_experts=EXPERTS)
    chosen = torch.tensor([[[0, 1], [2, 3]], [[4, 5], experts]], dtype=torch.int16)
    if right:
        check_routed_experts(chosen, architecture)
        return
    for wrong in (chosen, chosen[:, :1], chosen[..., :1]):
        with pytest.raises(EngineError, match="not experts of this model"):
            check_routed_experts(wrong, architecture)


MOE_WIDTH, MOE_EXPERTS, MOE_TOKENS = 48, 12, 70


def theirs_and_ours(latent=0, groups=1, top_groups=1, normalized=True, scale=2.5):
    """transformers' layer and the policy's with the same random weights and biases."""
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE

    config = NemotronHConfig(
        hidden_size=MOE_WIDTH,
        layers_block_type=["moe"],
        n_routed_experts=MOE_EXPERTS,
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
        hidden_size=MOE_WIDTH,
        num_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        ffn_hidden_size=64,
        vocab_size=100,
        rope_theta=1.0,
        norm_eps=1e-5,
        max_position_embeddings=64,
        num_experts=MOE_EXPERTS,
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
    states = torch.randn(MOE_TOKENS, MOE_WIDTH)
    direction = torch.randn(MOE_TOKENS, MOE_WIDTH)
    inputs = [states.clone().requires_grad_() for _ in range(2)]
    expected = theirs(inputs[0][None])[0]
    with counting([ours.router]):
        found = ours.mix(inputs[1][:, None], torch.ones(MOE_TOKENS))[:, 0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    (expected * direction).sum().backward()
    (found * direction).sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, atol=1e-4, rtol=1e-4)
    for name, parameter in ours.named_parameters():
        if name != "router.expert_bias":
            torch.testing.assert_close(parameter.grad, pairs[name].grad, atol=1e-4, rtol=1e-4, msg=name)
    assert int(ours.router.load.sum()) == MOE_TOKENS * 3


def test_the_router_is_exact_in_bfloat16():
    _, ours, _ = theirs_and_ours()
    states = torch.randn(MOE_TOKENS, MOE_WIDTH).bfloat16()
    weights, chosen = ours.router(states, torch.ones(MOE_TOKENS))
    again, same = ours.router(states.float(), torch.ones(MOE_TOKENS))
    assert weights.dtype is torch.float32 and torch.equal(weights, again) and torch.equal(chosen, same)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathers_have_autograds_gradients_summed_once(dtype):
    """The way to the experts and back on a GPU, whose gradients are gathers."""
    chosen = torch.stack([torch.randperm(MOE_EXPERTS)[:5] for _ in range(MOE_TOKENS)])
    order = chosen.flatten().argsort(stable=True)
    back = inverse(order)
    states = torch.randn(MOE_TOKENS, 8, dtype=dtype)
    direction = (torch.randint(-255, 256, (MOE_TOKENS * 5, 8)) / 64).to(dtype)  # whose sums float32 holds, in any order
    plain, gathered = (states.clone().requires_grad_() for _ in range(2))
    expected = plain.index_select(0, order // 5).index_select(0, back)
    found = permute(_ToChoices.apply(gathered, order, back), back, order)
    assert torch.equal(found, expected)
    (found * direction).sum().backward()
    exact = direction.double().view(MOE_TOKENS, 5, 8).sum(1)
    assert torch.equal(gathered.grad, exact.to(dtype))
    (expected * direction).sum().backward()
    if dtype is torch.float32:
        assert torch.equal(gathered.grad, plain.grad)
