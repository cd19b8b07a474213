"""CUDA kernels in Triton: SwiGLU, relu², QKV projection to rotated heads, softmax of logits. One pass over memory each,
in float32 inside. Not specialised on numbers of tokens, or kernels would be compiled again in the first step whose
count is a multiple of 16. Imported only on CUDA, and by tests in Triton's interpreter."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _swiglu_forward(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside).to(tl.float32)
    tl.store(out + row * width + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(gate_up, grad, grad_gate_up, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside).to(tl.float32)
    given = tl.load(grad + row * width + columns, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    into = grad_gate_up + row * 2 * width + columns
    kind = grad_gate_up.dtype.element_ty
    tl.store(into, (given * up * (sigmoid + silu * (1 - sigmoid))).to(kind), mask=inside)
    tl.store(into + width, (given * silu).to(kind), mask=inside)


def swiglu_forward(gate_up: Tensor) -> Tensor:
    """silu(gate) · up of contiguous [rows, 2 · width]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if rows:
        _swiglu_forward[(rows, triton.cdiv(width, 1024))](gate_up, out, width, BLOCK=1024)
    return out


def swiglu_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    """Gradient of gate_up from the gradient [rows, width] of the result."""
    rows, width = grad.shape
    result = torch.empty_like(gate_up)
    if rows:
        _swiglu_backward[(rows, triton.cdiv(width, 1024))](gate_up, grad, result, width, BLOCK=1024)
    return result


@triton.jit(do_not_specialize=["size"])
def _squared_relu_forward(states, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    positive = tl.maximum(tl.load(states + at, mask=at < size, other=0.0).to(tl.float32), 0.0)
    tl.store(out + at, (positive * positive).to(out.dtype.element_ty), mask=at < size)


@triton.jit(do_not_specialize=["size"])
def _squared_relu_backward(states, grad, grad_states, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    positive = tl.maximum(tl.load(states + at, mask=at < size, other=0.0).to(tl.float32), 0.0)
    given = tl.load(grad + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(grad_states + at, (2.0 * given * positive).to(grad_states.dtype.element_ty), mask=at < size)


def squared_relu_forward(states: Tensor) -> Tensor:
    """max(0, states)², contiguous, of any shape."""
    out, size = torch.empty_like(states), states.numel()
    if size:
        _squared_relu_forward[(triton.cdiv(size, 1024),)](states, out, size, BLOCK=1024)
    return out


def squared_relu_backward(states: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the states from that of the result, both contiguous."""
    result, size = torch.empty_like(states), states.numel()
    if size:
        _squared_relu_backward[(triton.cdiv(size, 1024),)](states, grad, result, size, BLOCK=1024)
    return result


_MOST_GROUPS = 2
"""Of more in a program, the gradient takes up to half as long again."""


@triton.jit(do_not_specialize=["tokens"])
def _heads_forward(
    mixed, scale, cos_sin, query, key, value, inverse_rms, tokens, eps,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
    EACH: tl.constexpr
):  # fmt: skip
    """One program: BLOCK tokens of one head slot (HEADS queries, then the key, then the value) of EACH groups."""
    token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    slot = tl.program_id(1)
    half = tl.arange(0, HALF)
    inside = (token < tokens)[:, None]
    width = 2 * HALF
    cos = tl.load(cos_sin + token[:, None] * width + half[None, :], mask=inside, other=0.0).to(tl.float32)
    sin_of = cos_sin + tokens * width
    sin = tl.load(sin_of + token[:, None] * width + half[None, :], mask=inside, other=0.0).to(tl.float32)
    for one_of in tl.static_range(EACH):
        group = tl.program_id(2) * EACH + one_of
        at = ((token * GROUPS + group) * (HEADS + 2) + slot)[:, None] * width + half[None, :]
        left = tl.load(mixed + at, mask=inside, other=0.0).to(tl.float32)
        right = tl.load(mixed + at + HALF, mask=inside, other=0.0).to(tl.float32)
        kind = query.dtype.element_ty
        if slot == HEADS + 1:
            to = (token * GROUPS + group)[:, None] * width + half[None, :]
            tl.store(value + to, left.to(kind), mask=inside)
            tl.store(value + to + HALF, right.to(kind), mask=inside)
        else:
            if NORM:
                mean = (tl.sum(left * left, 1) + tl.sum(right * right, 1)) / width
                inverse = 1.0 / tl.sqrt(mean + eps)
                tl.store(inverse_rms + (token * GROUPS + group) * (HEADS + 1) + slot, inverse, mask=token < tokens)
                left *= inverse[:, None] * tl.load(scale + slot * width + half).to(tl.float32)[None, :]
                right *= inverse[:, None] * tl.load(scale + slot * width + HALF + half).to(tl.float32)[None, :]
            first, second = left * cos - right * sin, right * cos + left * sin
            if slot == HEADS:
                to = (token * GROUPS + group)[:, None] * width + half[None, :]
                tl.store(key + to, first.to(kind), mask=inside)
                tl.store(key + to + HALF, second.to(kind), mask=inside)
            else:
                to = ((token * GROUPS + group) * HEADS + slot)[:, None] * width + half[None, :]
                tl.store(query + to, first.to(kind), mask=inside)
                tl.store(query + to + HALF, second.to(kind), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _heads_backward(
    mixed, scale, cos_sin, inverse_rms, grad_query, grad_key, grad_value, grad_mixed, grad_scale, tokens,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
    EACH: tl.constexpr
):  # fmt: skip
    """As `_heads_forward`; grad_scale [programs, HEADS + 1, 2 · HALF] gets each program's share."""
    token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    slot = tl.program_id(1)
    half = tl.arange(0, HALF)
    inside = (token < tokens)[:, None]
    width = 2 * HALF
    cos = tl.load(cos_sin + token[:, None] * width + half[None, :], mask=inside, other=0.0).to(tl.float32)
    sin_of = cos_sin + tokens * width
    sin = tl.load(sin_of + token[:, None] * width + half[None, :], mask=inside, other=0.0).to(tl.float32)
    sum_left = tl.zeros((HALF,), tl.float32)
    sum_right = tl.zeros((HALF,), tl.float32)
    for one_of in tl.static_range(EACH):
        group = tl.program_id(2) * EACH + one_of
        at = ((token * GROUPS + group) * (HEADS + 2) + slot)[:, None] * width + half[None, :]
        kind = grad_mixed.dtype.element_ty
        one = (token * GROUPS + group)[:, None] * width + half[None, :]
        if slot == HEADS + 1:
            tl.store(grad_mixed + at, tl.load(grad_value + one, mask=inside, other=0.0), mask=inside)
            tl.store(grad_mixed + at + HALF, tl.load(grad_value + one + HALF, mask=inside, other=0.0), mask=inside)
        else:
            if slot == HEADS:
                first = tl.load(grad_key + one, mask=inside, other=0.0).to(tl.float32)
                second = tl.load(grad_key + one + HALF, mask=inside, other=0.0).to(tl.float32)
            else:
                of = ((token * GROUPS + group) * HEADS + slot)[:, None] * width + half[None, :]
                first = tl.load(grad_query + of, mask=inside, other=0.0).to(tl.float32)
                second = tl.load(grad_query + of + HALF, mask=inside, other=0.0).to(tl.float32)
            left, right = first * cos + second * sin, second * cos - first * sin
            if NORM:
                inverse = tl.load(
                    inverse_rms + (token * GROUPS + group) * (HEADS + 1) + slot, mask=token < tokens, other=0.0
                )[:, None]
                in_left = tl.load(mixed + at, mask=inside, other=0.0).to(tl.float32)
                in_right = tl.load(mixed + at + HALF, mask=inside, other=0.0).to(tl.float32)
                sum_left += tl.sum(left * in_left * inverse, 0)
                sum_right += tl.sum(right * in_right * inverse, 0)
                left *= tl.load(scale + slot * width + half).to(tl.float32)[None, :]
                right *= tl.load(scale + slot * width + HALF + half).to(tl.float32)[None, :]
                along = (tl.sum(left * in_left, 1) + tl.sum(right * in_right, 1))[:, None] / width
                left = inverse * (left - in_left * inverse * inverse * along)
                right = inverse * (right - in_right * inverse * inverse * along)
            tl.store(grad_mixed + at, left.to(kind), mask=inside)
            tl.store(grad_mixed + at + HALF, right.to(kind), mask=inside)
    if NORM:  # noqa: SIM102  a constant of the kernel, and a run-time value
        if slot <= HEADS:
            program = tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)
            to = grad_scale + (program * (HEADS + 1) + slot) * width + half
            tl.store(to, sum_left)
            tl.store(to + HALF, sum_right)


def split_heads(mixed: Tensor, scale: Tensor | None, cos_sin: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """fused.split_heads for a head_dim that is a power of 2."""
    return _SplitHeads.apply(mixed.contiguous(), scale, cos_sin, eps)


def _groups_each(groups: int) -> int:
    return max(each for each in range(1, min(groups, _MOST_GROUPS) + 1) if groups % each == 0)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, scale: Tensor | None, cos_sin: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, groups, slots, width = mixed.shape
        heads = slots - 2
        query = mixed.new_empty(tokens, groups * heads, width)
        key, value = mixed.new_empty(tokens, groups, width), mixed.new_empty(tokens, groups, width)
        inverse_rms = torch.empty(tokens, groups, heads + 1, dtype=torch.float32, device=mixed.device)
        block, each = 32, _groups_each(groups)
        if tokens:
            _heads_forward[(triton.cdiv(tokens, block), slots, groups // each)](
                mixed, mixed if scale is None else scale, cos_sin, query, key, value, inverse_rms, tokens, eps,
                GROUPS=groups, HEADS=heads, HALF=width // 2, NORM=scale is not None, BLOCK=block, EACH=each,
            )  # fmt: skip
        ctx.save_for_backward(mixed, scale, cos_sin, inverse_rms)
        return query, key, value

    @staticmethod
    def backward(
        ctx: Any, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None]:
        mixed, scale, cos_sin, inverse_rms = ctx.saved_tensors
        tokens, groups, slots, width = mixed.shape
        heads, block, each = slots - 2, 32, _groups_each(groups)
        programs, parts = triton.cdiv(tokens, block), groups // each
        grad_mixed = torch.empty_like(mixed)
        grad_scale = torch.zeros(programs * parts, heads + 1, width, dtype=torch.float32, device=mixed.device)
        if tokens:
            _heads_backward[(programs, slots, parts)](
                mixed, mixed if scale is None else scale, cos_sin, inverse_rms,
                grad_query.contiguous(), grad_key.contiguous(), grad_value.contiguous(), grad_mixed, grad_scale, tokens,
                GROUPS=groups, HEADS=heads, HALF=width // 2, NORM=scale is not None, BLOCK=block, EACH=each,
            )  # fmt: skip
        return grad_mixed, None if scale is None else grad_scale.sum(0).to(scale.dtype), None, None


@triton.jit
def _softmax_statistics(logits, targets, largest, total, chosen, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    high = tl.full((), float("-inf"), tl.float32)
    mass = tl.zeros((), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        values = tl.load(logits + row * columns + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(high, tl.max(values, 0))
        mass = mass * tl.exp(high - higher) + tl.sum(tl.exp(values - higher), 0)
        high = higher
    tl.store(largest + row, high)
    tl.store(total + row, mass)
    tl.store(chosen + row, tl.load(logits + row * columns + tl.load(targets + row)).to(tl.float32))


@triton.jit
def _to_residuals(logits, highest, log_mass, targets, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits + row * columns + column
    values = tl.load(at, mask=column < columns, other=0.0).to(tl.float32)
    one = tl.where(column == tl.load(targets + row), 1.0, 0.0)
    share = tl.exp(values - tl.load(highest + row) - tl.load(log_mass + row))
    tl.store(at, (one - share).to(logits.dtype.element_ty), mask=column < columns)


def softmax_statistics(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of contiguous [n, V]: float32 [n] row maximum, sum of exp(logit − maximum), and the logit of each target."""
    results = torch.empty(3, logits.shape[0], dtype=torch.float32, device=logits.device)
    if logits.shape[0]:
        _softmax_statistics[(logits.shape[0],)](logits, targets, *results.unbind(), logits.shape[1], BLOCK=4096)
    largest, total, chosen = results.unbind()
    return largest, total, chosen


def to_residuals(logits: Tensor, highest: Tensor, log_mass: Tensor, targets: Tensor) -> Tensor:
    """onehot(targets) − exp(logits − highest − log_mass), in place; a target below 0 stands for no token."""
    rows, columns = logits.shape
    if rows:
        _to_residuals[(rows, triton.cdiv(columns, 4096))](logits, highest, log_mass, targets, columns, BLOCK=4096)
    return logits
