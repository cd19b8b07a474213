"""Kill -9 a small asynchronous run at random moments, go on each time, and account for every prompt.

    python -m benchmarks.kill_async [--kills 20] [--steps 80] [--dynamic-sampling]      the last line is JSON

Real parts: a 0.6 M-parameter policy, the embedded generator, updates in flight, checkpoints saved beside training.
Each attempt reports into a folder of its own; of a step that was trained again the later report counts, as in a run's
own report. Every prompt of the data order up to the last one issued must then have ended exactly once.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.grpo_task import make_checkpoint, prompts, write_rows

PROMPTS = 4
"""Groups a step."""
IMPORTED = [
    "tests.engine.grpo.grpo_runs",
    "nemotron_steps.engine.policy.megatron",
    "nemotron_steps.engine.generation.embedded.generator",
]
"""What every attempt needs."""


@dataclass(frozen=True)
class Account:
    """What the attempts' reports say."""

    kills: int
    trained: int
    outcomes: dict[str, int]
    lost: list[int]
    """Positions of the data order, up to the last one, without an end."""
    repeated: list[int]
    """Positions with more than one."""
    rolled_back: int
    """Steps that were trained again."""
    without_metrics: list[int]
    without_samples: list[int]


def child(task: Path, work: Path, attempt: int, steps: int, dynamic: bool) -> None:
    """One attempt, from the newest checkpoint on, in a group of processes of its own."""
    os.setsid()
    import torch

    from nemotron_steps.environments import registry
    from nemotron_steps.runs.context import Tracker
    from tests.engine.grpo.grpo_environments import ENVIRONMENTS
    from tests.engine.grpo.grpo_runs import config_of, run_loop, start

    torch.set_num_threads(1)
    for environment in ENVIRONMENTS:
        registry.BUILT_IN[environment.name] = f"{environment.__module__}:{environment.__name__}"
    config = config_of(
        task,
        steps,
        environment="any_vowel",
        grpo__async_grpo__enabled=True,
        grpo__use_dynamic_sampling=dynamic,
        grpo__num_generations_per_prompt=2,
        policy__megatron_cfg__optimizer__lr=1e-6,  # once every answer has a vowel, no group has a signal
        checkpointing__save_period=2,
        checkpointing__save_async=True,
    )
    run = start(config, work)
    run.reporter = Tracker("async", work / f"attempt-{attempt:03d}")
    run_loop(run)


def kill_until_done(scratch: Path, *, kills: int, steps: int, dynamic: bool, seed: int) -> Account:
    """Run to the end, killed `kills` times on the way, each time some steps after the run has resumed."""
    rng = random.Random(seed)
    task, work = scratch / "task", scratch / "work"
    task.mkdir()
    make_checkpoint(task)
    write_rows(task / "train.jsonl", prompts(8 * PROMPTS * steps))
    context = multiprocessing.get_context("forkserver")  # imports once for all attempts
    context.set_forkserver_preload(IMPORTED)
    for attempt in range(kills + 1):
        process = context.Process(target=child, args=(task, work, attempt, steps, dynamic))
        process.start()
        try:
            if attempt < kills:
                _wait_for_steps(process, work / f"attempt-{attempt:03d}", rng.randint(1, 3))
                time.sleep(rng.uniform(0, 0.1))
            else:
                process.join()
                if process.exitcode:
                    raise SystemExit("the run failed by itself")
        finally:
            if process.is_alive():
                os.killpg(process.pid, signal.SIGKILL)
                process.join()
    return account(work, kills, steps)


def _wait_for_steps(process: BaseProcess, folder: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while len(_lines(folder / "groups.jsonl")) < count:
        if not process.is_alive() or time.monotonic() > deadline:
            raise SystemExit(f"the run ended or stood still in {folder}: exit code {process.exitcode}")
        time.sleep(0.01)


def account(work: Path, kills: int, steps: int) -> Account:
    """What became of every prompt, going by all attempts."""
    attempts = sorted(work.glob("attempt-*"))
    reports = [record for attempt in attempts for record in _lines(attempt / "groups.jsonl")]
    by_step: dict[int, list[dict[str, Any]]] = {record["index"]: record["groups"] for record in reports}
    ends = [group for groups in by_step.values() for group in groups]
    positions = Counter(group["position"] for group in ends)
    metrics = {record["index"] for attempt in attempts for record in _lines(attempt / "metrics.jsonl")}
    samples = {record["sample"]["step"] for attempt in attempts for record in _lines(attempt / "samples.jsonl")}
    return Account(
        kills=kills,
        trained=sum(group["outcome"] == "trained" for group in ends),
        outcomes=dict(Counter(group["outcome"] for group in ends)),
        lost=[position for position in range(max(positions)) if position not in positions],
        repeated=[position for position, times in positions.items() if times > 1],
        rolled_back=len(reports) - len(by_step),
        without_metrics=sorted(set(range(1, steps + 1)) - metrics),
        without_samples=sorted(set(range(1, steps + 1)) - samples),
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; none when it is missing."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dynamic-sampling", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        result = kill_until_done(
            Path(scratch),
            kills=arguments.kills,
            steps=arguments.steps,
            dynamic=arguments.dynamic_sampling,
            seed=arguments.seed,
        )
    print(json.dumps({"benchmark": "kill_async", **asdict(result)}))


if __name__ == "__main__":
    main()
