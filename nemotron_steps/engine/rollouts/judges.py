"""A judge that is a generator in this process: the `Judge` protocol of environments over an AsyncSampler.

Not for: what a judge is asked (the environments) or judges behind HTTP (environments/judged/judges.py).
"""

from collections.abc import Sequence
from typing import Any, Protocol

from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.types import SamplingParams
from nemotron_steps.environments.judged.judges import JudgeLostError, QuestionLabels, longer_context
from nemotron_steps.errors import JudgeUnavailableError, WorkerLostError
from nemotron_steps.models.chat import ChatFormat


class StepwiseJudge(Protocol):
    """A judge whose random streams follow the training step."""

    def start_step(self, step: str) -> None:
        """Name the training step that the following questions belong to."""


class GeneratorJudge:
    """Chat completions of a local model, batched with whatever else asks it at the time."""

    def __init__(
        self, sampler: AsyncSampler, chat: ChatFormat, *, max_total_length: int, length_key: str, seed: int
    ) -> None:
        self._sampler = sampler
        self._chat = chat
        self._max_total_length = max_total_length
        self._length_key = length_key
        self._seed = seed
        self._labels = QuestionLabels()

    def start_step(self, step: str) -> None:
        """Name the training step that the following questions belong to."""
        self._labels.start_step(step)

    async def complete(
        self, messages: Sequence[dict[str, Any]], *, temperature: float, top_p: float, max_tokens: int
    ) -> str:
        """The judge's whole answer, reasoning included."""
        prompt_ids = self._chat.render(messages)
        room = self._max_total_length - len(prompt_ids)
        if room < 1:
            raise JudgeUnavailableError(
                f"a question of {len(prompt_ids)} tokens does not fit the judge",
                expected=f"fewer than {self._max_total_length} tokens",
                hints=[longer_context(self._length_key, len(prompt_ids) + max_tokens)],
            )
        params = SamplingParams(
            max_new_tokens=min(max_tokens, room),
            temperature=temperature,
            top_p=top_p,
            stop_token_ids=self._chat.end_ids,
            seed=self._seed,
        )
        try:
            completion = await self._sampler.sample(prompt_ids, params, self._labels.next(messages))
        except WorkerLostError as error:
            raise JudgeLostError.of(error) from error
        return self._chat.decode(completion.token_ids)
