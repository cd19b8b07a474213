"""The scan and norm of mamba_ssm and the convolution of fla, in Triton, on CUDA in half precision, if installed."""

import importlib
import importlib.util
import logging
import math
import sys
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nemotron_steps.engine.policy.token_layout import pad, unpad

if TYPE_CHECKING:
    from nemotron_steps.engine.policy.mamba.scan import Runs

_LOG = logging.getLogger(__name__)


def library_for(what: str, like: Tensor) -> Any | None:
    """A library's function for tensors like one, or None."""
    return _loaded(what) if like.is_cuda and like.dtype is not torch.float32 else None


@cache
def _loaded(what: str) -> Any | None:
    name, load = LIBRARIES[what]
    try:
        found = load()
    except Exception as error:  # built for another torch, CUDA or Triton, it fails in as many ways
        if not isinstance(error, ModuleNotFoundError) or str(error.name).split(".")[0] != name:
            _LOG.warning("%s is installed but cannot be imported for the Mamba-2 %s: %s", name, what, error)
        found = None
    _LOG.info("the Mamba-2 %s is %s", what, "the plain one" if found is None else f"that of {name}")
    return found


def _import_triton_part(module: str) -> Any:
    """A module in Triton, if need be without the package's own, which imports CUDA's."""
    name = f"mamba_ssm.ops.triton.{module}"
    try:
        found = importlib.import_module(name)
    except ImportError:
        spec = importlib.util.find_spec("mamba_ssm")
        if spec is None or spec.submodule_search_locations is None:
            raise
        package = importlib.util.module_from_spec(spec)
        sys.modules["mamba_ssm"] = package
        try:
            found = importlib.import_module(name)
        finally:
            del sys.modules["mamba_ssm"]
    _tune_less()
    return found


TUNED = 3


def _tune_less() -> None:
    """Leave each kernel TUNED configurations of ten, or it would compile for minutes."""

    def in_flight(config: Any) -> int:
        return math.prod(size for size in config.kwargs.values() if isinstance(size, int)) * int(config.num_stages)

    modules = [module for name, module in sys.modules.items() if name.startswith("mamba_ssm.ops.triton.")]
    for kernel in [kernel for module in modules for kernel in vars(module).values()]:
        configs = getattr(kernel, "configs", None)
        if isinstance(configs, list) and len(configs) > TUNED:
            first = (len(configs) - TUNED) // 2
            kernel.configs = sorted(configs, key=in_flight)[first : first + TUNED]


def mamba_ssm_scan() -> Any:
    """As scan.py's scan of one level of rows."""
    mamba_chunk_scan_combined = _import_triton_part("ssd_combined").mamba_chunk_scan_combined

    def scan(
        tokens: Sequence[Any], a: Any, d: Any, runs: "Runs", number: int, chunk_size: int, initial: Any, final: bool
    ) -> tuple[Tensor, Tensor | None]:
        if initial is None and not final:
            x, dt, b, c = (tensor[None] for tensor in tokens)
            flat = mamba_chunk_scan_combined(x, dt, a, b, c, chunk_size, D=d, seq_idx=runs.row_of_token[number])
            return flat[0], None
        # States are of batch entries only, so rows that have some go there side by side.
        batches = runs.batches[number]
        cells = [pad(tensor, batches.pad, batches.unpad) for tensor in tokens]
        cells[1] = cells[1] * batches.filled  # padding then leaves the state as it is
        sizes = [rows * width for rows, width in batches.shapes]
        states: Sequence[Tensor | None] = [None] * len(sizes)
        if initial is not None:
            states = torch.split(initial.index_select(0, batches.rows), [rows for rows, _ in batches.shapes])
        outs, ends = [], []
        split = [torch.split(tensor, sizes) for tensor in cells]
        for shape, state, *parts in zip(batches.shapes, states, *split, strict=True):
            x, dt, b, c = (part.view(*shape, *part.shape[1:]) for part in parts)
            y, end = mamba_chunk_scan_combined(
                x, dt, a, b, c, chunk_size, D=d, initial_states=state, return_final_states=True
            )
            outs.append(y.flatten(0, 1))
            ends.append(end)
        y = unpad(torch.cat(outs), batches.unpad)
        return y, torch.cat(ends).float().index_select(0, batches.places) if final else None

    return scan


def fla_conv() -> Any:
    """Cells [n, C], weight [C, 1, K], bias [C] → silu of their convolution, as one run."""
    from fla.modules.causal_conv1d import causal_conv1d

    def conv(cells: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = causal_conv1d(cells[None], weight=weight[:, 0], bias=bias, activation="silu")[0]
        return out[0]

    return conv


def mamba_ssm_norm() -> Any:
    """As mixer.py's gated norm."""
    rmsnorm_fn = _import_triton_part("layernorm_gated").rmsnorm_fn

    def norm(y: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
        return rmsnorm_fn(y, weight, None, z=gate, eps=eps, group_size=y.shape[1] // groups, norm_before_gate=False)

    return norm


LIBRARIES = {
    "scan": ("mamba_ssm", mamba_ssm_scan),
    "convolution": ("fla", fla_conv),
    "norm": ("mamba_ssm", mamba_ssm_norm),
}
