"""Held-out gain of the tiny RLHF and RLVR steps over the policy each starts from, several seeds, graded by rule.

    python -m benchmarks.bench_tiny_rl [--home DIR] [--seeds 42 43 44] [--config tiny tiny_hybrid]

The last line is JSON.

Every seed is a run of its own over the same cached policy and judge; the runs' own summaries are read back.
"""

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


def measure(config: str, seeds: list[int], home: Path) -> dict[str, dict]:
    """Every step of one config: what it gains, and the seconds that a run takes."""
    results = {}
    for step in STEPS:
        runs = [run_step(step, config, seed, home) for seed in seeds]
        before = [run["heldout_reward"]["before"] for run in runs]
        after = [run["heldout_reward"]["after"] for run in runs]
        spread = statistics.stdev(after) if len(after) > 1 else 0.0
        gain = statistics.mean(after) - statistics.mean(before)
        seconds = statistics.median(
            run["seconds"] for run in runs
        )  # the first one may make what the others find cached
        print(
            f"{step + ' -c ' + config:34} {statistics.mean(before):11.3f} {statistics.mean(after):12.3f} {spread:8.3f} "
            f"{gain:7.3f} {seconds:9.1f}   " + " ".join(f"{value:.3f}" for value in after)
        )
        results[step] = {"before": before, "after": after, "spread": spread, "gain": gain, "runs": runs}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, default=Path(".steps"))
    parser.add_argument("--config", nargs="+", default=["tiny"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    arguments = parser.parse_args()
    print(f"{'step':34} {'before':>11} {'after, mean':>12} {'spread':>8} {'gain':>7} {'s a run':>9}   seeds")
    results = {config: measure(config, arguments.seeds, arguments.home) for config in arguments.config}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
