"""The recurrences written out token by token, for rows that may continue others: what scan and convolution equal."""

from __future__ import annotations

import torch

from nemotron_steps.engine.policy.mamba.segments import Runs


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
