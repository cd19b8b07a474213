"""Decoding on CPU in float32 with a kernel in C: one whole step, from the newest tokens to the next ones, as one call.

A step of a tiny model is two hundred operators of a few microseconds, at each of which threads wait for each other; in
C they meet once a step (engine/kernels/decode.c).

Not for: batches that sample with top-p, top-k or mixed temperatures, which are decoded operator by operator.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p

import torch
import torch.nn.functional as F

from nemotron_steps.engine.generation.embedded.base import CachedModel
from nemotron_steps.engine.generation.embedded.batch import DecodeBatch
from nemotron_steps.engine.generation.embedded.model import EmbeddedModel
from nemotron_steps.engine.generation.embedded.sampling import SamplingPlan
from nemotron_steps.engine.kernels.compiler import library

_PANEL, _BLOCK = 32, 8  # products.h
_MOST_WEIGHTS = 2**23
"""Weights of larger models come from memory, once a thread, which takes longer than what this saves."""


class _Layer(ctypes.Structure):
    """The four structures are those of decode.c, in the order of their fields."""

    _fields_ = [
        (name, c_void_p)
        for name in ("input_norm", "qkv", "qkv_bias", "qk_norm", "output", "post_norm", "gate_up", "down")
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("layers", "embedding", "head", "final_norm", "rotations")),
        *((name, c_int64) for name in ("num_layers", "hidden", "ffn", "heads", "queries", "dim", "vocab", "positions")),
        ("eps", c_float),
    ]


class _Prefix(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int64) for name in ("tokens", "layer_stride", "head_stride")),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("keys", "values", "tokens", "logprobs", "state", "prefixes")),
        *((name, c_int64) for name in ("most_rows", "columns", "state_fields", "column")),
        ("temperature", c_float),
    ]


class NativeDecoder:
    """Steps a DecodeBatch.

    Args:
        kernels: `library()`.
    """

    def __init__(self, model: EmbeddedModel, batch: DecodeBatch, kernels: ctypes.CDLL) -> None:
        self._model = model
        self._batch = batch
        self._step = kernels.decode_step
        self._step.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64]
        self._step.restype = None
        self._scratch_of = kernels.decode_scratch
        self._scratch_of.argtypes = [c_void_p, c_int64, c_int64]
        self._scratch_of.restype = c_int64
        self._prefixes = (_Prefix * batch.max_rows)()
        self._scratch = torch.zeros(0)
        self._loads = self._arrangement = self._allocation = -1
        self._longest_prefix = 0
        self._c_batch = _Batch()
        self._describe_model()

    @staticmethod
    def of(model: CachedModel, batch: DecodeBatch) -> NativeDecoder | None:
        """None where the kernel is not for this model or device, or there is no C compiler."""
        if not isinstance(model, EmbeddedModel) or model.device.type != "cpu" or model.dtype is not torch.float32:
            return None
        if sum(weight.numel() for weight in model.matrices()) > _MOST_WEIGHTS:
            return None
        kernels = library()
        return None if kernels is None else NativeDecoder(model, batch, kernels)

    def takes(self, plan: SamplingPlan) -> bool:
        """Whether every row samples alike, from the whole distribution."""
        return plan.top_p is None and not isinstance(plan.temperature, torch.Tensor)

    def step(self, plan: SamplingPlan) -> None:
        """Feed the tokens of the current column and sample those of the next, to which the batch moves."""
        batch = self._batch
        assert not isinstance(plan.temperature, torch.Tensor)
        if self._loads != self._model.loads:
            self._pack()
        if self._arrangement != batch.arrangement:
            self._refer_to_prefixes()
        if self._allocation != batch.allocation:
            self._refer_to_cache()
        self._c_batch.column, self._c_batch.temperature = batch.column, plan.temperature
        threads = torch.get_num_threads()
        # A thread's rows are whole blocks.
        each = self._scratch_of(
            ctypes.byref(self._c_model),
            -(-batch.size // (threads * _BLOCK)) * _BLOCK,
            self._longest_prefix + batch.columns,
        )
        if self._scratch.numel() < threads * each:
            self._scratch = torch.zeros(threads * each)
        self._step(
            ctypes.byref(self._c_model),
            ctypes.byref(self._c_batch),
            batch.size,
            threads,
            self._scratch.data_ptr(),
            each,
        )
        batch.column += 1

    def _describe_model(self) -> None:
        model, weights = self._model, self._model.weights
        a = model.architecture
        self._layers = (_Layer * a.num_layers)()
        self._rotations = torch.view_as_real(weights.rotations).contiguous()
        self._c_model = _Model(
            layers=ctypes.addressof(self._layers),
            embedding=weights.embedding.data_ptr(),
            final_norm=weights.final_norm.data_ptr(),
            rotations=self._rotations.data_ptr(),
            num_layers=a.num_layers,
            hidden=a.hidden_size,
            ffn=a.ffn_hidden_size,
            heads=a.num_key_value_heads,
            queries=model.queries_per_lane,
            dim=a.head_dim,
            vocab=a.vocab_size,
            positions=self._rotations.shape[0],
            eps=a.norm_eps,
        )

    def _pack(self) -> None:
        """Matrices as panels, after the weights have changed."""
        self._loads = self._model.loads
        self._panels = [panels(weight) for weight in self._model.matrices()]
        of_layers, head = self._panels[:-1], self._panels[-1]
        self._c_model.head = head.data_ptr()
        for i, layer in enumerate(self._model.layers):
            qkv, output, gate_up, down = of_layers[4 * i : 4 * i + 4]
            self._layers[i] = _Layer(
                input_norm=layer.input_norm.data_ptr(),
                qkv=qkv.data_ptr(),
                qkv_bias=None if layer.qkv_bias is None else layer.qkv_bias.data_ptr(),
                qk_norm=None if layer.qk_norm is None else layer.qk_norm.data_ptr(),
                output=output.data_ptr(),
                post_norm=layer.post_norm.data_ptr(),
                gate_up=gate_up.data_ptr(),
                down=down.data_ptr(),
            )

    def _refer_to_prefixes(self) -> None:
        """Where each row's shared prefix lies; its tensors are held by the batch."""
        self._arrangement = self._batch.arrangement
        self._longest_prefix = 0
        known: dict[int, _Prefix] = {}
        for row, prefix in enumerate(self._batch.row_prefixes):
            if prefix is not None and id(prefix) not in known:
                keys, values = prefix.keys, prefix.values
                assert keys.stride() == values.stride() and keys.stride(2) == keys.shape[3] and keys.stride(3) == 1
                known[id(prefix)] = _Prefix(
                    keys.data_ptr(), values.data_ptr(), len(prefix.tokens), keys.stride(0), keys.stride(1)
                )
                self._longest_prefix = max(self._longest_prefix, len(prefix.tokens))
            self._prefixes[row] = _Prefix() if prefix is None else known[id(prefix)]

    def _refer_to_cache(self) -> None:
        batch = self._batch
        self._allocation = batch.allocation
        self._c_batch = _Batch(
            keys=batch.keys.data_ptr(),
            values=batch.values.data_ptr(),
            tokens=batch.tokens.data_ptr(),
            logprobs=batch.logprobs.data_ptr(),
            state=batch.row_state.data_ptr(),
            prefixes=ctypes.addressof(self._prefixes),
            most_rows=batch.max_rows,
            columns=batch.columns,
            state_fields=batch.row_state.shape[1],
        )


def panels(weight: torch.Tensor) -> torch.Tensor:
    """[outputs, inputs] → [outputs / 32, inputs, 32], outputs filled up with zeros."""
    filled = F.pad(weight, (0, 0, 0, -weight.shape[0] % _PANEL))
    return filled.view(-1, _PANEL, weight.shape[1]).transpose(1, 2).contiguous()
