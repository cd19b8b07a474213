"""Environments of the tests' runs, in a module that imports no engine: an actor of environments imports it."""

import asyncio

from benchmarks.grpo_task import reward_of
from nemotron_steps.environments.base import Environment, GradeResult, Response, Session
from nemotron_steps.errors import JudgeUnavailableError


class Vowels(Environment):
    name = "vowels"

    async def verify(self, row, response: Response, session: Session) -> GradeResult:
        return GradeResult(reward_of(response.text))


class AnyVowel(Environment):
    """1 for an answer with a vowel, else 0: a pair of rollouts is often equal."""

    name = "any_vowel"

    async def verify(self, row, response: Response, session: Session) -> GradeResult:
        return GradeResult(float(reward_of(response.text) > 0))


class Silent(Environment):
    """Its judge never answers."""

    name = "silent"

    async def verify(self, row, response: Response, session: Session) -> GradeResult:
        raise JudgeUnavailableError("no answer")


class Unreliable(Environment):
    """Its judge answers about half of the questions, always with a reward above 1."""

    name = "unreliable"

    async def verify(self, row, response: Response, session: Session) -> GradeResult:
        if sum(response.text.encode()) % 2:
            raise JudgeUnavailableError("no answer")
        return GradeResult(1 + reward_of(response.text))


class Stuck(Vowels):
    """Conversations about a prompt with an `x` never end."""

    name = "stuck"

    async def follow_up(self, row, response: Response, session: Session) -> str | None:
        if "x" in row["responses_create_params"]["input"][0]["content"]:
            await asyncio.Event().wait()
        return None


class Judged(Environment):
    """The judge's answer to the policy's, graded."""

    name = "judged"

    def needed_judges(self):
        return ("judge_model",)

    async def seed(self, row):  # state, so that sessions live in the actor
        return Session(state={"asked": 0})

    async def verify(self, row, response: Response, session: Session) -> GradeResult:
        session.state["asked"] += 1
        judge = self.judges["judge_model"]
        messages = [{"role": "user", "content": f"say {response.text[:12]}"}]
        text = await judge.complete(messages, temperature=1.0, top_p=1.0, max_tokens=6)
        return GradeResult(reward_of(text), {"asked": float(session.state["asked"])})


ENVIRONMENTS = (Vowels, AnyVowel, Silent, Unreliable, Stuck, Judged)
