"""GRPO on two CPU cores against TRL's GRPOTrainer: the same tiny Qwen3, prompts, reward, batch and learning rate.

make bench-cpu        the last line is JSON
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.grpo_task import make_checkpoint, prompts, write_rows
from nemotron_steps.engine.kernels import bound_spinning

STEPS = 40
CONFIG = {
    "grpo": {
        "num_prompts_per_step": 8,
        "num_generations_per_prompt": 8,
        "max_num_steps": STEPS,
        "max_num_epochs": 1000,
        "use_leave_one_out_baseline": False,
    },
    "loss_fn": {"force_on_policy_ratio": True},
    "policy": {
        "precision": "float32",
        "train_global_batch_size": 64,
        "train_micro_batch_size": 64,
        "logprob_batch_size": 64,
        "max_total_sequence_length": 128,
        "megatron_cfg": {"optimizer": {"lr": 1e-3}},
        "generation": {"max_new_tokens": 32, "max_sequences": 64},
    },
    "checkpointing": {"enabled": False},
}


def main() -> None:
    results: dict[str, list[dict]] = {"nemotron_steps": [], "trl": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_checkpoint(folder)
        write_rows(folder / "train.jsonl", prompts(512))
        config = {**CONFIG, "data": {"train": {"data_path": str(folder / "train.jsonl")}}}
        config["policy"] = {**CONFIG["policy"], "checkpoint": str(folder)}
        (folder / "run.json").write_text(json.dumps(config))
        # Alternating, so that whatever else the machine does touches both alike.
        for _ in range(2):
            results["nemotron_steps"].append(_child("benchmarks.grpo_ours", str(folder)))
            results["trl"].append(_child("benchmarks.grpo_trl", str(folder), str(STEPS)))
    best = {name: min(runs, key=lambda r: r["step_s"]) for name, runs in results.items()}
    print(f"{'engine':16} {'step':>9} {'completions/s':>14} {'reward, first 5':>16} {'reward, last 5':>15}")
    for name, run in best.items():
        first, last = sum(run["rewards"][:5]) / 5, sum(run["rewards"][-5:]) / 5
        print(f"{name:16} {run['step_s'] * 1e3:7.1f}ms {run['completions_per_s']:14.0f} {first:16.3f} {last:15.3f}")
    print("phases of our step:", {k: f"{v * 1e3:.1f}ms" for k, v in best["nemotron_steps"]["phases_s"].items()})
    print(json.dumps({**best, "ratio": best["trl"]["step_s"] / best["nemotron_steps"]["step_s"]}))


def _child(module: str, *arguments: str) -> dict:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    bound_spinning(environment)  # as `steps run` does, for both alike
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
