"""One Mamba-2 layer's scan, convolution and norm at 16k tokens, forward and backward: libraries against plain code.

    python3 -m benchmarks.bench_scan [--tokens 16384] [--rows 1 8 64] [--chunks 128 256] [--json]

On one CUDA GPU in bfloat16, at Nano 3's shapes: 64 heads of 64, state 128, 8 groups, 6,144 channels, kernel 4. A
candidate that is not installed, or does not work here, is a row that says so. The floor is what must be read and
written once (inputs, output and their gradients) over the memory's speed. Distances are from the plain code on float32
copies of the same inputs, as shares of a result's size; a candidate farther away than 3 % is wrong and ends the run
with 1.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nemotron_steps.engine.policy.mamba import libraries
from nemotron_steps.engine.policy.mamba import mixer as norm_module
from nemotron_steps.engine.policy.mamba import scan as conv_module
from nemotron_steps.engine.policy.mamba import scan as scan_module
from nemotron_steps.engine.policy.mamba.scan import Runs, conv, scan

HEADS, HEAD_DIM, GROUPS, STATE, KERNEL = 64, 64, 8, 128, 4
CHANNELS = HEADS * HEAD_DIM + 2 * GROUPS * STATE
BYTES_PER_S = {"H100": 3.35e12, "H200": 4.8e12, "A100": 2.04e12, "B200": 8e12}
"""Of the data sheets."""
FARTHEST = 0.03
Timed = dict[str, Any]


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """As a share of the size of what is expected."""
    exact = expected.detach().float()
    return float((found.detach().float() - exact).norm() / exact.norm())


def rows_of(tokens: int, rows: int) -> list[int]:
    """Lengths of a packed micro-batch: from a half to one and a half of the mean."""
    shares = [1 + (2 * row / max(rows - 1, 1) - 1) / 2 for row in range(rows)]
    lengths = [max(1, int(tokens * share / sum(shares))) for share in shares]
    return [*lengths[:-1], tokens - sum(lengths[:-1])]


def scan_inputs(tokens: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    dt = torch.nn.functional.softplus(normal(tokens, HEADS) - 4)
    a, d = -torch.linspace(1, 16, HEADS, device=device), normal(HEADS)
    x, b, c = normal(tokens, HEADS, HEAD_DIM), normal(tokens, GROUPS, STATE), normal(tokens, GROUPS, STATE)
    return [t.requires_grad_() for t in (x.bfloat16(), dt, a, b.bfloat16(), c.bfloat16(), d)]


def measure(call: Callable[[], torch.Tensor], given: Sequence[torch.Tensor], upstream: torch.Tensor) -> Timed:
    """Medians of ten: ms of a forward pass without gradients, and of both; and the memory that both take."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    forward, both = [], []
    for attempt in range(13):
        events[0].record()
        with torch.no_grad():
            call()
        events[1].record()
        torch.autograd.grad(call(), given, upstream)
        events[2].record()
        torch.cuda.synchronize()
        if attempt >= 3:
            forward.append(events[0].elapsed_time(events[1]))
            both.append(events[1].elapsed_time(events[2]))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(call(), given, upstream)
    peak = torch.cuda.max_memory_allocated() - before
    return {"forward_ms": statistics.median(forward), "both_ms": statistics.median(both), "peak_gb": peak / 1e9}


def agreement(
    call: Callable[[], torch.Tensor], given: Sequence[torch.Tensor], upstream: torch.Tensor, exact: list[torch.Tensor]
) -> Timed:
    out = call()
    grads = torch.autograd.grad(out, given, upstream)
    return {
        "out": distance(out, exact[0]),
        "gradients": max(distance(mine, theirs) for mine, theirs in zip(grads, exact[1:], strict=True)),
    }


def compare(
    candidates: dict[str, Callable[[], Any]],
    use: Callable[[Any, Sequence[torch.Tensor]], torch.Tensor],
    given: list[torch.Tensor],
) -> dict[str, Timed]:
    """Every candidate's figures, of `use(candidate, inputs)`; None is the plain code."""
    exact_given = [tensor.detach().float().requires_grad_() for tensor in given]
    exact_out = use(None, exact_given)
    upstream = torch.randn(exact_out.shape, device=exact_out.device)
    exact = [exact_out.detach(), *torch.autograd.grad(exact_out, exact_given, upstream)]
    upstream = upstream.to(given[0].dtype)
    del exact_out, exact_given
    found: dict[str, Timed] = {}
    for name, load in {"plain": lambda: None, **candidates}.items():
        try:
            candidate = load()
            call = lambda candidate=candidate: use(candidate, given)  # noqa: E731
            found[name] = {**agreement(call, given, upstream, exact), **measure(call, given, upstream)}
        except Exception as error:  # whatever one says, the others are measured
            found[name] = {"error": f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]}
        torch.cuda.empty_cache()
    return found


def use_scan(runs: Runs, chunk_size: int) -> Callable[[Any, Sequence[torch.Tensor]], torch.Tensor]:
    def use(candidate: Any, given: Sequence[torch.Tensor]) -> torch.Tensor:
        scan_module.library_for = lambda *_: candidate
        return scan(*given, runs, chunk_size)[0]

    return use


def use_conv(runs: Runs) -> Callable[[Any, Sequence[torch.Tensor]], torch.Tensor]:
    def use(candidate: Any, given: Sequence[torch.Tensor]) -> torch.Tensor:
        conv_module.library_for = lambda *_: candidate
        return conv(*given, runs)

    return use


def use_norm(candidate: Any, given: Sequence[torch.Tensor]) -> torch.Tensor:
    norm_module.library_for = lambda *_: candidate
    return norm_module.gated_norm(*given, GROUPS, 1e-5)


def bandwidth(device: torch.device) -> float:
    """Bytes a second of the data sheet, or measured by a copy where the GPU is not in the table."""
    name = torch.cuda.get_device_name(device)
    known = [speed for kind, speed in BYTES_PER_S.items() if kind in name]
    if known:
        return known[0]
    source = torch.empty(2**28, dtype=torch.float32, device=device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    source.clone()
    events[0].record()
    source.clone()
    events[1].record()
    torch.cuda.synchronize()
    return 2 * source.numel() * 4 / (events[0].elapsed_time(events[1]) / 1e3)


def floor_ms(given: Sequence[torch.Tensor], out_bytes: int, speed: float) -> tuple[float, float]:
    """Of a forward pass, and of both: inputs read and output written; then inputs and the output's gradient read, and
    the inputs' gradients written."""
    read = sum(tensor.numel() * tensor.element_size() for tensor in given)
    return (read + out_bytes) / speed * 1e3, (read + out_bytes + read + out_bytes + read) / speed * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--json", action="store_true", help="print one line of JSON as well, the last")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_scan needs a CUDA GPU", file=sys.stderr)
        return 2
    device, results = torch.device("cuda"), {}
    speed = bandwidth(device)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {speed / 1e12:.2f} TB/s")
    for rows in asked.rows:
        runs = Runs(rows_of(asked.tokens, rows), device=device)
        given = scan_inputs(asked.tokens, device)
        floor = floor_ms(given, given[0].numel() * 2, speed)
        for chunk in asked.chunks:
            found = compare({"mamba_ssm": libraries.mamba_ssm_scan}, use_scan(runs, chunk), given)
            results[f"scan, {rows} rows, chunk {chunk}"] = show(f"scan, {rows} rows, chunk {chunk}", found, floor)
        shapes = (asked.tokens, CHANNELS), (CHANNELS, 1, KERNEL), (CHANNELS,)
        given = [torch.randn(shape, device=device).bfloat16().requires_grad_() for shape in shapes]
        floor = floor_ms(given, given[0].numel() * 2, speed)
        found = compare({"fla": libraries.fla_conv}, use_conv(runs), given)
        results[f"convolution, {rows} rows"] = show(f"convolution, {rows} rows", found, floor)
    shapes = (asked.tokens, HEADS * HEAD_DIM), (asked.tokens, HEADS * HEAD_DIM), (HEADS * HEAD_DIM,)
    given = [torch.randn(shape, device=device).bfloat16().requires_grad_() for shape in shapes]
    floor = floor_ms(given, given[0].numel() * 2, speed)
    results["norm"] = show("norm", compare({"mamba_ssm": libraries.mamba_ssm_norm}, use_norm, given), floor)
    if asked.json:
        print(json.dumps(results))
    wrong = [
        f"{case}: {name}"
        for case, found in results.items()
        for name, one in found.items()
        if "error" not in one and not max(one["out"], one["gradients"]) < FARTHEST
    ]
    print(*(f"WRONG {case}" for case in wrong), sep="\n")
    return 1 if wrong else 0


def show(case: str, found: dict[str, Timed], floor: tuple[float, float]) -> dict[str, Timed]:
    """Print a table."""
    print(f"\n{case}: floor {floor[0]:.2f} ms forward, {floor[1]:.2f} both")
    print(f"{'':16}{'forward':>10}{'both':>10}{'of floor':>10}{'of plain':>10}{'GB':>7}{'out':>9}{'grads':>9}")
    for name, one in found.items():
        if "error" in one:
            print(f"{name:16}{one['error'][:100]}")
            continue
        times, plain = one["both_ms"] / floor[1], found["plain"].get("both_ms", float("nan")) / one["both_ms"]
        print(
            f"{name:16}{one['forward_ms']:9.2f}ms{one['both_ms']:8.2f}ms{times:9.1f}x{plain:9.1f}x"
            f"{one['peak_gb']:7.2f}{one['out']:9.1e}{one['gradients']:9.1e}"
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
