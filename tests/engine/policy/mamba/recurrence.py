"""The recurrences written out token by token, for rows that may continue others; and as libraries document theirs."""

import math

import torch

from nemotron_steps.engine.policy.mamba.scan import Runs


def rows_of(runs: Runs) -> list[slice]:
    """Tokens of each row."""
    ends = runs.lengths.cumsum().tolist()
    return [slice(end - length, end) for end, length in zip(ends, runs.lengths.tolist(), strict=True)]


def naive_scan(x, dt, a, b, c, d, runs: Runs, initial=None):
    """As scan.scan, in the inputs' own precision: outputs of all tokens, and the final state of each row."""
    heads, width = x.shape[1:]
    each = heads // b.shape[1]
    b, c = b.repeat_interleave(each, 1), c.repeat_interleave(each, 1)
    finals: list[torch.Tensor] = []
    outs = []
    for number, tokens in enumerate(rows_of(runs)):
        if number >= runs.roots:
            state = finals[int(runs.parents[number - runs.roots])]
        elif initial is not None:
            state = initial[number]
        else:
            state = x.new_zeros(heads, width, b.shape[2])
        for t in range(tokens.start, tokens.stop):
            state = (dt[t] * a).exp()[:, None, None] * state + (dt[t, :, None] * x[t])[:, :, None] * b[t][:, None]
            outs.append((state * c[t][:, None]).sum(-1) + d[:, None] * x[t])
        finals.append(state)
    padding = x.new_zeros(runs.padding, heads, width)
    return torch.cat([torch.stack(outs), padding]), torch.stack(finals)


def naive_conv(states, weight, bias, runs: Runs, window=None):
    """As conv.conv, and the windows after each row."""
    channels, _, kernel = weight.shape
    outs, windows = [], []
    for number, tokens in enumerate(rows_of(runs)):
        if number >= runs.roots:
            before = windows[int(runs.parents[number - runs.roots])]
        else:
            before = states.new_zeros(kernel - 1, channels) if window is None else window[number].t()
        seen = torch.cat([before, states[tokens]])
        windows.append(seen[len(seen) - kernel + 1 :])
        summed = sum(seen[k : k + len(seen) - kernel + 1] * weight[:, 0, k] for k in range(kernel))
        outs.append(torch.nn.functional.silu(summed if bias is None else summed + bias))
    outs.append(states.new_zeros(runs.padding, channels))
    return torch.cat(outs), torch.stack(windows).transpose(1, 2)


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
    dt_softplus=False, dt_limit=(0.0, math.inf), return_final_states=False, return_varlen_states=False,
):  # fmt: skip
    """x [batch, length, heads, head_dim]; initial and final states are those of batch entries."""
    outs, states = [], []
    for entry in range(x.shape[0]):
        lengths = [x.shape[1]]
        if seq_idx is not None:
            assert seq_idx.dtype is torch.int32 and seq_idx.shape == x.shape[:2]
            lengths = torch.unique_consecutive(seq_idx[entry], return_counts=True)[1].tolist()
            assert initial_states is None
        assert dt.dtype is torch.float32 and chunk_size & (chunk_size - 1) == 0
        exact = [tensor[entry].float() for tensor in (x, dt)], [tensor[entry].float() for tensor in (B, C)]
        begin = None if initial_states is None else initial_states[entry : entry + 1]
        out, state = naive_scan(*exact[0], A, *exact[1], D, Runs(lengths), begin)
        outs.append(out.to(x.dtype))
        states.append(state[-1])
    return (torch.stack(outs), torch.stack(states)) if return_final_states else torch.stack(outs)


def causal_conv1d(x, weight=None, bias=None, activation=None):
    """x [batch, length, C], weight [C, K]"""
    assert x.shape[0] == 1 and activation == "silu" and weight.dim() == 2
    return naive_conv(x[0], weight[:, None], bias, Runs([x.shape[1]]))[0][None], None


def rmsnorm_fn(x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True):
    """norm(x · silu(z)) of groups of `group_size` channels"""
    assert bias is None and not norm_before_gate
    opened = (x * torch.nn.functional.silu(z)).unflatten(1, (-1, group_size))
    return (opened / (opened.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(1) * weight
