"""Router replay: the experts that the generator chose, taken in training as well (arXiv 2510.11370).

The generator's arithmetic differs from the policy's, so that for some tokens each chooses other experts, and the
policy's logprob is then not of the model that was sampled from. What routers do with the choices is router.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from nemotron_steps.engine.policy.moe.router import Router
from nemotron_steps.engine.policy.parallel_dims import Groups
from nemotron_steps.errors import EngineError
from nemotron_steps.models.architecture import Architecture


def check_routed_experts(chosen: torch.Tensor, architecture: Architecture) -> None:
    """Raise EngineError unless [T, mixtures, k] are, for each token and mixture, k different experts or all -1."""
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
    """Shares of the tokens, once for each mixture, that were counted since the last call. Collective.

    Returns:
        `router_replay_share`, those whose experts were replayed, and `router_replay_mismatch`, those among them for
        which the policy's own router would have chosen others. Nothing where nothing was trained or replayed.
    """
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
