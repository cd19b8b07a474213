"""The scan and norm of mamba_ssm and the convolution of fla, in Triton, on CUDA in half precision, where they work.

Each is tried once against the plain code, forwards and backwards: versions differ in what they take, and some refuse
some GPUs. The choice is logged and kept, unless it was made for want of memory.
"""

import importlib
import importlib.util
import logging
import math
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nemotron_steps.engine.policy.token_layout import pad, unpad
from nemotron_steps.errors import first_line

if TYPE_CHECKING:
    from nemotron_steps.engine.policy.mamba.scan import Runs

_LOG = logging.getLogger(__name__)


def library_for(what: str, like: Tensor, plain: Any, *sizes: Any) -> Any | None:
    """A library's function for tensors like one, or None; tried again after lack of memory."""
    if not like.is_cuda or like.dtype is torch.float32:
        return None
    try:
        return _chosen(what, plain, like.device, like.dtype, *sizes)
    except torch.OutOfMemoryError as error:
        _LOG.warning("no memory to try a library for Mamba-2: the plain code this time: %s", first_line(error))
        return None


@cache
def _chosen(what: str, *given: Any) -> Any | None:
    name, load, attempt = LIBRARIES[what]
    found = if_it_works(what, name, load, lambda found: attempt(found, *given))
    if found is None:
        _LOG.info("the Mamba-2 %s is the plain one", what)
    return found


def if_it_works(what: str, name: str, load: Callable[[], Any], attempt: Callable[[Any], None]) -> Any | None:
    """A library's function, if it can be imported and passes `attempt`."""
    try:
        found = load()
    except Exception as error:  # built for another torch, CUDA or Triton, it fails in as many ways
        if not isinstance(error, ModuleNotFoundError) or str(error.name).split(".")[0] != name:
            _LOG.warning("%s is installed but cannot be imported for the Mamba-2 %s: %s", name, what, error)
        return None
    try:
        # Whatever keeps tensors of the pass that asks, activation checkpointing say, has no part in this.
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        ):
            attempt(found)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _LOG.warning("%s does not work here for the Mamba-2 %s: %s", name, what, first_line(error))
        return None
    _LOG.info("the Mamba-2 %s is that of %s", what, name)
    return found


def try_scan(
    scan: Any, plain: Any, device: torch.device, dtype: torch.dtype, heads: Sequence[int], groups: Sequence[int]
) -> None:
    """RuntimeError where results or gradients differ by more than rounding."""
    from nemotron_steps.engine.policy.mamba.scan import Runs  # which imports this

    generator = torch.Generator(device).manual_seed(0)
    runs = Runs([70, 3, 200], device=device)
    shapes = [(runs.tokens, *heads), (runs.tokens, heads[0]), (runs.tokens, *groups), (runs.tokens, *groups)]
    x, dt, b, c = (torch.randn(shape, generator=generator, device=device) for shape in shapes)
    tokens = [x.to(dtype), torch.nn.functional.softplus(dt - 2), b.to(dtype), c.to(dtype)]
    rates = -torch.linspace(0.5, 4, heads[0], device=device), torch.ones(heads[0], device=device)
    state = torch.randn(3, *heads, groups[1], generator=generator, device=device)
    for initial, final in ((None, False), (None, True), (state, True)):
        given = [t.detach().requires_grad_() for t in (*tokens, *rates, *([] if initial is None else [initial]))]
        results = []
        for function in (scan, plain):
            begun = None if initial is None else given[6]
            y, end = function(given[:4], given[4], given[5], runs, 0, 128, begun, final)
            total = (y.float() * x.sign()).sum() + (0 if end is None else end.sum())
            results.append([y, *([] if end is None else [end]), *torch.autograd.grad(total, given)])
        _compare(*results)


def try_conv(conv: Any, plain: Any, device: torch.device, dtype: torch.dtype, channels: int, kernel: int) -> None:
    """As `try_scan`."""
    shapes = [(70, channels), (channels, 1, kernel), (channels,)]
    _try(lambda run, given: run(*given), conv, plain, shapes, device, dtype)


def try_norm(norm: Any, plain: Any, device: torch.device, dtype: torch.dtype, width: int, groups: int) -> None:
    """As `try_scan`, of tokens whose gates are a part of wider ones."""
    shapes = [(7, width), (7, 2 * width), (width,)]
    _try(lambda run, t: run(t[0], t[1][:, :width], t[2], groups, 1e-5), norm, plain, shapes, device, dtype)


def _try(call: Any, library: Any, plain: Any, shapes: Sequence[Any], device: torch.device, dtype: torch.dtype) -> None:
    random = torch.Generator(device).manual_seed(0)
    given = [torch.randn(shape, generator=random, device=device).to(dtype).requires_grad_() for shape in shapes]
    results = []
    for function in (library, plain):
        out = call(function, given)
        total = (out.float() * given[0].detach().float().cos()).sum()
        results.append([out, *torch.autograd.grad(total, given)])
    _compare(*results)


def _compare(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        if mine.shape != theirs.shape or mine.dtype is not theirs.dtype:
            raise RuntimeError(f"{mine.dtype} {tuple(mine.shape)} in place of {theirs.dtype} {tuple(theirs.shape)}")
        exact = theirs.detach().float()
        apart = float((mine.detach().float() - exact).norm() / exact.norm())
        if not apart < 0.03:
            raise RuntimeError(f"a result that is {apart:.2g} of its size away from the plain one")


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


LIBRARIES: dict[str, tuple[str, Callable[[], Any], Callable[..., None]]] = {
    "scan": ("mamba_ssm", mamba_ssm_scan, try_scan),
    "convolution": ("fla", fla_conv, try_conv),
    "norm": ("mamba_ssm", mamba_ssm_norm, try_norm),
}
