"""Which sequences a rank computes together: by count, or under a budget of tokens."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from nemotron_steps.config.schema.policy import PolicyConfig
from nemotron_steps.engine.batching import fixed_micro_batches, round_up, select_rows, token_budget_micro_batches
from nemotron_steps.engine.packing import pack
from nemotron_steps.engine.policy.token_layout import TokenLayout, build_layout, prompt_content, to_device
from nemotron_steps.engine.types import TrainBatch
from nemotron_steps.errors import ConfigError, EngineError
from nemotron_steps.models.architecture import Architecture


@dataclass(frozen=True)
class RowUse:
    """Rows that can move a weight, and rows of which only metrics count."""

    gradient: list[int]
    metrics: list[int]


def row_use(batch: TrainBatch, *, needs_advantage: bool) -> RowUse:
    """Sort rows by use, without masked ones."""
    kept = batch.sample_mask > 0
    if not needs_advantage:
        return RowUse(torch.nonzero(kept).flatten().tolist(), [])
    moves = ((batch.advantages != 0) & (batch.token_mask > 0)).any(dim=1)
    return RowUse(torch.nonzero(kept & moves).flatten().tolist(), torch.nonzero(kept & ~moves).flatten().tolist())


def plan_micro_batches(
    batch: TrainBatch,
    rows: Sequence[int],
    config: PolicyConfig,
    data_ranks: int,
    *,
    train: bool,
    unit: int = 1,
    padded: bool = False,
    ahead: int = 0,
) -> list[list[list[int]]]:
    """Row indices of each micro-batch of each data-parallel rank; every rank plans the whole batch. Under a token
    budget, rollouts that share a prompt stay together as far as it allows, and ranks share less than a budget's worth
    for each. Rows that were packed ahead of training stay as they were packed. Without a budget of its own, a
    micro-batch holds as many tokens as its number of longest rows would. unit: consecutive rows that the loss reads
    together (2 for the pairs of DPO); padded: rows are padded to the longest of their micro-batch, which is what the
    budget must bound; ahead: last tokens of a prompt that are not shared (token_layout.build_layout)."""
    size = (config.train_micro_batch_size if train else config.logprob_batch_size) * unit
    budgeted = config.sequence_packing if config.sequence_packing.enabled else config.dynamic_batching
    section = "sequence_packing" if config.sequence_packing.enabled else "dynamic_batching"
    key = f"policy.{section}.{'train' if train else 'logprob'}_mb_tokens"
    if not budgeted.enabled or not rows:
        return _by_count(rows, size, data_ranks, unit)
    longest = max(config.max_total_sequence_length, getattr(config, "max_total_sequence_length_end", None) or 0)
    budget = (budgeted.train_mb_tokens if train else budgeted.logprob_mb_tokens) or (
        size * round_up(longest, budgeted.sequence_length_round)
    )
    all_lengths = batch.lengths.tolist()
    lengths = [int(all_lengths[row]) for row in rows]
    if padded:
        rounding = budgeted.sequence_length_round
        cut = partial(token_budget_micro_batches, lengths, length_multiple=rounding, unit=unit, key=key)
        widths = [unit * round_up(max(lengths[start : start + unit]), rounding) for start in range(0, len(rows), unit)]
        bins = _over_ranks(cut, widths, budget, data_ranks)
    else:
        ready = batch.packed_row is not None
        families = _packed(batch, rows, lengths) if ready else _families(batch, rows, lengths, budget, unit, ahead)
        sizes = [family.tokens for family in families]
        if max(sizes) > budget:
            what = "packed row" if ready else "sequence" if unit == 1 else "pair"
            raise ConfigError(
                f"a {what} of {max(sizes)} tokens does not fit into a micro-batch",
                where=key,
                expected=f"at least {max(sizes)}",
                found=str(budget),
                hints=(f"{key}={max(sizes)}",),
            )
        packing = config.sequence_packing
        algorithm = packing.algorithm if packing.enabled else "modified_first_fit_decreasing"
        packed = _over_ranks(partial(pack, "concatenative" if ready else algorithm, sizes), sizes, budget, data_ranks)
        bins = [[position for number in chosen for position in families[number].positions] for chosen in packed]
    shares = [bins[rank::data_ranks] for rank in range(data_ranks)]
    return [[[rows[position] for position in sorted(part)] for part in share] for share in shares]


def _over_ranks(
    cut: Callable[[int], list[list[int]]], sizes: Sequence[int], budget: int, ranks: int
) -> list[list[int]]:
    """Bins under about the smallest budget that gives no rank more of them."""
    bins = cut(budget)
    if ranks == 1 or not bins:
        return bins
    most = round_up(len(bins), ranks)
    smaller = max(max(sizes), -(-sum(sizes) // most))
    while smaller < budget:
        found = cut(smaller)
        if len(found) <= most:
            return found
        smaller += -(-smaller // 16)
    return bins


def token_multiple(config: PolicyConfig) -> int:
    """What the tokens of a micro-batch are rounded up to, for fewer and aligned sizes."""
    rounds = [each.sequence_length_round for each in (config.sequence_packing, config.dynamic_batching) if each.enabled]
    return math.lcm(config.make_sequence_length_divisible_by, *rounds)


@dataclass
class _Family:
    """Neighbouring rows that stay together; tokens count their prompt once."""

    positions: list[int]
    tokens: int


def _packed(batch: TrainBatch, rows: Sequence[int], lengths: Sequence[int]) -> list[_Family]:
    assert batch.packed_row is not None
    families: dict[int, _Family] = {}
    numbers = batch.packed_row[torch.as_tensor(rows)].tolist()
    for position, (number, length) in enumerate(zip(numbers, lengths, strict=True)):
        family = families.setdefault(number, _Family([], 0))
        family.positions.append(position)
        family.tokens += length
    return list(families.values())


def _families(
    batch: TrainBatch, rows: Sequence[int], lengths: list[int], budget: int, unit: int, ahead: int
) -> list[_Family]:
    prompts = torch.where(
        (batch.token_mask > 0).any(dim=1), (batch.token_mask > 0).float().argmax(dim=1), batch.lengths
    ).tolist()
    families: list[_Family] = []
    before: bytes | None = None
    for start in range(0, len(rows), unit):
        positions = list(range(start, start + unit))
        tokens = sum(lengths[position] for position in positions)
        prompt = int(prompts[rows[start]])
        content = prompt_content(batch, rows[start], prompt)
        shared = tokens - max(prompt - ahead, 0) * unit
        if content == before and families[-1].tokens + shared <= budget:
            families[-1].positions.extend(positions)
            families[-1].tokens += shared
        else:
            families.append(_Family(positions, tokens))
        before = content
    return families


def _by_count(rows: Sequence[int], size: int, data_ranks: int, unit: int) -> list[list[list[int]]]:
    share = -(-len(rows) // (data_ranks * unit)) * unit
    plan = []
    for rank in range(data_ranks):
        own = rows[rank * share : (rank + 1) * share]
        plan.append([[own[position] for position in part] for part in fixed_micro_batches(len(own), size, unit=unit)])
    return plan


def check_routed_experts(chosen: torch.Tensor, architecture: Architecture) -> None:
    """EngineError unless [T, mixtures, k] are k different experts each, or all -1."""
    shape = (len(architecture.mixtures), architecture.experts_per_token)
    ordered = chosen.sort(-1).values
    in_range = (ordered[..., 0] >= 0) & (ordered[..., -1] < architecture.num_experts)
    right = (ordered == -1).all(-1) | (in_range & (ordered.diff(dim=-1) > 0).all(-1))
    if chosen.shape[1:] != shape or not right.all():
        raise EngineError(
            "the experts to replay are not experts of this model",
            expected=f"{shape[0]} mixtures of {shape[1]} different experts of {architecture.num_experts}, or -1",
            found=f"{tuple(chosen.shape)}, wrong for {int((~right).sum())}",
        )


def on_device(batch: TrainBatch, device: torch.device) -> TrainBatch:
    """A batch with its tensors there."""
    if device.type == "cpu":
        return batch
    moved: dict[str, Any] = {
        name: value.to(device, non_blocking=True) for name, value in vars(batch).items() if value is not None
    }
    return TrainBatch(**moved)


@dataclass
class RankWork:
    """This rank's micro-batches of one pass; past its own it has idle ones, to keep step."""

    batch: TrainBatch
    own: list[list[int]]
    count: int
    unit: int
    shares: int
    divisible_by: int
    ahead: int
    architecture: Architecture
    device: torch.device
    _layouts: dict[int, TokenLayout] = field(default_factory=dict, init=False)

    def is_idle(self, number: int) -> bool:
        """Whether a micro-batch only keeps step."""
        return number >= len(self.own)

    def rows(self, number: int) -> list[int]:
        """Of the batch, in a micro-batch."""
        return list(range(self.unit)) if self.is_idle(number) else self.own[number]

    def select(self, number: int) -> TrainBatch:
        """The rows of a micro-batch, as wide as its layout; an idle one's are masked."""
        tokens = dataclasses.replace(self.batch, routed_experts=None)  # of no use to a loss
        micro = select_rows(tokens, self.rows(number), width=self.layout(number).shape[1])
        if self.is_idle(number):
            micro.sample_mask = torch.zeros_like(micro.sample_mask)
        return on_device(micro, self.device)

    def layout(self, number: int) -> TokenLayout:
        """Of a micro-batch's tokens, on the device; made once."""
        if number not in self._layouts:
            rows = self.rows(number)
            layout = build_layout(self.batch, rows, divisible_by=self.divisible_by, ahead=self.ahead)
            layout.idle = self.is_idle(number)
            if layout.routed_experts is not None:
                check_routed_experts(layout.routed_experts, self.architecture)
            self._layouts[number] = to_device(layout, self.device)
        return self._layouts[number]

    def shape(self, number: int) -> tuple[int, ...]:
        """Of the hidden states that pipeline stages exchange."""
        return (self.layout(number).token_ids.shape[0] // self.shares, 1, self.architecture.hidden_size)
