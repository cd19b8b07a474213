"""This project's engine on the task of grpo_task.py, in one process.

python -m benchmarks.grpo_ours FOLDER    reads FOLDER/config.json's model and FOLDER/run.json (an RlConfig),
                                               prints one JSON object
"""

import json
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

from benchmarks.grpo_task import PeakMemory, reward_of
from nemotron_steps.environments.base import Environment, GradeResult, Response, Session


class Vowels(Environment):
    """The task's reward as an environment."""

    name = "vowels"

    async def verify(self, row, response: Response, session: Session) -> GradeResult:
        return GradeResult(reward_of(response.text))


def main(folder: Path) -> None:
    from nemotron_steps.config.schema.rl import RlConfig
    from nemotron_steps.engine.grpo.async_loop import train_async
    from nemotron_steps.engine.grpo.loop import train
    from nemotron_steps.engine.placement.run import build_run
    from nemotron_steps.engine.rollouts.data import read_rows
    from nemotron_steps.engine.setup.rows import RunRows
    from nemotron_steps.environments import registry
    from nemotron_steps.runs.context import Tracker

    registry.BUILT_IN["vowels"] = f"{__name__}:Vowels"
    records: list[dict] = []

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - started:6.1f} s] {text}", file=sys.stderr, flush=True)

    def listen(record: dict) -> None:
        if record["kind"] == "metrics":
            records.append(record["values"])
            phases = {k: round(v, 3) for k, v in record["values"].items() if k.startswith("timing/") and v > 0.001}
            peak = f", {memory.peak_gib:.1f} GiB at most" if memory.peak_gib else ""
            say(f"step {len(records)}: {phases}{peak}")  # what is left of a run that is cut off

    memory = PeakMemory()
    started = time.perf_counter()
    config = RlConfig.model_validate_json((folder / "run.json").read_text())
    batch = config.policy.train_global_batch_size
    tracker = Tracker("bench", None, listen)
    rows = RunRows(read_rows(folder / "train.jsonl"))
    run, _ = build_run(config, rows, work=folder / "work", started=time.monotonic(), reporter=tracker)
    loaded = time.perf_counter() - started
    say("loaded")
    with memory:
        (train_async if config.grpo.async_grpo.enabled else train)(run)
    run.close()
    warm = records[min(3, len(records) - 1) :]
    step = statistics.median(r["timing/step_s"] for r in warm)
    result = {
        "engine": "nemotron_steps",
        "load_s": loaded,
        "step_s": step,
        "completions_per_s": batch / step,
        "rewards": [r["reward/mean"] for r in records],
        "phases_s": {
            name.removeprefix("timing/").removesuffix("_s"): statistics.median(r[name] for r in warm)
            for name in warm[-1]
            if name.startswith("timing/")
        },
        "token_mult_prob_error": warm[-1].get("token_mult_prob_error"),
        "trained_tokens_per_s": warm[-1]["tokens/trained_per_s"],
        "generated_tokens_per_s": warm[-1].get("tokens/generated_per_s"),
        "policy_lag_max": max(r.get("policy_lag/max", 0.0) for r in records),
        "refit_s": statistics.median(r["weight_sync/seconds"] for r in warm),
        "peak_gpu_gib": memory.peak_gib,
        "last_step_gib": memory.last(records[-1]["timing/step_s"]),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    module = sys.modules.setdefault("benchmarks.grpo_ours", sys.modules["__main__"])
    with mock.patch.object(module, "__name__", "benchmarks.grpo_ours"):
        main(Path(sys.argv[1]))
