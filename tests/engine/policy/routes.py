"""Experts as a generator could have chosen them, and those that a policy chooses."""

from contextlib import contextmanager
from dataclasses import replace

import torch

from nemotron_steps.engine.types import TrainBatch


def some_routes(batch: TrainBatch, mixtures: int, top_k: int, experts: int) -> torch.Tensor:
    """int16 [N, T, mixtures, k]: by token, position and mixture alone, so that shared prompts have the same; a fifth of
    them unknown."""
    positions = torch.arange(batch.input_ids.shape[1])[None, :, None, None]
    first = batch.input_ids[..., None, None] + positions + 3 * torch.arange(mixtures)[:, None]
    chosen = (first + torch.arange(top_k)) % experts
    return torch.where(positions % 5 == 4, -1, chosen).to(torch.int16)


def chosen_by(policy, batch: TrainBatch) -> torch.Tensor:
    """int16 [N, T, mixtures, k] that the routers of a policy on one rank choose, row by row; -1 for what it needs not
    compute: a row's last token, and padding."""
    routers = policy.model.routers()
    routes = torch.full((*batch.input_ids.shape, len(routers), routers[0].top_k), -1, dtype=torch.int16)
    work = policy._work(replace(batch, routed_experts=None), range(len(batch)), train=False)
    for row in range(len(batch)):
        work.own, work._layouts = [[row]], {}
        with torch.no_grad(), _recorded(routers) as chosen:
            policy.model(work.layout(0))
        tokens = len(work.layout(0).token_ids) - work.layout(0).padding
        for number, experts in enumerate(chosen):
            routes[row, :tokens, number] = experts[:tokens].to(torch.int16)
    return routes


@contextmanager
def _recorded(routers):
    chosen: list[torch.Tensor] = []
    hooks = [router.register_forward_hook(lambda _, __, out: chosen.append(out[1])) for router in routers]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()
