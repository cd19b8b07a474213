"""Random but valid train batches and rollouts for the engine's numeric tests."""

from dataclasses import replace
from typing import Any

import torch

from nemotron_steps.engine.types import Rollout, RolloutGroup, TrainBatch


def random_batch(
    rows: int = 6, width: int = 9, *, seed: int = 0, drift: float = 0.3, noise_in_padding: bool = True
) -> tuple[TrainBatch, torch.Tensor]:
    """A batch with prompts, padding, a masked sample and an untrained tool span; and current logprobs with gradient."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, width + 1, (rows,), generator=g)
    columns = torch.arange(width)
    prompt = torch.randint(1, 3, (rows,), generator=g)
    mask = ((columns >= prompt[:, None]) & (columns < lengths[:, None])).float()
    mask[0, 3] = 0.0
    mask[0, int(lengths[0]) - 1] = 1.0
    sample = torch.ones(rows)
    if rows > 2:
        sample[2] = 0.0
    base = -torch.rand(rows, width, generator=g) * 3 - 0.05

    def jitter() -> torch.Tensor:
        return base + drift * torch.randn(rows, width, generator=g)

    lp = jitter()
    batch = TrainBatch(
        input_ids=torch.randint(0, 50, (rows, width), generator=g),
        lengths=lengths,
        token_mask=mask,
        sample_mask=sample,
        generation_logprobs=jitter(),
        advantages=torch.randn(rows, 1, generator=g).expand(rows, width) * 2 + torch.zeros(rows, width),
        prev_logprobs=jitter(),
        reference_logprobs=jitter(),
    )
    if noise_in_padding:
        outside = (mask * sample[:, None]) == 0
        assert batch.prev_logprobs is not None
        batch.prev_logprobs[outside] = -torch.inf
        batch.generation_logprobs[outside] = torch.nan
        lp[outside] = -torch.inf
    return batch, lp.requires_grad_()


def rows_of(batch: TrainBatch, rows: list[int]) -> TrainBatch:
    """A plain independent row selection, not the engine's own."""
    return TrainBatch(**{name: None if value is None else value[rows] for name, value in vars(batch).items()})


def rollout(
    group_id: str = "g0",
    index: int = 0,
    *,
    reward: float = 0.0,
    response: int = 4,
    prompt: int = 2,
    version: int = 0,
    **changes: Any,
) -> Rollout:
    """A single-turn rollout with consistent columns."""
    made = Rollout(
        group_id=group_id,
        index=index,
        token_ids=list(range(1, prompt + response + 1)),
        token_mask=[0] * prompt + [1] * response,
        logprobs=[0.0] * prompt + [-0.5 - 0.01 * index] * response,
        weight_versions=[version] * response,
        reward=reward,
        environment="maths",
        truncated=False,
        turns=[(prompt, prompt + response)],
        metadata={"turn_texts": ["fine"]},
    )
    return replace(made, **changes)


def group(
    group_id: str, rewards: list[float], *, prompt_index: int = 0, version: int = 0, **changes: Any
) -> RolloutGroup:
    """A group with one rollout a reward."""
    rollouts = [rollout(group_id, i, reward=r, version=version, **changes) for i, r in enumerate(rewards)]
    return RolloutGroup(group_id, prompt_index, rollouts, version)


def ends_in_a_tool_result(question: str) -> list[dict[str, Any]]:
    """Input items of a request that goes on from a tool's result, `seven`."""
    return [
        {"role": "user", "content": question},
        {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "1"},
        {"type": "function_call_output", "call_id": "1", "output": "seven"},
    ]
