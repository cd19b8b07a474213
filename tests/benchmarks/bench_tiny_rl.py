"""Held-out gain of the tiny RLHF and RLVR steps over the policy each starts from, several seeds, graded by rule.

    python -m tests.benchmarks.bench_tiny_rl [--home DIR] [--seeds 42 43 44] [--config tiny_hybrid]

The last line is JSON.

Every seed is a run of its own over the same cached policy and judge; the runs' own summaries are read back.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

STEPS = ("rl/nemo_rl/rlvr", "rl/nemo_rl/rlhf")


def run_step(step: str, config: str, seed: int, home: Path) -> dict:
    """Run one step with one seed; returns its summary and wall seconds."""
    started = time.perf_counter()
    subprocess.run(
        [
            *(sys.executable, "-m", "nemotron_steps.cli.main", "run", step, "-c", config),
            *(f"grpo.seed={seed}", "--home", str(home)),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    seconds = time.perf_counter() - started
    newest = max((home / "runs").iterdir(), key=lambda folder: (folder / "events.jsonl").stat().st_mtime_ns)
    summaries = [
        record["values"] if record["kind"] == "summary" else record["summary"]  # a cached step repeats its summary
        for record in map(json.loads, (newest / "events.jsonl").read_text().splitlines())
        if record["kind"] in ("summary", "step_cached") and record["step"].startswith(step)
    ]
    return {**summaries[-1], "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, default=Path(".steps"))
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    arguments = parser.parse_args()
    results = {}
    print(f"{'step':18} {'before':>11} {'after, mean':>12} {'spread':>8} {'gain':>7}   seeds")
    for step in STEPS:
        runs = [run_step(step, arguments.config, seed, arguments.home) for seed in arguments.seeds]
        before = [run["heldout_reward"]["before"] for run in runs]
        after = [run["heldout_reward"]["after"] for run in runs]
        spread = statistics.stdev(after) if len(after) > 1 else 0.0
        gain = statistics.mean(after) - statistics.mean(before)
        print(
            f"{step:18} {statistics.mean(before):11.3f} {statistics.mean(after):12.3f} {spread:8.3f} {gain:7.3f}   "
            + " ".join(f"{value:.3f}" for value in after)
        )
        results[step] = {"before": before, "after": after, "spread": spread, "gain": gain, "runs": runs}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
