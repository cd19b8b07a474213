"""Scan and convolution give what the recurrences give, token by token, and so do their gradients."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nemotron_steps.engine.policy.mamba import scan as scan_module
from nemotron_steps.engine.policy.mamba.scan import Runs, conv, last_window, scan
from tests.engine.policy.mamba.recurrence import naive_conv, naive_scan, rows_of

NAMES = ("x", "dt", "a", "b", "c", "d")


def inputs(tokens: int, heads: int = 4, width: int = 3, groups: int = 2, state: int = 5, seed: int = 0):
    """Tensors with gradients, as `scan` takes them: some heads forget at once, some hardly."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    made = {
        "x": normal(tokens, heads, width),
        "dt": torch.nn.functional.softplus(normal(tokens, heads)),
        "a": -normal(heads).mul(1.5).exp(),
        "b": normal(tokens, groups, state),
        "c": normal(tokens, groups, state),
        "d": normal(heads),
    }
    return {name: tensor.requires_grad_() for name, tensor in made.items()}


def compare(given: dict[str, torch.Tensor], runs: Runs, chunk_size: int, initial: torch.Tensor | None = None):
    """Outputs, final states and the gradients of both, against the recurrence in float64."""
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in given.items()}
    exact_initial = None if initial is None else initial.detach().double().requires_grad_()
    expected = naive_scan(**exact, runs=runs, initial=exact_initial)
    found = scan(**given, runs=runs, chunk_size=chunk_size, initial=initial, final=True)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(tensor.shape, generator=generator) for tensor in expected]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=2e-5, rtol=2e-5)
    sum((mine * weight).sum() for mine, weight in zip(found, weights, strict=True)).backward()
    sum((theirs * weight).sum() for theirs, weight in zip(expected, weights, strict=True)).backward()
    pairs = [(name, given[name], exact[name]) for name in NAMES]
    for name, mine, theirs in [*pairs, *([("initial", initial, exact_initial)] if initial is not None else [])]:
        scale = theirs.grad.abs().max()
        torch.testing.assert_close(mine.grad.double(), theirs.grad, atol=2e-5 * max(scale, 1), rtol=1e-4, msg=name)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    children=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 20)), max_size=4),
    chunk_size=st.sampled_from([1, 4, 7, 16, 64]),
    groups=st.sampled_from([1, 2, 4]),
    begun=st.booleans(),
    padding=st.integers(0, 2),
    most_chunks=st.sampled_from([1, 2, 3, 64]),
)
@example([35], [(0, 1), (0, 17), (0, 20), (0, 20)], 64, 1, False, 0, 64)  # heads that forget at once: large sums
def test_equals_the_recurrence(lengths, children, chunk_size, groups, begun, padding, most_chunks):
    children = sorted((parent % len(lengths), length) for parent, length in children)
    runs = Runs([*lengths, *(length for _, length in children)], [p for p, _ in children], padding=padding)
    given = inputs(runs.tokens + padding, groups=groups, seed=sum(lengths))
    initial = torch.randn(len(lengths), 4, 3, 5, requires_grad=True) if begun else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan_module, "_MOST_CHUNKS", most_chunks)
        compare(given, runs, chunk_size, initial)


@pytest.mark.parametrize("chunk_size", [8, 64])
def test_a_neighbour_changes_nothing_bit_for_bit(chunk_size):
    runs = Runs([30, 17, 45, 3])
    given = inputs(runs.tokens)
    mine = rows_of(runs)[1]
    changed = {name: tensor.detach().clone() for name, tensor in given.items()}
    for name in ("x", "dt", "b", "c"):
        changed[name][: mine.start] *= 3
        changed[name][mine.stop :] /= 7
    changed = {name: tensor.requires_grad_() for name, tensor in changed.items()}
    grads = []
    for tensors in (given, changed):
        out, final = scan(**tensors, runs=runs, chunk_size=chunk_size, final=True)
        grads.append((out[mine], final[1], *torch.autograd.grad(out[mine].sum(), [tensors[n] for n in "xbc"])))
    for before, after in zip(*grads, strict=True):
        own = mine if before.shape[0] == runs.tokens else slice(None)
        assert torch.equal(before[own], after[own])


def test_checkpointing_over_segments(monkeypatch):
    """A layer that is computed again for its gradient computes its segments again twice."""
    monkeypatch.setattr(scan_module, "_MOST_SCORES", 4 * 2 * 8 * 8)
    given = inputs(70)
    runs = Runs([50, 6, 14], [0])

    def layer(x, dt):
        return scan(x, dt, *[given[name] for name in "abcd"], runs, 8)[0].sin()

    results = []
    for run in (layer, lambda *a: torch.utils.checkpoint.checkpoint(layer, *a, use_reentrant=False)):
        results.append(torch.autograd.grad(run(given["x"], given["dt"]).sum(), list(given.values())))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*results, strict=True))


def test_half_precision_products_differ_by_rounding(monkeypatch):
    """As on CUDA."""

    def scan_in_half(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(scan_module, "_factors", lambda x: torch.bfloat16)
            return scan_module._scan_level(*arguments)

    tokens = [tensor.detach() for name, tensor in inputs(60).items() if name not in "ad"]
    rates = -torch.ones(4), torch.ones(4)
    outs = [level(tokens, *rates, Runs([60]), 0, 8, None, True) for level in (scan_in_half, scan_module._scan_level)]
    assert not torch.equal(outs[0][1], outs[1][1])
    for mine, exact in zip(*outs, strict=True):
        assert (mine.float() - exact).norm() < 0.03 * exact.norm()
    assert outs[0][1].dtype is torch.float32


def test_memory_of_gradients_is_bounded_by_segments(monkeypatch):
    """What a long row keeps for its gradient is its inputs and the states between segments, no triangular matrix."""
    monkeypatch.setattr(scan_module, "_MOST_SCORES", 4 * 4 * 32 * 32)
    kept = []
    given = inputs(4096, groups=1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.untyped_storage()) or t, lambda t: t):
        out, _ = scan(**given, runs=Runs([4096]), chunk_size=32)
    bytes_kept = sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())
    inputs_bytes = sum(tensor.untyped_storage().nbytes() for tensor in given.values())
    assert out.requires_grad
    assert bytes_kept < 2 * inputs_bytes < 4 * 4096 * 32 * 4


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
