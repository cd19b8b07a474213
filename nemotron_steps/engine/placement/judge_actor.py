"""A judge in an actor: the GeneratorJudge of one process, with a generator and a place of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemotron_steps.config.schema.rl import VllmModelConfig
from nemotron_steps.engine.placement.workers import (
    SILENT_SECONDS,
    Worker,
    WorkerProcess,
    answer,
    result_of,
    start_workers,
    stop_workers,
)
from nemotron_steps.environments.judges import Judge, Messages
from nemotron_steps.errors import JudgeUnavailableError


class JudgeWorker(WorkerProcess):
    """See the module docstring."""

    async def build(self, role: str, config: VllmModelConfig, seed: int) -> None:
        """Load the model; arguments as engine.setup.build_judge."""
        from nemotron_steps.engine.judges import GeneratorJudge
        from nemotron_steps.engine.setup import build_judge

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
    """A `Judge` whose model lives in an actor; may be handed to other actors.

    Its worker's death is a WorkerLostError and ends the run: no rollout is graded without its judge.
    """

    worker: Worker

    async def complete(self, messages: Messages, *, temperature: float, top_p: float, max_tokens: int) -> str:
        """See Judge."""
        call = self.worker.call("complete", list(messages), temperature, top_p, max_tokens)
        text: str = await answer(call, self.worker)
        return text

    def start_step(self, step: str) -> None:
        """See GeneratorJudge.start_step."""
        result_of(self.worker.call("start_step", step), self.worker, timeout_s=SILENT_SECONDS)


@dataclass(frozen=True)
class HttpJudgeRecipe:
    """A judge behind HTTP, built in the process that asks it: connections do not travel."""

    role: str
    config: VllmModelConfig
    seed: int

    def build(self) -> Judge:
        """The judge, once its server is ready; see engine.setup.build_judge."""
        from nemotron_steps.engine.setup import build_judge

        return build_judge(self.role, self.config, defer_to=None, seed=self.seed)


def start_judge(role: str, config: VllmModelConfig, options: Mapping[str, Any], *, seed: int) -> PlacedJudge:
    """Start a judge and wait until it is ready.

    Raises:
        JudgeUnavailableError: its model is not loaded within readiness_timeout_s.
    """
    worker = start_workers(JudgeWorker, [f"judge {role}"], [options])[0]
    try:
        _wait_until_ready(worker, role, config, seed)
    except BaseException:
        stop_workers([worker])
        raise
    return PlacedJudge(worker)


def _wait_until_ready(worker: Worker, role: str, config: VllmModelConfig, seed: int) -> None:
    import ray

    loading = worker.call("build", role, config, seed)
    if not ray.wait([loading], timeout=config.readiness_timeout_s)[0]:
        raise JudgeUnavailableError(
            f"the judge {role} did not become ready",
            where=f"env.nemo_gym.{role}.responses_api_models.vllm_model",
            expected=f"a loaded model within readiness_timeout_s={config.readiness_timeout_s:g}",
            found="still loading",
            hints=[f"env.nemo_gym.{role}.responses_api_models.vllm_model.readiness_timeout_s=3600"],
        )
    result_of(loading, worker)
