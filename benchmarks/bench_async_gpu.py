"""Synchronous against asynchronous GRPO on two GPUs: one generates, one trains, both as Ray actors.

    python3 -m benchmarks.bench_async_gpu [--backend embedded|vllm] [--steps 10] [--seconds 190]

0.47 B Qwen3 shape, random bfloat16 weights, 64 prompts x 8 answers x 256 tokens: the model and task of bench_gpu.py.
Each mode runs in a process of its own and stops in time for the other one. Progress goes to stderr; the last line of
stdout is JSON.
"""

import argparse
import asyncio
import faulthandler
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.bench_gpu import run_config
from benchmarks.grpo_task import large_prompts, make_large_checkpoint, write_rows

MODES = ("synchronous", "asynchronous")
WARM_UP = 2
"""Steps that are not counted: kernels are tuned, buffers filled."""
STARTED = time.perf_counter()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {text}", file=sys.stderr, flush=True)


def mode_config(folder: Path, mode: str, arguments: argparse.Namespace) -> dict:
    """RlConfig of a mode: bench_gpu's, on Ray with a GPU for each side."""
    config = run_config(folder, arguments.steps, arguments.backend, arguments.new_tokens, arguments.prompts)
    config["cluster"] = {"backend": "ray", "gpus_per_node": arguments.gpus}
    config["policy"]["generation"]["colocated"] = {"enabled": False, "generation_devices": max(1, arguments.gpus - 1)}
    config["policy"]["generation"]["vllm_cfg"]["gpu_memory_utilization"] = 0.7
    if mode == "asynchronous":
        config["grpo"]["async_grpo"] = {
            "enabled": True,
            "max_trajectory_age_steps": arguments.age,
            "in_flight_weight_updates": True,
        }
        config["loss_fn"].update(
            use_importance_sampling_correction=True,
            truncated_importance_sampling_type="tis",
            truncated_importance_sampling_ratio=2.0,
        )
    return config


class OutOfTime(Exception):
    """The mode's share of the time is used up; what was measured counts."""


def run_mode(folder: Path, mode: str, seconds: float) -> dict:
    """Train one mode and measure its steps."""
    from nemotron_steps.config.schema.rl import RlConfig
    from nemotron_steps.engine.grpo.async_loop import train_async
    from nemotron_steps.engine.grpo.loop import train
    from nemotron_steps.engine.placement.run import build_run
    from nemotron_steps.engine.rollouts.data import read_rows
    from nemotron_steps.engine.setup.rows import RunRows
    from nemotron_steps.environments import registry
    from nemotron_steps.runs.context import Tracker

    faulthandler.dump_traceback_later(max(10.0, seconds - 5.0), exit=False)
    registry.BUILT_IN["vowels"] = "benchmarks.grpo_ours:Vowels"
    times: list[float] = []
    records: list[dict] = []
    placement: dict = {}

    def listen(record: dict) -> None:
        if record["kind"] == "event" and record["name"] == "placement":
            placement.update(record["fields"])
            say(f"placed: {json.dumps(placement)}")
        if record["kind"] != "metrics":
            return
        values = record["values"]
        times.append(time.perf_counter())
        records.append(values)
        phases = {k.removeprefix("timing/"): round(v, 3) for k, v in values.items() if k.startswith("timing/")}
        say(f"{mode} step {len(records)}: {phases}, refit {values['weight_sync/seconds']:.3f} s")
        if time.perf_counter() - STARTED > seconds:
            raise OutOfTime

    config = RlConfig.model_validate_json((folder / f"{mode}.json").read_text())
    tracker = Tracker("bench", None, listen)
    say(f"{mode}: starting")
    rows = RunRows(read_rows(folder / "train.jsonl"))
    run, environments = build_run(config, rows, work=folder / mode, started=time.monotonic(), reporter=tracker)
    loaded = time.perf_counter() - STARTED
    say(f"{mode}: loaded, weights travel by {run.generator.transports}")
    try:
        asyncio.run(environments.start())
        (train_async if config.grpo.async_grpo.enabled else train)(run)
    except OutOfTime:
        say(f"{mode}: out of time after {len(records)} steps")
    finally:
        faulthandler.cancel_dump_traceback_later()
        run.close()
    warm = records[WARM_UP:]
    if len(warm) < 2:
        raise SystemExit(f"{mode}: only {len(records)} steps in {seconds:.0f} s; nothing to measure")
    # The first steps of a step-by-step wall clock also start what the later ones overlap with.
    step = (times[-1] - times[WARM_UP - 1]) / len(warm)

    def median(name: str) -> float | None:
        values = [record[name] for record in warm if name in record]
        return statistics.median(values) if values else None

    return {
        "steps": len(records),
        "load_s": loaded,
        "step_s": step,
        "steps_per_s": 1 / step,
        "completions_per_s": config.policy.train_global_batch_size / step,
        "phases_s": {
            n.removeprefix("timing/").removesuffix("_s"): median(n) for n in warm[-1] if n.startswith("timing/")
        },
        "refit_s": median("weight_sync/seconds"),
        "refit_bytes": median("weight_sync/bytes"),
        "weight_sync": placement.get("weight_sync"),
        "policy_lag_max": max((r.get("policy_lag/max", 0.0) for r in records), default=0.0),
        "token_mult_prob_error_max": max((r.get("token_mult_prob_error", 0.0) for r in records), default=0.0),
        "generated_tokens_per_s": median("tokens/generated_per_s"),
        "trained_tokens_per_s": median("tokens/trained_per_s"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="embedded", choices=["embedded", "vllm"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--gpus", type=int, default=2, help="one trains, the others generate; 0: CPU, to try it out")
    parser.add_argument("--age", type=int, default=1, help="max_trajectory_age_steps")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--seconds", type=float, default=190.0, help="for everything")
    parser.add_argument("--only", choices=MODES, help="measure one mode")
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.mode:
        print(json.dumps(run_mode(Path(arguments.folder), arguments.mode, arguments.seconds)))
        return
    modes = [arguments.only] if arguments.only else list(MODES)
    results: dict = {"benchmark": "async_gpu", "backend": arguments.backend, "gpus": arguments.gpus}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_large_checkpoint(folder, layers=arguments.layers)
        write_rows(folder / "train.jsonl", large_prompts(folder, 4 * arguments.prompts))
        say("checkpoint written")
        for number, mode in enumerate(modes):
            (folder / f"{mode}.json").write_text(json.dumps(mode_config(folder, mode, arguments)))
            left = arguments.seconds - (time.perf_counter() - STARTED)
            results[mode] = _child(folder, mode, arguments, left / (len(modes) - number))
            say(f"{mode}: {json.dumps(results[mode])}")
    if all(mode in results and "step_s" in results[mode] for mode in MODES):
        results["speedup"] = results["synchronous"]["step_s"] / results["asynchronous"]["step_s"]
    print(json.dumps(results))


def _child(folder: Path, mode: str, arguments: argparse.Namespace, seconds: float) -> dict:
    command = [sys.executable, "-m", "benchmarks.bench_async_gpu", "--mode", mode, "--folder", str(folder)]
    # A few seconds for ending Ray; a mode that hangs costs the other one nothing.
    command += ["--seconds", str(seconds - 8)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds + 5, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"did not end within {seconds + 5:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        return {"error": f"exit code {done.returncode}"}
    found: dict = json.loads(lines[-1])
    return found


if __name__ == "__main__":
    main()
