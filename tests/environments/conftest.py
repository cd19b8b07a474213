from collections.abc import Callable, Sequence
from typing import Any

import pytest


class ScriptedJudge:
    """A judge whose replies are computed by a function of the messages; records every call."""

    def __init__(self, reply: Callable[[Sequence[dict[str, str]]], str]) -> None:
        self.reply = reply
        self.calls: list[list[dict[str, str]]] = []
        self.sampling: list[dict[str, float]] = []

    async def complete(
        self, messages: Sequence[dict[str, str]], *, temperature: float, top_p: float, max_tokens: int
    ) -> str:
        self.calls.append([dict(message) for message in messages])
        self.sampling.append({"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens})
        return self.reply(messages)


@pytest.fixture(scope="session")
def scripted() -> type[ScriptedJudge]:
    return ScriptedJudge


@pytest.fixture
def row() -> dict[str, Any]:
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "Name a prime."}]},
        "agent_ref": {"type": "responses_api_agents", "name": "genrm_simple_agent"},
    }
