"""Attention in half precision on a GPU, by torch's attention over padded rows and by our kernels, against float32.

python3 -m tests.engine.policy.attention.attention_on_gpu [--time]

Prints a JSON object a case; ends with 1 when one is wrong.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from unittest import mock

import torch

from nemotron_steps.engine.policy import layers as attention
from nemotron_steps.engine.policy.layers import flat_attention
from nemotron_steps.engine.policy.token_layout import TokenLayout, build_layout, to_device
from nemotron_steps.engine.types import TrainBatch
from tests.engine.policy.batches import grouped_batch

KERNELS = ("torch", "packed")
LAYOUTS = {
    "suffixes and loners": {"prompts": ((70, 5), (133, 3), (5, 1), (40, 1), (1, 2)), "width": 300, "divisible_by": 1},
    "suffixes, padded": {"prompts": ((64, 4), (9, 4)), "width": 130, "divisible_by": 8},
    "loners": {"prompts": ((30, 1), (200, 1), (17, 1), (1, 1)), "width": 257, "divisible_by": 1},
}
HEADS = ((16, 8, 128), (4, 4, 64), (6, 1, 128))
"""Heads, key-value heads, size of each."""
NAMES = ("output", "query's gradient", "key's", "value's")


def layout_of(name: str) -> TokenLayout:
    case = LAYOUTS[name]
    batch = grouped_batch(prompts=case["prompts"], width=case["width"])
    layout = build_layout(batch, range(len(batch)), divisible_by=case["divisible_by"])
    return to_device(layout, torch.device("cuda"))


def tensors_of(layout: TokenLayout, heads: tuple[int, int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key, value and the output's gradient."""
    query_heads, kv_heads, width = heads
    tokens = len(layout.token_ids)
    generator = torch.Generator("cuda").manual_seed(1)
    shapes = (query_heads, width), (kv_heads, width), (kv_heads, width), (query_heads * width,)
    made = [torch.randn(tokens, *shape, generator=generator, device="cuda").to(dtype) for shape in shapes]
    made[3][tokens - layout.padding :] = 0
    return made


def run(attend: Callable, tensors: list[torch.Tensor], layout: TokenLayout, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients in float32, computed in `dtype`."""
    leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in tensors[:3]]
    out = attend(*leaves, layout)
    out.backward(tensors[3].to(dtype))
    return [found.detach().float() for found in (out, *(leaf.grad for leaf in leaves))]


def errors(layout: TokenLayout, heads: tuple[int, int, int], dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Of each kernel: norm of the difference from float32 over the norm of that, of the output and gradients."""
    tensors = tensors_of(layout, heads, dtype)
    expected = run(flat_attention, tensors, layout, torch.float32)
    found = {}
    for kernels in KERNELS:
        with mock.patch.object(attention, "packed_takes", lambda *_: kernels == "packed"):  # noqa: B023
            mine = run(flat_attention, tensors, layout, dtype)
        found[kernels] = {
            name: ((a - b).norm() / b.norm()).item() for name, a, b in zip(NAMES, mine, expected, strict=True)
        }
    return found


def wrong(found: dict[str, dict[str, float]]) -> list[str]:
    """Where errors are not those of rounding, which torch's kernel has as well."""
    return [
        f"{name} of {kernels}: {mine[name]:.2e}, torch's {found['torch'][name]:.2e}"
        for kernels, mine in found.items()
        for name in NAMES
        if not mine[name] <= 1.5 * found["torch"][name]
    ]


def timing_layout(prompts: int, members: int, prompt: int, length: int) -> TokenLayout:
    """`prompts` groups of `members` sequences of `length` tokens, of which `prompt` are shared in a group. On CPU."""
    rows = prompts * members
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 200, (rows, length), generator=generator)
    ids[:, :prompt] = ids[::members, :prompt].repeat_interleave(members, dim=0)
    mask = torch.zeros(rows, length)
    mask[:, prompt:] = 1
    batch = TrainBatch(
        input_ids=ids,
        lengths=torch.full((rows,), length),
        token_mask=mask,
        sample_mask=torch.ones(rows),
        generation_logprobs=torch.zeros(rows, length),
        advantages=torch.zeros(rows, length),
    )
    return build_layout(batch, range(rows))


def timing(layout: TokenLayout, heads: tuple[int, int, int]) -> dict[str, dict[str, float]]:
    """Of each kernel, bfloat16: milliseconds forward and backward, of a first call, and GiB that a pass takes."""
    from triton.testing import do_bench

    tensors = tensors_of(layout, heads, torch.bfloat16)
    leaves = [tensor.requires_grad_() for tensor in tensors[:3]]
    found = {}
    for kernels in KERNELS:
        with mock.patch.object(attention, "packed_takes", lambda *_: kernels == "packed"):  # noqa: B023
            torch.cuda.synchronize()
            before, started = torch.cuda.memory_allocated(), time.perf_counter()
            torch.cuda.reset_peak_memory_stats()
            out = flat_attention(*leaves, layout)
            torch.autograd.grad(out, leaves, tensors[3])
            torch.cuda.synchronize()
            first, peak = time.perf_counter() - started, torch.cuda.max_memory_allocated() - before
            out = flat_attention(*leaves, layout)
            found[kernels] = {
                "forward_ms": do_bench(lambda: flat_attention(*leaves, layout)),
                "backward_ms": do_bench(
                    lambda out=out: torch.autograd.grad(out, leaves, tensors[3], retain_graph=True)
                ),
                "first_ms": 1e3 * first,
                "gib": peak / 2**30,
            }
    return found


TIMED = {
    "512 x 300, prompts of 44 shared by 8": ((64, 8, 44, 300), HEADS[0]),
    "512 x 300, nothing shared": ((512, 1, 44, 300), HEADS[0]),
    "48 x 300, prompts of 44 shared by 8": ((6, 8, 44, 300), HEADS[0]),
    "64 x 4,096, prompts of 64 shared by 8": ((8, 8, 64, 4096), HEADS[0]),
    "64 x 4,096, nothing shared": ((64, 1, 64, 4096), HEADS[0]),
    "32 x 324, prompts of 68 shared by 8, heads of a 4 B model": ((4, 8, 68, 324), (40, 20, 128)),
    "the same, heads of Nano 4B": ((4, 8, 68, 324), (40, 8, 128)),
    "48 x 324, prompts of 68 shared by 8": ((6, 8, 68, 324), HEADS[0]),
    "the same, heads of 64": ((6, 8, 68, 324), (16, 8, 64)),
    "128 x 128, prompts of 64 shared by 8": ((16, 8, 64, 128), HEADS[0]),
    "64 x 512, prompts of 64 shared by 8, 32 heads": ((8, 8, 64, 512), (32, 8, 128)),
    "64 x 1,024, prompts of 64 shared by 8": ((8, 8, 64, 1024), HEADS[0]),
    "64 x 1,024, nothing shared": ((64, 1, 64, 1024), HEADS[0]),
    "32 x 2,048, prompts of 64 shared by 8": ((4, 8, 64, 2048), HEADS[0]),
    "16 x 2,304, prompts of 2,048 shared by 8": ((2, 8, 2048, 2304), HEADS[0]),
    "16 x 4,096, prompts of 64 shared by 8": ((2, 8, 64, 4096), HEADS[0]),
    "16 x 4,096, nothing shared": ((16, 1, 64, 4096), HEADS[0]),
}
"""Groups, sequences of each, tokens shared, tokens of a sequence; heads, as in HEADS."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", action="store_true", help="and how long each takes")
    arguments = parser.parse_args()
    failures = []
    for name in LAYOUTS:
        for heads in HEADS:
            for dtype in (torch.bfloat16, torch.float16):
                found = errors(layout_of(name), heads, dtype)
                case = f"{name}, heads {heads}, {dtype}"
                failures += [f"{case}: {what}" for what in wrong(found)]
                print(json.dumps({case: found}), flush=True)
    for name, (shape, heads) in TIMED.items() if arguments.time else ():
        print(json.dumps({name: timing(to_device(timing_layout(*shape), torch.device("cuda")), heads)}), flush=True)
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
