"""The scan, convolution and norm of well-kept libraries, on CUDA in half precision, where one is installed and works.

    mamba_ssm        mamba_chunk_scan_combined (Triton); states of single rows by padded batches, which is all it has;
                     rmsnorm_fn (Triton)
    fla              simple_gla (Triton), the same recurrence: q = C, k = B, v = dt · x, g = dt · A; causal_conv1d
    causal_conv1d    causal_conv1d_fn (CUDA)

In the order of preference, and each tried once on a few tokens against the plain code, forwards and backwards: versions
differ in what they take, and some refuse some GPUs (fla's gradient on Hopper with Triton 3.4 to 3.7.0, say). The choice
is logged and kept, unless it was made for want of memory. float32 stays with the plain code, which does not round to
TensorFloat-32.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nemotron_steps.engine.kernels.varlen import pad, unpad
from nemotron_steps.engine.policy.mamba.segments import Runs
from nemotron_steps.errors import first_line

_LOG = logging.getLogger(__name__)

LevelScan = Callable[..., tuple[Tensor, Tensor | None]]
"""As scan.py's scan of one level of rows."""
Conv = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""cells [n, C], weight [C, 1, K], bias [C] → silu of their convolution, as one run."""
Norm = Callable[[Tensor, Tensor, Tensor, int, float], Tensor]
"""As mixer.py's gated norm."""


def scan_for(x: Tensor, b: Tensor, plain: LevelScan) -> LevelScan | None:
    """The library's scan for tensors like x [T, H, P] and b [T, G, N]; None for the plain one."""
    return _library_for("scan", x, plain, tuple(x.shape[1:]), tuple(b.shape[1:]))


def conv_for(states: Tensor, kernel: int, plain: Conv) -> Conv | None:
    """The library's convolution for tensors like states [T, C]; None for the plain one."""
    return _library_for("convolution", states, plain, states.shape[1], kernel)


def norm_for(y: Tensor, groups: int, plain: Norm) -> Norm | None:
    """The library's gated norm for tensors like y [T, W]; None for the plain one."""
    return _library_for("norm", y, plain, y.shape[1], groups)


def _library_for(what: str, like: Tensor, plain: Any, *sizes: object) -> Any | None:
    """None too where the GPU has no memory for a trial now, and the next pass tries again."""
    if not like.is_cuda or like.dtype is torch.float32:
        return None
    try:
        return _chosen(what, plain, like.device, like.dtype, *sizes)
    except torch.OutOfMemoryError as error:
        _LOG.warning("no memory to try a library for Mamba-2: the plain code this time: %s", first_line(error))
        return None


@cache
def _chosen(what: str, plain: Any, *given: Any) -> Any | None:
    kinds: dict[str, tuple[Mapping[str, Any], Callable[..., None]]] = {
        "scan": (SCANS, try_scan),
        "convolution": (CONVS, try_conv),
        "norm": (NORMS, try_norm),
    }
    candidates, attempt = kinds[what]
    return first_that_works(what, candidates, lambda found: attempt(found, plain, *given))


def first_that_works(
    what: str, candidates: Mapping[str, Callable[[], Any]], attempt: Callable[[Any], None]
) -> Any | None:
    """The first of some libraries' functions that can be imported and passes `attempt`; None if none does.

    Args:
        candidates: name → a function that imports and returns it.
        attempt: raises where it does not work.

    Raises:
        torch.OutOfMemoryError: there is no memory to try.
    """
    for name, load in candidates.items():
        try:
            found = load()
        except Exception as error:  # built for another torch, CUDA or Triton, it fails in as many ways
            absent = isinstance(error, ModuleNotFoundError) and str(error.name).split(".")[0] == name
            if not absent:
                _LOG.warning("%s is installed but cannot be imported for the Mamba-2 %s: %s", name, what, error)
            continue
        try:
            # Whatever keeps tensors of the pass that asks, activation checkpointing say, has no part in this.
            with (
                torch.inference_mode(False),
                torch.enable_grad(),
                torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
            ):
                attempt(found)
        except torch.OutOfMemoryError:
            raise  # says nothing of the library
        except Exception as error:
            _LOG.warning("%s does not work here for the Mamba-2 %s: %s", name, what, first_line(error))
            continue
        _LOG.info("the Mamba-2 %s is that of %s", what, name)
        return found
    _LOG.info("the Mamba-2 %s is the plain one", what)
    return None


# Each try compares results and gradients on a few tokens: RuntimeError if they differ by more than rounding.


def try_scan(
    scan: LevelScan,
    plain: LevelScan,
    device: torch.device,
    dtype: torch.dtype,
    heads: Sequence[int],
    groups: Sequence[int],
) -> None:
    """Rows with and without states."""
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


def try_conv(conv: Conv, plain: Conv, device: torch.device, dtype: torch.dtype, channels: int, kernel: int) -> None:
    """A few cells."""
    given = _random([(70, channels), (channels, 1, kernel), (channels,)], device, dtype)
    results = []
    for function in (conv, plain):
        out = function(*given)
        results.append([out, *torch.autograd.grad(out.float().sum(), given)])
    _compare(*results)


def try_norm(norm: Norm, plain: Norm, device: torch.device, dtype: torch.dtype, width: int, groups: int) -> None:
    """A few tokens, whose gates are a part of wider ones."""
    given = _random([(7, width), (7, 2 * width), (width,)], device, dtype)
    results = []
    for function in (norm, plain):
        out = function(given[0], given[1][:, :width], given[2], groups, 1e-5)
        results.append([out, *torch.autograd.grad((out.float() * given[0].detach().float().cos()).sum(), given)])
    _compare(*results)


def _random(shapes: Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_() for shape in shapes]


def _compare(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        if mine.shape != theirs.shape or mine.dtype is not theirs.dtype:
            raise RuntimeError(f"{mine.dtype} {tuple(mine.shape)} in place of {theirs.dtype} {tuple(theirs.shape)}")
        apart = distance(mine, theirs)
        if not apart < 0.03:
            raise RuntimeError(f"a result that is {apart:.2g} of its size away from the plain one")


def distance(found: Tensor, expected: Tensor) -> float:
    """How far one tensor is from another, as a share of the size of that."""
    exact = expected.detach().float()
    return float((found.detach().float() - exact).norm() / exact.norm())


def _import_triton_part(module: str) -> Any:
    """A module of mamba_ssm's in Triton.

    Importing the package imports its CUDA extension, which these modules do not need and an installation may lack
    (MAMBA_SKIP_CUDA_BUILD): they are then imported without the package's own.
    """
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
"""Configurations that each kernel of mamba_ssm's chooses from, by time."""


def _tune_less() -> None:
    """Leave each of mamba_ssm's kernels the TUNED configurations whose blocks are of a middle size.

    It has about ten for each of some fifteen kernels, and the first pass would compile all of them for minutes.
    """

    def in_flight(config: Any) -> int:
        return math.prod(size for size in config.kwargs.values() if isinstance(size, int)) * int(config.num_stages)

    for name, module in list(sys.modules.items()):
        if name.startswith("mamba_ssm.ops.triton."):
            for kernel in vars(module).values():
                configs = getattr(kernel, "configs", None)
                if isinstance(configs, list) and len(configs) > TUNED:
                    first = (len(configs) - TUNED) // 2
                    kernel.configs = sorted(configs, key=in_flight)[first : first + TUNED]


def _mamba_ssm_scan() -> LevelScan:
    mamba_chunk_scan_combined = _import_triton_part("ssd_combined").mamba_chunk_scan_combined

    def scan(
        tokens: Sequence[Any], a: Any, d: Any, runs: Runs, number: int, chunk_size: int, initial: Any, final: bool
    ) -> tuple[Tensor, Tensor | None]:
        if initial is None and not final:
            x, dt, b, c = (tensor[None] for tensor in tokens)
            flat = mamba_chunk_scan_combined(x, dt, a, b, c, chunk_size, D=d, seq_idx=runs.row_of_token[number])
            return flat[0], None
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


def _fla_scan() -> LevelScan:
    from fla.ops.simple_gla import chunk_simple_gla

    def scan(
        tokens: Sequence[Any], a: Any, d: Any, runs: Runs, number: int, chunk_size: int, initial: Any, final: bool
    ) -> tuple[Tensor, Tensor | None]:
        x, dt, b, c = tokens
        each = x.shape[1] // b.shape[1]
        y, end = chunk_simple_gla(
            q=c.repeat_interleave(each, 1)[None],
            k=b.repeat_interleave(each, 1)[None],
            v=(x * dt[..., None]).to(x.dtype)[None],
            g=(dt * a)[None],
            scale=1.0,
            initial_state=None if initial is None else initial.transpose(2, 3).contiguous(),
            output_final_state=final,
            cu_seqlens=runs.cu_seqlens[number],
        )
        y = torch.addcmul(y[0].float(), x.float(), d[:, None]).to(x.dtype)
        return y, end.float().transpose(2, 3) if final else None

    return scan


def _causal_conv1d() -> Conv:
    from causal_conv1d import causal_conv1d_fn

    def conv(cells: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Channels lie side by side, as the function wants them of its [batch, C, cells].
        out: Tensor = causal_conv1d_fn(cells[None].transpose(1, 2), weight[:, 0], bias, activation="silu")
        return out[0].t()

    return conv


def _fla_conv() -> Conv:
    from fla.modules.causal_conv1d import causal_conv1d

    def conv(cells: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = causal_conv1d(cells[None], weight=weight[:, 0], bias=bias, activation="silu")[0]
        return out[0]

    return conv


def _mamba_ssm_norm() -> Norm:
    rmsnorm_fn = _import_triton_part("layernorm_gated").rmsnorm_fn

    def norm(y: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
        return rmsnorm_fn(y, weight, None, z=gate, eps=eps, group_size=y.shape[1] // groups, norm_before_gate=False)

    return norm


SCANS: dict[str, Callable[[], LevelScan]] = {"mamba_ssm": _mamba_ssm_scan, "fla": _fla_scan}
CONVS: dict[str, Callable[[], Conv]] = {"causal_conv1d": _causal_conv1d, "fla": _fla_conv}
NORMS: dict[str, Callable[[], Norm]] = {"mamba_ssm": _mamba_ssm_norm}
