"""A judge in actors: copies of the GeneratorJudge of one process, each with a generator and a place of its own.

Which copy answers a question follows from the question, so that a resumed run is judged as an unbroken one.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemotron_steps.config.schema.rl import VllmModelConfig
from nemotron_steps.engine.workers.workers import (
    SILENT_SECONDS,
    Worker,
    WorkerProcess,
    answer,
    result_of,
    start_workers,
    stop_workers,
)
from nemotron_steps.environments.judged.judges import Judge, JudgeLostError, Messages
from nemotron_steps.errors import JudgeUnavailableError, WorkerLostError
from nemotron_steps.waiting import waiting


class JudgeWorker(WorkerProcess):
    """See the module docstring."""

    async def build(self, role: str, config: VllmModelConfig, seed: int) -> None:
        """Load the model; arguments as engine.backends' build_judge."""
        from nemotron_steps.engine.backends.judges import build_judge
        from nemotron_steps.engine.rollouts.judges import GeneratorJudge

        judge = build_judge(role, config, defer_to=None, seed=seed)
        assert isinstance(judge, GeneratorJudge), "judges behind HTTP have a place of their own"
        self._judge = judge

    async def start_step(self, step: str) -> None:
        """See GeneratorJudge.start_step."""
        self._judge.start_step(step)

    async def complete(
        self, messages: Sequence[dict[str, Any]], temperature: float, top_p: float, max_tokens: int
    ) -> str:
        """See Judge.complete."""
        return await self._judge.complete(messages, temperature=temperature, top_p=top_p, max_tokens=max_tokens)


@dataclass(frozen=True)
class PlacedJudge:
    """A `Judge` whose model lives in actors, a copy in each; may be handed to other actors.

    A worker's death is a JudgeLostError and ends the run: no rollout is graded without its judge.
    """

    workers: tuple[Worker, ...]

    async def complete(self, messages: Messages, *, temperature: float, top_p: float, max_tokens: int) -> str:
        """See Judge."""
        worker = self.workers[copy_for(messages, len(self.workers))]
        call = worker.call("complete", list(messages), temperature, top_p, max_tokens)
        try:
            text: str = await answer(call, worker)
        except WorkerLostError as error:
            raise JudgeLostError.of(error) from error
        return text

    def start_step(self, step: str) -> None:
        """See GeneratorJudge.start_step."""
        calls = [worker.call("start_step", step) for worker in self.workers]
        for call, worker in zip(calls, self.workers, strict=True):
            result_of(call, worker, timeout_s=SILENT_SECONDS)


def copy_for(messages: Messages, copies: int) -> int:
    """Which of a judge's copies answers a question: the same whenever it is asked."""
    if copies == 1:
        return 0
    text = json.dumps(messages, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) % copies


@dataclass(frozen=True)
class HttpJudgeRecipe:
    """A judge behind HTTP, built in the process that asks it: connections do not travel."""

    role: str
    config: VllmModelConfig
    seed: int

    def build(self) -> Judge:
        """The judge, once its server is ready; see engine.backends' build_judge."""
        from nemotron_steps.engine.backends.judges import build_judge

        return build_judge(self.role, self.config, defer_to=None, seed=self.seed)


def start_judge(role: str, config: VllmModelConfig, options: Sequence[Mapping[str, Any]], *, seed: int) -> PlacedJudge:
    """Start a judge, a copy for each of `options`, and wait until all are ready.

    Raises:
        JudgeUnavailableError: a model is not loaded within readiness_timeout_s.
    """
    names = [f"judge {role}"] if len(options) == 1 else [f"judge {role} {number}" for number in range(len(options))]
    workers = start_workers(JudgeWorker, names, options)
    try:
        loading = [worker.call("build", role, config, seed) for worker in workers]
        deadline = time.monotonic() + config.readiness_timeout_s
        for call, worker in zip(loading, workers, strict=True):
            _wait_until_ready(call, worker, role, config, deadline - time.monotonic())
    except BaseException:
        stop_workers(workers)
        raise
    return PlacedJudge(tuple(workers))


def _wait_until_ready(loading: Any, worker: Worker, role: str, config: VllmModelConfig, seconds: float) -> None:
    import ray

    with waiting(f"{worker.name} to load its model", config.readiness_timeout_s):
        ready, _ = ray.wait([loading], timeout=max(0.0, seconds))
    if not ready:
        raise JudgeUnavailableError(
            f"the judge {role} did not become ready",
            where=f"env.nemo_gym.{role}.responses_api_models.vllm_model",
            expected=f"a loaded model within readiness_timeout_s={config.readiness_timeout_s:g}",
            found="still loading",
            hints=[f"tail -n 50 {worker.log}   # what it is doing"],
        )
    result_of(loading, worker)
