"""One whole decoding step, from the newest tokens to the next ones, as one call: a CUDA graph, or a kernel in C.

For a CUDA graph, shapes are fixed by rounding the number of rows up; where the step writes, and how far each row reads,
is found on the device (kernels.py). Batches with top-p, top-k or mixed temperatures are decoded operator by operator.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from typing import Any

import torch
import torch.nn.functional as F

from nemotron_steps.engine.generation.embedded.cached_model import CachedModel, DeviceView
from nemotron_steps.engine.generation.embedded.decode_batch import DecodeBatch
from nemotron_steps.engine.generation.embedded.dense_model import CachedDenseModel
from nemotron_steps.engine.generation.embedded.prefix_cache import (
    PREFIX_FIELDS,
    Prefix,
    address,
    rows_together,
    sets_of_rows,
)
from nemotron_steps.engine.generation.embedded.sampling import SamplingPlan, sample, stream_uniforms
from nemotron_steps.engine.kernels.compiler import library

_TEMPERATURES = 4  # training, evaluation, and two more: requests from outside may name any, and graphs take memory


class GraphDecoder:
    """Steps a DecodeBatch; without `capture` by the same operators one by one, on any device."""

    def __init__(self, model: CachedModel, batch: DecodeBatch, *, capture: bool = True) -> None:
        self._model = model
        self._batch = batch
        self._capture = capture
        self._column = torch.zeros(1, dtype=torch.int64, device=model.device)
        self._prefixes = torch.zeros((batch.max_rows, PREFIX_FIELDS), dtype=torch.int64, device=model.device)
        self._together = rows_together(model.queries_per_lane)
        self._sharing = torch.zeros(1 + batch.max_rows * self._together, dtype=torch.int64, device=model.device)
        self._arrangement = -1
        self._allocation = batch.allocation
        self._graphs: dict[tuple[int, float], torch.cuda.CUDAGraph] = {}
        self._temperatures: set[float] = set()
        self._pool: Any = torch.cuda.graph_pool_handle() if capture else None

    @staticmethod
    def of(model: CachedModel, batch: DecodeBatch) -> GraphDecoder | None:
        """None where the kernels do not run: without a CUDA device, or for heads whose size is not a power of two."""
        dim = model.architecture.head_dim
        fits = model.device.type == "cuda" and dim >= 16 and dim & (dim - 1) == 0
        return GraphDecoder(model, batch) if fits else None

    def takes(self, plan: SamplingPlan) -> bool:
        """Whether every row samples alike, from the whole distribution, at one of the first few temperatures asked."""
        if plan.top_p is not None or isinstance(plan.temperature, torch.Tensor):
            return False
        if len(self._temperatures) < _TEMPERATURES:
            self._temperatures.add(plan.temperature)
        return plan.temperature in self._temperatures

    def step(self, plan: SamplingPlan) -> None:
        """Feed the tokens of the current column and sample those of the next, to which the batch moves."""
        batch = self._batch
        assert not isinstance(plan.temperature, torch.Tensor)
        # Graphs are captured for 8, 12, 16, 24, 32, 48, … rows, and for the most there may be.
        sizes = (size for power in range(3, 64) for size in (2**power, 3 * 2 ** (power - 1)))
        rows = min(next(size for size in sizes if size >= batch.size), batch.max_rows)
        self._refer_to_prefixes()
        self._column.fill_(batch.column)
        if batch.states is not None:
            batch.states.place.fill_(batch.states.newest)
        if self._allocation != batch.allocation:  # graphs hold the addresses of the tensors they were captured with
            self._allocation = batch.allocation
            self._graphs.clear()
            # torch ends a pool with the last graph in it
            self._pool = torch.cuda.graph_pool_handle() if self._capture else None
        key = (rows, plan.temperature)
        if key in self._graphs:
            self._graphs[key].replay()
        else:
            self._run(rows, plan)  # this step, which also compiles whatever the capture needs
            if self._capture:
                graph = torch.cuda.CUDAGraph()
                # Another thread may be training on this device meanwhile.
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    self._run(rows, plan)
                self._graphs[key] = graph
        batch.column += 1
        if batch.states is not None:
            batch.states.advance()

    def _run(self, rows: int, plan: SamplingPlan) -> None:
        batch, column = self._batch, self._column
        tokens = batch.tokens[:rows].index_select(1, column).squeeze(1)
        view = DeviceView(
            batch.keys, batch.values, column, batch.row_state, self._prefixes, self._sharing, batch.states
        )
        logits = self._model.decode_fused(tokens, view).float()
        chosen = self._model.take_chosen()
        if chosen is not None:
            batch.routed_experts[:rows].index_copy_(1, column, chosen.unsqueeze(1))
        column.add_(1)
        uniforms = stream_uniforms(batch.streams[:rows], column - batch.answers[:rows], 1).squeeze(1)
        sampled, logprobs = sample(logits, uniforms, plan)
        batch.tokens[:rows].index_copy_(1, column, sampled.unsqueeze(1))
        batch.logprobs[:rows].index_copy_(1, column, logprobs.unsqueeze(1))

    def _refer_to_prefixes(self) -> None:
        """Where each row's shared prefix lies; its tensors are held by the batch."""
        batch = self._batch
        if self._arrangement == batch.arrangement:
            return
        self._arrangement = batch.arrangement
        table = torch.zeros(self._prefixes.shape, dtype=torch.int64)
        rows_of: dict[Prefix, list[int]] = {}
        for row, prefix in enumerate(batch.row_prefixes):
            if prefix is not None:
                rows_of.setdefault(prefix, []).append(row)
        for prefix, rows in rows_of.items():
            table[rows] = torch.tensor(address(prefix))
        self._prefixes.copy_(table)
        sets = sets_of_rows(rows_of.values(), self._together)
        self._sharing[: 1 + sets.numel()] = F.pad(sets.flatten(), (1, 0), value=len(sets)).to(self._sharing.device)


_PANEL, _BLOCK = 32, 8  # products.h
_MOST_WEIGHTS = 2**23
"""Weights of larger models come from memory, once a thread, which takes longer than what this saves."""


def _fields(pointers: str, integers: str = "", floats: str = "") -> list[tuple[str, type]]:
    kinds = ((pointers, c_void_p), (integers, c_int64), (floats, c_float))
    return [(name, kind) for names, kind in kinds for name in names.split()]


class _Layer(ctypes.Structure):
    """The four structures are those of decode.c, in the order of their fields."""

    _fields_ = _fields("input_norm qkv qkv_bias qk_norm output post_norm gate_up down")


class _Model(ctypes.Structure):
    _fields_ = _fields(
        "layers embedding head final_norm rotations", "num_layers hidden ffn heads queries dim vocab positions", "eps"
    )


class _Prefix(ctypes.Structure):
    _fields_ = _fields("keys values", "tokens layer_stride head_stride")


class _Batch(ctypes.Structure):
    _fields_ = _fields(
        "keys values tokens logprobs state prefixes", "most_rows columns state_fields column", "temperature"
    )


class NativeDecoder:
    """Steps a DecodeBatch by the C of `library()`."""

    def __init__(self, model: CachedDenseModel, batch: DecodeBatch, kernels: ctypes.CDLL) -> None:
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
        weights, a = model.weights, model.architecture
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

    @staticmethod
    def of(model: CachedModel, batch: DecodeBatch) -> NativeDecoder | None:
        """None where the kernel is not for this model or device, or there is no C compiler."""
        if not isinstance(model, CachedDenseModel) or model.device.type != "cpu" or model.dtype is not torch.float32:
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
            self._allocation = batch.allocation
            tensors = (batch.keys, batch.values, batch.tokens, batch.logprobs, batch.row_state)
            self._c_batch = _Batch(
                *(tensor.data_ptr() for tensor in tensors),
                ctypes.addressof(self._prefixes),
                batch.max_rows,
                batch.columns,
                batch.row_state.shape[1],
            )
        self._c_batch.column, self._c_batch.temperature = batch.column, plan.temperature
        threads, model = torch.get_num_threads(), ctypes.byref(self._c_model)
        rows = -(-batch.size // (threads * _BLOCK)) * _BLOCK  # a thread's rows are whole blocks
        each = self._scratch_of(model, rows, self._longest_prefix + batch.columns)
        if self._scratch.numel() < threads * each:
            self._scratch = torch.zeros(threads * each)
        batch_pointer = ctypes.byref(self._c_batch)
        self._step(model, batch_pointer, batch.size, threads, self._scratch.data_ptr(), each)
        batch.column += 1

    def _pack(self) -> None:
        """Matrices as panels, after the weights have changed."""
        self._loads = self._model.loads
        self._panels = [panels(weight) for weight in self._model.matrices()]
        of_layers, head = self._panels[:-1], self._panels[-1]
        self._c_model.head = head.data_ptr()
        for i, layer in enumerate(self._model.layers):
            qkv, output, gate_up, down = of_layers[4 * i : 4 * i + 4]
            packed = layer._replace(qkv=qkv, output=output, gate_up=gate_up, down=down)._asdict()
            self._layers[i] = _Layer(**{name: None if t is None else t.data_ptr() for name, t in packed.items()})

    def _refer_to_prefixes(self) -> None:
        """Where each row's shared prefix lies; its tensors are held by the batch."""
        self._arrangement = self._batch.arrangement
        self._longest_prefix = 0
        known: dict[int, _Prefix] = {}
        for row, prefix in enumerate(self._batch.row_prefixes):
            if prefix is not None and id(prefix) not in known:
                known[id(prefix)] = _Prefix(*address(prefix))
                self._longest_prefix = max(self._longest_prefix, len(prefix.tokens))
            self._prefixes[row] = _Prefix() if prefix is None else known[id(prefix)]


def panels(weight: torch.Tensor) -> torch.Tensor:
    """[outputs, inputs] → [outputs / 32, inputs, 32], outputs filled up with zeros."""
    filled = F.pad(weight, (0, 0, 0, -weight.shape[0] % _PANEL))
    return filled.view(-1, _PANEL, weight.shape[1]).transpose(1, 2).contiguous()
