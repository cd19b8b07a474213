"""The router against its rules written as loops."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemotron_steps.engine.policy.moe import router as replay
from nemotron_steps.engine.policy.moe.router import Router, check_routed_experts, counting, replay_metrics
from nemotron_steps.errors import EngineError

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


def test_balancing_moves_idle_experts_up_and_busy_ones_down_by_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    made = router(router_bias=True)
    reduced = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: reduced.append((tensor.clone(), group)))
    assert made.expert_bias is not None
    before = made.expert_bias.tolist()
    made.load.copy_(torch.tensor([0.0, 1.0, 2.0, 2.0, 3.0, 4.0]))
    made.rebalance(0.5, "ranks")  # type: ignore[arg-type]
    moved = [after - b for after, b in zip(made.expert_bias.tolist(), before, strict=True)]
    assert moved == pytest.approx([0.5, 0.5, 0.0, 0.0, -0.5, -0.5]) and not made.load.any()
    assert reduced[0][0].tolist() == [0.0, 1.0, 2.0, 2.0, 3.0, 4.0] and reduced[0][1] == "ranks"


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
    with pytest.raises(EngineError) as caught:
        check_routed_experts(chosen, architecture)
    assert f"{experts} for one of 1 tokens" in (caught.value.found or "")
    for wrong in (chosen[:, :1], chosen[..., :1]):
        with pytest.raises(EngineError, match="not experts of this model"):
            check_routed_experts(wrong, architecture)
