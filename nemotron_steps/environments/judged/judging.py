"""Asking a judge for a label or a JSON verdict, safely: shared by every environment with a yes-or-no kind of judge.

What a model wrote goes into tagged blocks with every delimiter, control token and label made inert, so an answer
cannot close its block or write the verdict. A reply that holds no verdict is asked for again, then it is a failure to
judge, never a verdict of "no".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from nemotron_steps.environments.base import CannotJudgeError, Environment, EnvironmentConfig
from nemotron_steps.environments.judged.genrm_messages import neutralize
from nemotron_steps.environments.judged.judge_transcripts import begun_note, note_of
from nemotron_steps.environments.responses import split_reasoning

if TYPE_CHECKING:
    from nemotron_steps.environments.judged.judges import Judge, Messages

JUDGE_UNPARSEABLE = "judge_unparseable"

Value = TypeVar("Value")


class JudgeSampling(BaseModel):
    """How the judge samples."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: float = Field(default=0.6, ge=0.0)
    top_p: float = Field(default=0.95, gt=0.0, le=1.0)
    max_output_tokens: int = Field(default=16384, gt=0)

    async def reply(self, judge: Judge, messages: Messages) -> str:
        top_p, limit = self.top_p, self.max_output_tokens
        return await judge.complete(messages, temperature=self.temperature, top_p=top_p, max_tokens=limit)


JUDGE_ROLE = "judge_model"


class JudgedConfig(EnvironmentConfig):
    """Settings of an environment that asks one judge."""

    judge_responses_create_params: JudgeSampling = JudgeSampling()
    """How the judge samples: temperature, top_p, max_output_tokens."""
    judge_parse_retries: int = Field(2, ge=0)
    """How often a judge whose reply has no verdict is asked again, before the rollout is left out."""
    unclear_counts: bool = False
    """Then count it as NeMo-Gym does (not equal, NO, FAIL, unclear) instead of leaving the rollout out."""


class JudgedEnvironment(Environment):
    """An environment that asks one judge; subclasses set `role` where it is not the general one."""

    role: ClassVar[str] = JUDGE_ROLE
    config_class: ClassVar[type[EnvironmentConfig]] = JudgedConfig
    config: JudgedConfig

    def needed_judges(self) -> tuple[str, ...]:
        return (self.role,)

    async def ask(
        self, system: str, prompt: str, read: Callable[[str], Value | None], unclear: Value | None = None
    ) -> Value:
        """Ask until `read` finds a verdict in the reply's text after its reasoning. That reply is noted."""
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        config, note, verdict, reply = self.config, begun_note(), None, ""
        for _ in range(config.judge_parse_retries + 1):
            reply = await config.judge_responses_create_params.reply(self.judges[self.role], messages)
            if (verdict := read(split_reasoning(reply)[1])) is not None:
                break
        if verdict is None and config.unclear_counts:
            verdict = unclear
        if verdict is None:
            raise CannotJudgeError(JUDGE_UNPARSEABLE, f"last reply: {reply[-200:]}")
        note.update(note_of(reply))
        return verdict


def blocks(**texts: str) -> str:
    """Untrusted texts as tagged blocks of a judge prompt; see genrm_messages.neutralize. Double square brackets, which
    mark labels, are broken up too."""
    inert = {tag: neutralize(text).replace("[[", "[ [").replace("]]", "] ]") for tag, text in texts.items()}
    return "\n".join(f"<{tag}>\n{text}\n</{tag}>" for tag, text in inert.items())


def last_label(labels: Sequence[str]) -> Callable[[str], str | None]:
    """A reader: the label that occurs last in a reply, None when none does."""
    return lambda reply: next(reversed(_named(reply, labels)), None)


def least_label(labels: Sequence[str]) -> Callable[[str], str | None]:
    """A reader: of the labels that a reply names first and last, the one later in `labels` (best to worst). NeMo-Gym
    takes the first, which a judge may name only to say what it has to choose from."""

    def read(reply: str) -> str | None:
        named = _named(reply, labels)
        return max(named[0], named[-1], key=labels.index) if named else None

    return read


def _named(reply: str, labels: Sequence[str]) -> list[str]:
    return re.findall("|".join(re.escape(label) for label in sorted(labels, key=len, reverse=True)), reply)
