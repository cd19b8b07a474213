"""How a GRPO step grows with answer length, group size and model size, on one GPU.

    python3 -m tests.benchmarks.bench_growth [--plot FILE.svg]      last line JSON
    python3 -m tests.benchmarks.bench_growth --from RESULT.json --plot FILE.svg      draw an earlier result

Embedded generator, colocated, bfloat16; random weights, so nearly every answer reaches its full length.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from tests.benchmarks.bench_gpu import child, run_config
from tests.benchmarks.grpo_task import large_prompts, make_large_checkpoint, write_rows

LENGTHS = (256, 512, 1024, 2048, 4096)
GROUPS = (2, 4, 8, 16, 32, 64)
MODELS = {"0.5 B": (28, 1024), "1 B": (28, 1536), "2 B": (36, 1920), "4 B": (36, 2560)}
"""Layers and hidden size."""


def measure(folder: Path, **settings: int) -> dict:
    """Median phases of a short run."""
    (folder / "run.json").write_text(json.dumps(run_config(folder, 5, "embedded", **settings)))
    result = child("tests.benchmarks.grpo_ours", str(folder))
    if "failed" in result:
        return result
    return {**result["phases_s"], "peak_gpu_gib": result["peak_gpu_gib"], "step": result["step_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--from", dest="source", type=Path)
    arguments = parser.parse_args()
    results = json.loads(arguments.source.read_text()) if arguments.source else sweep()
    if arguments.plot:
        draw(results, arguments.plot)
    print(json.dumps(results))


def sweep() -> dict[str, dict[str, dict]]:
    """Every point of the three curves; each varies one thing."""
    results: dict[str, dict[str, dict]] = {"length": {}, "group": {}, "model": {}}
    started = time.perf_counter()

    def note(curve: str, name: str, result: dict) -> None:
        results[curve][name] = result
        print(f"{time.perf_counter() - started:6.0f} s  {curve} {name}: {json.dumps(result)}", flush=True)

    for name, (layers, hidden) in MODELS.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            make_large_checkpoint(folder, layers, hidden)
            write_rows(folder / "train.jsonl", large_prompts(folder, 64))
            note("model", name, measure(folder, new_tokens=256, prompts=16, members=8))
            if name != "0.5 B":
                continue
            for length in LENGTHS:
                note("length", str(length), measure(folder, new_tokens=length, prompts=8, members=8))
            for members in GROUPS:
                note("group", str(members), measure(folder, new_tokens=256, prompts=8, members=members))
    return results


def draw(results: dict[str, dict[str, dict]], target: Path) -> None:
    """Stacked phases of a step over each of the three."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    titles = {
        "length": "new tokens an answer (8 prompts x 8, 0.5 B)",
        "group": "answers a prompt (8 prompts x 256 tokens, 0.5 B)",
        "model": "parameters (16 prompts x 8 x 256 tokens)",
    }
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for axis, (curve, title) in zip(axes, titles.items(), strict=True):
        points = {name: point for name, point in results[curve].items() if "failed" not in point}
        base = [0.0] * len(points)
        for phase in ("generation", "train", "refit"):
            heights = [point[phase] for point in points.values()]
            axis.bar(list(points), heights, bottom=base, label=phase)
            base = [b + h for b, h in zip(base, heights, strict=True)]
        axis.set_xlabel(title)
        axis.set_ylabel("seconds a step")
    axes[0].legend()
    figure.savefig(target)


if __name__ == "__main__":
    main()
