"""Which experts compute a token, and with which weights: always in float32.

Softmax over all experts (Qwen3-MoE) or sigmoid scores (Nemotron 3). A bias that only chooses balances experts without
an auxiliary loss (arXiv 2408.15664). Experts that the generator chose can be replayed (arXiv 2510.11370).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nemotron_steps.engine.policy.distributed.parallel_dims import Groups, device
from nemotron_steps.errors import EngineError
from nemotron_steps.models.architecture import Architecture

_TINY = 1e-20
"""Added to the sum of sigmoid scores, which may all be 0."""


class Router(torch.nn.Module):
    """Scores of all experts, then the top k."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype, *, frozen: bool) -> None:
        super().__init__()
        self.top_k, self.renormalize = architecture.experts_per_token, architecture.norm_topk_prob
        self.sigmoid, self.scale = architecture.router_score == "sigmoid", architecture.routed_scaling_factor
        self.groups, self.top_groups = architecture.router_groups, architecture.router_top_groups
        shape = (architecture.num_experts, architecture.hidden_size)
        # A frozen router takes no part in mixed precision: it keeps the checkpoint's digits.
        weight = torch.empty(shape, dtype=torch.float32 if frozen else dtype, device=device())
        self.weight = torch.nn.Parameter(weight, requires_grad=not frozen)
        self.expert_bias: torch.nn.Parameter | None = None
        if architecture.router_bias:
            zeros = torch.zeros(architecture.num_experts, dtype=torch.float32, device=device())
            self.expert_bias = torch.nn.Parameter(zeros, requires_grad=False)
        self.load = torch.zeros(architecture.num_experts, dtype=torch.float32, device=device())
        """Of each expert on this rank since the last `rebalance`, where passes are counted."""
        self.counts = False
        self.replays = torch.zeros(3, dtype=torch.float64, device=device())
        """Tokens counted: all, those replayed, those this router would have sent elsewhere."""

    def forward(self, states: Tensor, occurrences: Tensor, replayed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[T, hidden] → weights float32 and experts int64 [T, k]; replayed where not -1."""
        logits = F.linear(states.float(), self.weight.float())
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        with torch.no_grad():
            chosen = self._choose(scores if self.expert_bias is None else scores + self.expert_bias)
            if replayed is not None:
                chosen = self._replay(chosen, replayed.long(), occurrences if self.counts else None)
        weights = scores.gather(1, chosen)
        if self.renormalize:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total + _TINY if self.sigmoid else total)
        if self.scale != 1.0:
            weights = weights * self.scale
        if self.expert_bias is not None and self.counts:
            often = occurrences[:, None].expand_as(chosen).flatten()
            self.load.scatter_add_(0, chosen.flatten(), often)  # bincount would wait for the GPU
        return weights, chosen

    def _choose(self, scores: Tensor) -> Tensor:
        """The top k experts [T, k], of the best groups only; a group is as good as its two best."""
        if self.top_groups < self.groups:
            by_group = scores.view(scores.shape[0], self.groups, -1)
            best = by_group.topk(2, dim=-1).values.sum(-1).topk(self.top_groups, dim=-1).indices
            allowed = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter_(1, best, True)
            scores = by_group.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
        return scores.topk(self.top_k, dim=-1).indices

    def _replay(self, own: Tensor, replayed: Tensor, occurrences: Tensor | None) -> Tensor:
        """The experts to take, [T, k]; counted where `occurrences` are given."""
        known = (replayed >= 0).all(-1)
        if occurrences is not None:
            other = known & (own.sort(-1).values != replayed.sort(-1).values).any(-1)
            counted = torch.stack((torch.ones_like(known), known, other)).double()
            self.replays += counted @ occurrences.double()
        return torch.where(known[:, None], replayed, own)

    def rebalance(self, rate: float, group: dist.ProcessGroup) -> None:
        """Move the bias of overloaded experts down and of idle ones up by `rate`. Collective."""
        assert self.expert_bias is not None
        dist.all_reduce(self.load, group=group)
        self.expert_bias.data += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


@contextmanager
def counting(routers: Iterable[Router], *, on: bool = True) -> Iterator[None]:
    """Passes in here count towards `load` and `replays`: a training step's, each token once."""
    routers = list(routers)
    before = [router.counts for router in routers]
    for router in routers:
        router.counts = on
    try:
        yield
    finally:
        for router, counted in zip(routers, before, strict=True):
            router.counts = counted


def check_routed_experts(chosen: Tensor, architecture: Architecture) -> None:
    """EngineError unless [T, mixtures, k] are k different experts each, or all -1."""
    shape = (len(architecture.mixtures), architecture.experts_per_token)
    if chosen.shape[1:] != shape or not shape[0]:
        raise _refusal(f"{shape[0]} mixtures of {shape[1]} experts a token", "x".join(map(str, chosen.shape[1:])))
    ordered = chosen.sort(-1).values
    unknown = (ordered == -1).all(-1)
    different = (ordered.diff(dim=-1) > 0).all(-1)
    in_range = (ordered[..., 0] >= 0) & (ordered[..., -1] < architecture.num_experts)
    wrong = torch.nonzero(~(unknown | (different & in_range)))
    if len(wrong):
        token, mixture = wrong[0].tolist()
        raise _refusal(
            f"{shape[1]} different experts of {architecture.num_experts}, or -1 throughout",
            f"{chosen[token, mixture].tolist()} for one of {len(wrong)} tokens",
        )


def replay_metrics(routers: Iterable[Router], groups: Groups, device: torch.device) -> dict[str, float]:
    """Shares of the tokens since the last call: replayed, and otherwise chosen. Collective."""
    counts = torch.zeros(3, dtype=torch.float64, device=device)
    for router in routers:
        counts += router.replays
        router.replays.zero_()
    for group in (groups.stage_ranks, groups.pipeline):
        if dist.get_world_size(group) > 1:
            dist.all_reduce(counts, group=group)
    trained, replayed, other = counts.tolist()
    metrics = {}
    if trained:
        metrics["router_replay_share"] = replayed / trained
    if replayed:
        metrics["router_replay_mismatch"] = other / replayed
    return metrics


def _refusal(expected: str, found: str) -> EngineError:
    return EngineError(
        "the experts to replay are not experts of this model",
        where="TrainBatch.routed_experts",
        expected=expected,
        found=found,
    )
