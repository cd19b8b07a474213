"""What the asynchronous loop adds to the longer of its two sides, with a generator and a policy of known cost.

    python -m benchmarks.bench_async_overlap [--steps 12]      the last line is JSON

The loop, sampler, collector, environment, buffer, checkpoints and a step's numbers are the real ones. The generator
decodes in a thread of its own, as a placed one does in its actor: a token for every running sequence in each 10 ms,
128 sequences at most. The policy sleeps. A step is 32 prompts of 8 answers of 20 to 180 tokens; training takes less
than generation, or more. In each case a step's time is compared with the longer side alone: the tokens of a step at the
generator's rate, or training; plus the pause of the weight update, which both sides have. `least_s` is a step of a loop
that does nothing but keep data order and age bound with the same answers: with an age bound of 1 and sides of the same
length the generator runs dry before it may begin the next groups. `alone_s` is what a synchronous step waits for: all
its answers begun at once, the last ones by themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import random
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from nemotron_steps.engine.grpo.async_loop import train_async
from nemotron_steps.engine.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    TrainBatch,
    WeightSyncReport,
)

DECODE_S = 0.01
SEQUENCES = 128
PROMPTS, ANSWERS = 32, 8
REFIT_S = 0.05
WARM_UP = 3
CASES = ((1, 0.8, 0.0), (1, 2.0, 0.0), (2, 2.0, 0.0), (2, 3.0, 0.0), (1, 0.8, 1.0), (2, 2.0, 1.0))
"""Age bound, seconds of training, seconds of writing a checkpoint (every second step; 0 for none)."""


def length_of(request_id: str, index: int) -> int:
    """Tokens of an answer."""
    return random.Random(f"{request_id}.{index}").randint(20, 180)


class SteadyGenerator:
    """A Generator of known speed; see the module docstring."""

    def __init__(self) -> None:
        self.weight_version = 0
        self.sampled_tokens = 0
        self.busy_s = 0.0
        """Seconds of decoding times the share of the sequences that ran."""
        self._waiting: deque[tuple[str, int, int]] = deque()
        self._running: dict[tuple[str, int], list[int]] = {}
        self._finished: list[Completion] = []
        self._open = 0
        self._lock = threading.Condition()
        self._decoding = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._decode, daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> None:
        """See Generator."""
        with self._lock:
            for index in range(request.n):
                self._waiting.append((request.request_id, index, length_of(request.request_id, index)))
            self._open += request.n

    def step(self) -> list[Completion]:
        """What has finished; waits as a placed generator does."""
        with self._lock:
            if not self._finished:
                self._lock.wait(0.003)
            finished, self._finished = self._finished, []
            self._open -= len(finished)
            return finished

    def pending(self) -> int:
        """See Generator."""
        return self._open

    def cancel(self, request_id: str) -> None:
        """See Generator."""
        with self._lock:
            kept = deque(w for w in self._waiting if w[0] != request_id)
            running = {k: v for k, v in self._running.items() if k[0] != request_id}
            self._open -= len(self._waiting) - len(kept) + len(self._running) - len(running)
            self._waiting, self._running = kept, running

    def update_weights(self, weights: Iterable[Any], version: int) -> WeightSyncReport:
        """Decoding stops while the weights travel."""
        with self._decoding:
            time.sleep(REFIT_S)
            self.weight_version = version
        return WeightSyncReport(version, REFIT_S, 0)

    def close(self) -> None:
        """See Generator."""
        self._closed = True
        self._thread.join()

    def _decode(self) -> None:
        due = time.perf_counter()
        while not self._closed:
            due = max(due + DECODE_S, time.perf_counter())
            time.sleep(max(0.0, due - time.perf_counter()))
            with self._decoding, self._lock:
                while self._waiting and len(self._running) < SEQUENCES:
                    request_id, index, length = self._waiting.popleft()
                    self._running[request_id, index] = [length, 0, self.weight_version]
                self.busy_s += DECODE_S * len(self._running) / SEQUENCES
                self.sampled_tokens += len(self._running)
                for key, state in list(self._running.items()):
                    state[1] += 1
                    if state[1] == state[0]:
                        del self._running[key]
                        self._finished.append(self._completion(*key, *state))
                if self._finished:
                    self._lock.notify_all()

    def _completion(self, request_id: str, index: int, length: int, _: int, version: int) -> Completion:
        versions = [version] * (length // 2) + [self.weight_version] * (length - length // 2)
        tokens = [40 + index] * length
        return Completion(request_id, index, tokens, [-1.0] * length, FinishReason.STOP, versions)


class SleepingPolicy:
    """A Policy whose work takes known times and no processor."""

    def __init__(self, train_s: float, save_s: float) -> None:
        self._train_s, self._save_s = train_s, save_s

    def logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """See Policy."""
        return batch.generation_logprobs.clone()

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        """See Policy."""
        time.sleep(self._train_s)
        return {"loss": 0.0}

    def weights(self) -> Iterable[Any]:
        """See Policy."""
        return ()

    def save_checkpoint(self, path: str) -> None:
        """See Policy."""
        time.sleep(self._save_s)

    def snapshot(self) -> SleepingPolicy:
        """See Policy."""
        time.sleep(self._save_s / 5)
        return self

    def write(self, path: str) -> None:
        """See Snapshot."""
        self.save_checkpoint(path)


def measure(folder: Path, *, train_s: float, steps: int, age: int = 1, save_s: float = 0.0) -> dict[str, Any]:
    """Seconds of a step, and what they are compared with.

    Args:
        save_s: what a checkpoint after every second step takes to write; 0 for none.
    """
    from tests.engine.grpo.grpo_runs import config_of, start

    config = config_of(
        folder,
        steps,
        environment="vowels",
        grpo__async_grpo__enabled=True,
        grpo__async_grpo__max_trajectory_age_steps=age,
        grpo__num_prompts_per_step=PROMPTS,
        grpo__num_generations_per_prompt=ANSWERS,
        grpo__max_num_epochs=steps + age + 1,
        policy__max_total_sequence_length=256,
        policy__generation__max_new_tokens=180,
        checkpointing__enabled=save_s > 0,
        checkpointing__save_period=2,
        checkpointing__save_async=False,
        checkpointing__keep_top_k=1,
    )
    records: list[dict[str, Any]] = []
    times: list[float] = []

    def listen(record: dict[str, Any]) -> None:
        if record["kind"] == "metrics":
            records.append(record["values"])
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as work:
        run = start(config, Path(work), [])
        run.reporter._listener = listen  # type: ignore[attr-defined]
        generator = SteadyGenerator()
        run.generator = run.sampler.generator = generator
        run.policy = SleepingPolicy(train_s, save_s)  # type: ignore[assignment]
        try:
            with asyncio.Runner() as runner:
                train_async(run, runner)
        finally:
            generator.close()
            run.close()
    warm = records[WARM_UP:-age]  # the last steps generate nothing new
    step_s = (times[-1 - age] - times[WARM_UP - 1]) / len(warm)
    tokens = statistics.fmean(m["response_length/mean"] for m in warm) * PROMPTS * ANSWERS
    generation_s = tokens * DECODE_S / SEQUENCES
    least_s = _least(steps, age, train_s, save_s / 2)
    longer = max(generation_s, train_s + save_s / 2) + REFIT_S
    phases = {n: statistics.median(m[n] for m in warm) for n in warm[-1] if n.startswith("timing/")}
    return {
        "age": age,
        "train_s": train_s,
        "save_s": save_s,
        "generation_s": generation_s,
        "step_s": step_s,
        "least_s": least_s,
        "alone_s": _alone(),
        "longer_side_s": longer,
        "ratio": step_s / longer,
        **phases,
    }


def _alone(batches: int = 100) -> float:
    """Mean seconds of sampling one step's answers on a generator that has nothing else to do."""
    seconds = []
    for batch in range(batches):
        ends = [0] * SEQUENCES
        for answer in range(PROMPTS * ANSWERS):
            heapq.heapreplace(ends, ends[0] + length_of(f"{batch}", answer))
        seconds.append(max(ends) * DECODE_S)
    return statistics.fmean(seconds)


def _least(steps: int, age: int, train_s: float, save_s: float) -> float:
    """Seconds of a step if every group began as soon as its age allows and every step when its groups are there."""
    updated, free, saved = [0.0], [0.0] * SEQUENCES, 0.0
    for step in range(steps):
        begun, ends = updated[max(0, step - age)], []
        for position in range(step * PROMPTS, (step + 1) * PROMPTS):
            for index in range(ANSWERS):
                end = max(heapq.heappop(free), begun) + DECODE_S * length_of(f"{position}.0/0", index)
                heapq.heappush(free, end)
                ends.append(end)
        updated.append(max(saved, *ends) + train_s + REFIT_S)
        saved = updated[-1] + save_s
    return (updated[-1 - age] - updated[WARM_UP]) / (steps - age - WARM_UP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    from benchmarks.grpo_task import make_checkpoint, prompts, write_rows
    from nemotron_steps.environments import registry

    registry.BUILT_IN["vowels"] = "benchmarks.grpo_ours:Vowels"
    torch.set_num_threads(1)
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_checkpoint(folder)
        write_rows(folder / "train.jsonl", prompts(PROMPTS))
        for age, train_s, save_s in CASES:
            result = measure(folder, train_s=train_s, steps=arguments.steps, age=age, save_s=save_s)
            results.append(result)
            print(json.dumps({k: round(v, 3) for k, v in result.items()}), flush=True)
    print(json.dumps({"benchmark": "async_overlap", "results": results}))


if __name__ == "__main__":
    main()
