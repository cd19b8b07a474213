"""The convolution gives what each row's own convolution gives, and so do its gradients and windows."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron_steps.engine.policy.mamba.scan import conv, last_window
from nemotron_steps.engine.policy.mamba.segments import Runs
from tests.engine.policy.mamba.recurrence import naive_conv, rows_of


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    children=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), max_size=4),
    kernel=st.sampled_from([2, 4]),
    begun=st.booleans(),
    bias=st.booleans(),
    padding=st.integers(0, 2),
)
def test_equals_a_convolution_of_each_row(lengths, children, kernel, begun, bias, padding):
    children = sorted((parent % len(lengths), length) for parent, length in children)
    runs = Runs([*lengths, *(length for _, length in children)], [p for p, _ in children], padding=padding)
    generator = torch.Generator().manual_seed(sum(lengths))
    shapes = [(runs.tokens + padding, 6), (6, 1, kernel)]
    shapes += [(6,)] if bias else []
    tensors = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    states, weight, offset = tensors if bias else (*tensors, None)
    window = torch.randn(len(lengths), 6, kernel - 1, generator=generator, requires_grad=True) if begun else None
    found = conv(states, weight, offset, runs, window)
    expected, windows = naive_conv(states, weight, offset, runs, window)
    torch.testing.assert_close(found, expected)
    assert torch.equal(last_window(states, runs, kernel, window), windows)
    upstream = torch.randn(found.shape, generator=generator)
    wanted = [*tensors, *([] if window is None else [window])]
    mine = torch.autograd.grad((found * upstream).sum(), wanted)
    theirs = torch.autograd.grad((expected * upstream).sum(), wanted)
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_a_neighbour_changes_nothing_bit_for_bit():
    runs = Runs([5, 9, 4])
    states, weight, bias = torch.randn(18, 6), torch.randn(6, 1, 4), torch.randn(6)
    changed = states.clone()
    mine = rows_of(runs)[1]
    changed[: mine.start] = torch.nan
    changed[mine.stop :] *= 3
    assert torch.equal(conv(states, weight, bias, runs)[mine], conv(changed, weight, bias, runs)[mine])


def test_a_convolution_goes_on_with_the_window_of_another():
    states, weight, bias = torch.randn(2, 12, 6), torch.randn(6, 1, 4), torch.randn(6)
    expected = conv(states.flatten(0, 1), weight, bias, Runs([12, 12])).view(2, 12, 6)
    window = last_window(states[:, :9].flatten(0, 1), Runs([9, 9]), 4)
    assert window.shape == (2, 6, 3)
    for t in range(9, 12):
        torch.testing.assert_close(conv(states[:, t], weight, bias, Runs([1, 1]), window), expected[:, t])
        window = last_window(states[:, t], Runs([1, 1]), 4, window)
    assert torch.equal(window, states[:, 9:].transpose(1, 2))
