"""Turns logits into tokens and logprobs, and seeds into uniforms that do not depend on the batch.

A sampled token is the inverse of the cumulative distribution at one uniform number, which comes from a counter-based
generator: SplitMix64 (Steele, Lea and Flood, 2014) of the sequence's own key and the token's index. The same on every
device and in every batch.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemotron_steps.engine.types import SamplingParams

_SCAN_VOCAB = 1024
_SCAN_BLOCK = 128
_WEYL = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def stream_key(seed: int, request_id: str, index: int) -> int:
    """Signed 64-bit key of the random stream of one sample of one seeded request."""
    digest = hashlib.blake2b(f"{seed}/{index}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def versions_of(changes: Sequence[tuple[int, int]], tokens: int) -> list[int]:
    """The weight version of each of `tokens` tokens, from (first token, version) of every change."""
    ends = [*(start for start, _ in changes[1:]), tokens]
    return [
        version
        for (start, version), end in zip(changes, ends, strict=True)
        for _ in range(min(start, tokens), min(end, tokens))
    ]


def stream_uniforms(keys: torch.Tensor, first: torch.Tensor, count: int) -> torch.Tensor:
    """Uniform numbers `first` … `first + count - 1` of each stream (int64 [N] both), float64 [N, count] in [0, 1)."""

    def right(x: torch.Tensor, bits: int) -> torch.Tensor:
        return (x >> bits) & ((1 << (64 - bits)) - 1)  # int64 shifts copy the sign bit

    steps = first.unsqueeze(1) + torch.arange(1, count + 1, device=keys.device)
    x = keys.unsqueeze(1) + steps * _WEYL
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        x = (x ^ right(x, shift)) * factor
    x = x ^ right(x, 31)
    return right(x, 11).to(torch.float64) * 2.0**-53


@dataclass(frozen=True)
class SamplingPlan:
    """The sampling settings of a batch: one temperature (0 is greedy) when every row agrees, which is the fast path,
    else float32 [N]. Where any row truncates, top_p float64 [N, 1] and top_k int64 [N, 1], vocabulary size where
    off."""

    temperature: float | torch.Tensor
    top_p: torch.Tensor | None = None
    top_k: torch.Tensor | None = None


def make_plan(params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> SamplingPlan:
    """The plan of a batch whose rows sample under `params`."""
    temperatures = [p.temperature for p in params]
    temperature: float | torch.Tensor = temperatures[0]
    if any(t != temperatures[0] for t in temperatures):
        temperature = torch.tensor(temperatures, device=device, dtype=torch.float32)
    elif temperatures[0] == 0:
        return SamplingPlan(0.0)
    if all(p.top_p >= 1 and not 0 < p.top_k < vocab_size for p in params):
        return SamplingPlan(temperature)
    top_k = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
    return SamplingPlan(
        temperature,
        top_p=torch.tensor([[p.top_p] for p in params], device=device, dtype=torch.float64),
        top_k=torch.tensor([[k] for k in top_k], device=device),
    )


def sample(logits: torch.Tensor, uniforms: torch.Tensor, plan: SamplingPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row from float32 logits [N, V], which are overwritten, and float64 uniforms [N]: int64 [N] tokens,
    and float32 [N] logprobs under the distribution that they are drawn from: at `temperature`, of what top-k and top-p
    keep (at temperature 1 and of all tokens for greedy rows)."""
    temperature = plan.temperature
    greedy: torch.Tensor | None = None
    if isinstance(temperature, torch.Tensor):
        greedy = temperature == 0
        logits.div_(torch.where(greedy, 1.0, temperature).unsqueeze(1))
    elif temperature == 0:
        tokens = logits.argmax(-1, keepdim=True)
        return tokens.squeeze(1), (logits.gather(1, tokens) - logits.logsumexp(-1, keepdim=True)).squeeze(1)
    elif temperature != 1:
        logits.mul_(1 / temperature)
    weights = torch.softmax(logits, -1)
    if plan.top_p is not None and plan.top_k is not None:
        keep = _kept(weights, plan.top_p, plan.top_k)
        if greedy is not None:
            keep |= greedy.unsqueeze(1)
        weights = weights * keep
        weights /= weights.sum(-1, keepdim=True)
    tokens = _invert(weights, uniforms.unsqueeze(1))
    if greedy is not None:
        tokens = torch.where(greedy.unsqueeze(1), logits.argmax(-1, keepdim=True), tokens)
    return tokens.squeeze(1), weights.gather(1, tokens).log_().squeeze(1)


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The token at which each row's cumulative weight passes its uniform share of the total; int64 [N, 1]. Scans are
    float64: on a GPU a float32 scan is not monotone, and its rounding would give mass to impossible tokens."""
    rows, vocab = weights.shape
    if vocab <= _SCAN_VOCAB:
        return _pass(weights, uniforms)
    # First the block of tokens, then the token in it: one full pass is then a sum, several times as fast as a scan.
    if vocab % _SCAN_BLOCK:
        weights = torch.nn.functional.pad(weights, (0, _SCAN_BLOCK - vocab % _SCAN_BLOCK))
    weights = weights.view(-1, _SCAN_BLOCK)
    sums = weights.sum(-1).view(rows, -1).to(torch.float64)
    cumulative = sums.cumsum(-1)
    target = uniforms * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=sums.shape[1] - 1)
    weight = sums.gather(1, block)
    share = ((target - cumulative.gather(1, block)) / weight).add_(1).clamp_(0, 1 - 2.0**-53)
    first = torch.arange(0, sums.numel(), sums.shape[1], device=weights.device)
    token = _pass(weights.index_select(0, block.squeeze(1) + first), share)
    return token.add_(block, alpha=_SCAN_BLOCK).clamp_(max=vocab - 1)


def _pass(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """As `_invert`, by one scan."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    # Past the end only for NaN logits, which are reported when the completion ends.
    return tokens.clamp_(max=weights.shape[1] - 1)


def _kept(weights: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """bool [N, V]: the top_k most likely tokens, and of those the fewest whose share reaches top_p."""
    ranked, order = weights.sort(dim=-1, descending=True, stable=True)
    cumulative = ranked.cumsum(-1, dtype=torch.float64)
    share = cumulative.gather(1, top_k - 1) * top_p
    rank = torch.arange(weights.shape[1], device=weights.device)
    keep = ((cumulative - ranked) < share) & (rank < top_k)
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter_(1, order, keep)
