"""How a GRPO step grows with answer length, group size and model size, on one GPU.

    python3 -m benchmarks.bench_growth [--plot FILE.svg]      last line JSON
    python3 -m benchmarks.bench_growth --from RESULT.json --plot FILE.svg      draw an earlier result

Embedded generator, colocated, bfloat16; random weights, so nearly every answer reaches its full length.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.bench_gpu import run_config
from benchmarks.grpo_task import large_prompts, make_large_checkpoint, write_rows

LENGTHS = (256, 512, 1024, 2048, 4096)
GROUPS = (4, 8, 16, 32)
MODELS = {"0.5 B": (28, 1024), "1 B": (28, 1536), "2 B": (36, 1920), "4 B": (36, 2560)}
"""Layers and hidden size."""


STEPS = 3


def measure(folder: Path, **settings: int) -> dict:
    """Phases of a short run's last step, in this process."""
    import gc

    import torch

    from nemotron_steps.config.schema.rl import RlConfig
    from nemotron_steps.engine.grpo.loop import train
    from nemotron_steps.engine.placement.run import build_run
    from nemotron_steps.engine.rollouts.data import read_rows
    from nemotron_steps.engine.setup.rows import RunRows
    from nemotron_steps.environments import registry
    from nemotron_steps.runs.context import Tracker

    registry.BUILT_IN["vowels"] = "benchmarks.grpo_ours:Vowels"
    records: list[dict] = []

    def listen(record: dict) -> None:
        if record["kind"] == "metrics":
            records.append(record["values"])

    config = RlConfig.model_validate(run_config(folder, STEPS, "embedded", **settings))
    tracker = Tracker("bench", None, listen)
    torch.cuda.reset_peak_memory_stats()
    rows = RunRows(read_rows(folder / "train.jsonl"))
    run, _ = build_run(config, rows, work=folder / "work", started=time.monotonic(), reporter=tracker)
    train(run)
    run.generator.close()
    del run
    gc.collect()
    torch.cuda.empty_cache()
    phases = {
        n.removeprefix("timing/").removesuffix("_s"): v for n, v in records[-1].items() if n.startswith("timing/")
    }
    return {**phases, "peak_gpu_gib": torch.cuda.max_memory_reserved() / 2**30}


def curves(name: str, report: Callable[[str, str, dict], None]) -> None:
    """Every point that one model is needed for."""
    layers, hidden = MODELS[name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_large_checkpoint(folder, layers, hidden)
        write_rows(folder / "train.jsonl", large_prompts(folder, 64))
        smaller = {"micro_batch": 16} if name == "4 B" else {}  # activations of 48 sequences would not fit
        report("model", name, measure(folder, new_tokens=256, prompts=16, members=8, **smaller))
        if name != "0.5 B":
            return
        for members in GROUPS:
            report("group", str(members), measure(folder, new_tokens=256, prompts=8, members=members))
        for length in LENGTHS:
            report("length", str(length), measure(folder, new_tokens=length, prompts=8, members=8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--model", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--from", dest="source", type=Path)
    arguments = parser.parse_args()
    if arguments.model:
        curves(arguments.model, lambda *point: print(json.dumps(point), flush=True))
        return
    results = json.loads(arguments.source.read_text()) if arguments.source else sweep()
    if arguments.plot:
        draw(results, arguments.plot)
    print(json.dumps(results))


def sweep() -> dict[str, dict[str, dict]]:
    """Every point of the three curves; each varies one thing. A model that fails leaves out its points."""
    results: dict[str, dict[str, dict]] = {"length": {}, "group": {}, "model": {}}
    for name in MODELS:
        command = [sys.executable, "-m", "benchmarks.bench_growth", "--model", name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                if line.startswith("["):
                    curve, point, values = json.loads(line)
                    results[curve][point] = values
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
    drawn = [curve for curve in titles if len(results[curve]) > 1]
    figure, axes = pyplot.subplots(1, len(drawn), figsize=(4 * len(drawn), 3.6), layout="constrained", squeeze=False)
    for axis, curve in zip(axes[0], drawn, strict=True):
        points = results[curve]
        base = [0.0] * len(points)
        for phase in ("generation", "train", "refit"):
            heights = [point[phase] for point in points.values()]
            axis.bar(list(points), heights, bottom=base, label=phase)
            base = [b + h for b, h in zip(base, heights, strict=True)]
        axis.set_xlabel(titles[curve])
        axis.set_ylabel("seconds a step")
    axes[0][0].legend()
    figure.savefig(target)


if __name__ == "__main__":
    main()
