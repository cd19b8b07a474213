"""The embedded generator's attention kernel on a GPU: microseconds and bytes per second for batches of each kind.

    python3 -m tests.benchmarks.bench_decode_attention [--parts 1 2 4 8]      last line JSON

One layer of 8 key-value heads of 128 with 2 queries each, bfloat16. `--parts` sets how many programs share a row's keys
in place of what the generator chooses.
"""

from __future__ import annotations

import argparse
import json
from unittest import mock

import torch
from triton.testing import do_bench

from nemotron_steps.engine.generation.embedded import kernels as embedded_kernels
from nemotron_steps.engine.generation.embedded.graph import PREFIX_FIELDS

SHAPES = ((512, 320), (128, 200), (64, 1100), (64, 2100), (8, 4096))
"""Rows, and keys of each."""
HEADS, QUERIES, DIM = 8, 2, 128


def measure(rows: int, keys: int) -> dict[str, float]:
    """One batch, whose cache has room for twice as many columns."""
    columns = 2 * keys

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def integers(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device="cuda", dtype=torch.int64)

    qkv, norm = random(rows, HEADS * (QUERIES + 2) * DIM), random(QUERIES + 1, DIM)
    cache = random(rows, HEADS, columns, DIM), random(rows, HEADS, columns, DIM)
    rotations = torch.randn(columns, DIM // 2, 2, device="cuda")
    where = integers(1) + keys, integers(rows, 3), integers(rows, PREFIX_FIELDS), integers(1)

    def attend() -> torch.Tensor:
        return embedded_kernels.decode_attention(
            qkv, norm, rotations, *cache, *where, layer=0, epsilon=1e-6, scale=DIM**-0.5
        )

    milliseconds = do_bench(attend)
    read = rows * HEADS * keys * DIM * 2 * 2
    return {
        "parts": embedded_kernels.parts_of_keys(rows * HEADS, columns),
        "microseconds": 1e3 * milliseconds,
        "terabytes_per_s": read / milliseconds / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, nargs="*", default=[], help="powers of two")
    results = {}
    for parts in parser.parse_args().parts or [None]:
        chosen = embedded_kernels.parts_of_keys if parts is None else lambda *_, parts=parts: parts
        with mock.patch.object(embedded_kernels, "parts_of_keys", chosen):
            for rows, keys in SHAPES:
                found = measure(rows, keys)
                results[f"{rows} x {keys}, {found['parts']} parts"] = found
                print(f"{rows:4} rows of {keys:5} keys: {found}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
