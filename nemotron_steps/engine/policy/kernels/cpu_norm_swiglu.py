"""RMSNorm, SwiGLU and relu² with their gradients as passes over memory, for float32 on CPU; without autograd.

In C each reads and writes memory once (engine/native/passes.c); without a C compiler torch takes three to six passes.

Shapes: T rows, W width.
"""

from __future__ import annotations

from ctypes import c_float, c_int64, c_void_p

import torch
import torch.nn.functional as F

from nemotron_steps.engine.native.compiler import library


def rms_normalize(states: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """states / rms, and 1 / rms, over the last dimension.

    Args:
        states: [T, W].

    Returns:
        [T, W] and [T, 1].
    """
    kernels = library()
    if kernels is None:
        scale = torch.linalg.vecdot(states, states).div_(states.shape[1]).add_(eps).rsqrt_().unsqueeze(-1)
        return states * scale, scale
    states = states.contiguous()
    unit, scale = torch.empty_like(states), states.new_empty(states.shape[0], 1)
    kernels.norm_forward(_at(states), _at(unit), _at(scale), *_sizes(states), c_float(eps), _threads())
    return unit, scale


def rms_normalize_backward(
    grad: torch.Tensor, unit: torch.Tensor, scale: torch.Tensor, plus: torch.Tensor
) -> torch.Tensor:
    """Gradient of the states from that of the unit rows, which is overwritten, and `plus` added to it; all [T, W]."""
    kernels = library()
    if kernels is None:
        along = torch.linalg.vecdot(grad, unit).div_(-unit.shape[1]).unsqueeze(-1)
        return grad.addcmul_(unit, along).mul_(scale).add_(plus)
    plus = plus.contiguous()  # what autograd hands on may be one number, expanded
    kernels.norm_backward(_at(grad), _at(unit), _at(scale), _at(plus), *_sizes(grad), _threads())
    return grad


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, of [T, 2 · W] that holds gate, then up; [T, W]."""
    kernels = library()
    if kernels is None:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
    activated = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    kernels.swiglu_forward(_at(gate_up), _at(activated), *_sizes(activated), _threads())
    return activated


def swiglu_backward(gate_up: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Gradient of gate_up [T, 2 · W] from that of the activated, [T, W], which may be overwritten."""
    kernels = library()
    result = torch.empty_like(gate_up)
    if kernels is None:
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate, grad_up = result.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad.mul_(up), gate, grad_input=grad_gate)
        return result
    kernels.swiglu_backward(_at(gate_up), _at(grad), _at(result), *_sizes(grad), _threads())
    return result


def squared_relu(states: torch.Tensor) -> torch.Tensor:
    """max(0, states)²; leaves max(0, states) in `states`, for `squared_relu_backward`."""
    states.relu_()
    return states * states


def squared_relu_backward(positive: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Gradient of the states from that of their squared_relu, which is overwritten, and what that left of them."""
    return grad.mul_(positive).mul_(2.0)


def _at(tensor: torch.Tensor) -> c_void_p:
    assert tensor.is_contiguous() and tensor.dtype is torch.float32
    return c_void_p(tensor.data_ptr())


def _sizes(tensor: torch.Tensor) -> tuple[c_int64, c_int64]:
    return c_int64(tensor.shape[0]), c_int64(tensor.shape[1])


def _threads() -> c_int64:
    return c_int64(torch.get_num_threads())
