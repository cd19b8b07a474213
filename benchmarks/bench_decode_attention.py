"""The embedded generator's attention kernel on a GPU: microseconds and bytes per second for batches of each kind.

    python3 -m benchmarks.bench_decode_attention [--parts 1 2 4 8]      last line JSON

One layer of 8 key-value heads of 128 with 2 queries each, bfloat16. `--parts` sets how many programs share a row's keys
in place of what the generator chooses.
"""

import argparse
import json
from unittest import mock

import torch
from triton.testing import do_bench

from nemotron_steps.engine.generation.embedded import kernels as embedded_kernels
from nemotron_steps.engine.generation.embedded.cached_model import DeviceView
from nemotron_steps.engine.generation.embedded.prefix_cache import PREFIX_FIELDS, rows_together, sets_of_rows

SHAPES = ((512, 320, 0), (512, 256, 64), (512, 64, 256), (128, 200, 0), (64, 1100, 0), (64, 2100, 0), (8, 4096, 0))
"""Rows, keys of each, and keys before those that 8 rows share."""
HEADS, QUERIES, DIM, MEMBERS = 8, 2, 128, 8


def measure(rows: int, keys: int, shared: int) -> dict[str, float]:
    """One batch, whose cache has room for twice as many columns."""
    columns = 2 * keys

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def integers(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device="cuda", dtype=torch.int64)

    qkv, norm = random(rows, HEADS * (QUERIES + 2) * DIM), random(QUERIES + 1, DIM)
    cache = random(2, 1, rows, HEADS, columns, DIM)
    rotations = torch.randn(shared + columns, DIM // 2, 2, device="cuda")
    prefix = random(2, rows // MEMBERS, 1, HEADS, shared, DIM)
    prefixes, sharing = integers(rows, PREFIX_FIELDS), integers(1)
    if shared:
        groups = [range(first, first + MEMBERS) for first in range(0, rows, MEMBERS)]
        for number, group in enumerate(groups):
            far_keys, far_values = prefix[:, number]
            fields = far_keys.data_ptr(), far_values.data_ptr(), shared, far_keys.stride(0), far_keys.stride(1)
            prefixes[list(group)] = torch.tensor(fields, device="cuda")
        sets = sets_of_rows(groups, rows_together(QUERIES))
        sharing = torch.cat((integers(1) + len(sets), sets.flatten().cuda()))
    state = integers(rows, 3)
    state[:, 1] = -shared
    view = DeviceView(*cache, integers(1) + keys, state, prefixes, sharing, None)

    def attend() -> torch.Tensor:
        return embedded_kernels.decode_attention(qkv, norm, rotations, view, layer=0, epsilon=1e-6, scale=DIM**-0.5)

    milliseconds = do_bench(attend)
    read = (rows * keys + rows // MEMBERS * shared) * HEADS * DIM * 2 * 2
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
            for rows, keys, shared in SHAPES:
                found = measure(rows, keys, shared)
                results[f"{rows} x {shared} + {keys}, {found['parts']} parts"] = found
                print(f"{rows:4} rows of {shared:3} shared and {keys:5} own keys: {found}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
