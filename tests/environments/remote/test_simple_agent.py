"""A rollout against a model server: what is asked turn by turn, and when it ends. The model server is told."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from nemotron_steps.environments.base import Environment, EnvironmentConfig, GradeResult, Response, Session
from nemotron_steps.environments.remote.serving import run_rollout
from nemotron_steps.environments.responses import message_item


class Model:
    """Says the turns, one after the other."""

    base_url = "http://model/v1"

    def __init__(self, *turns: Any) -> None:
        self.turns = list(turns)
        self.asked: list[dict[str, Any]] = []

    async def post(self, path: str, body: dict[str, Any]) -> tuple[Any, None]:
        assert path == "/responses"
        self.asked.append({**body, "input": list(body["input"])})
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        return ({"id": f"r{len(self.asked)}", "output": turn} if isinstance(turn, list) else turn), None


class Asks(Environment):
    """Has these further questions; notes the calls of its tool and what it is asked about."""

    name: ClassVar[str] = "asks"

    def __init__(self, *questions: str) -> None:
        super().__init__(EnvironmentConfig(), {})
        self.questions = list(questions)
        self.called: list[Any] = []
        self.heard: list[tuple[str, int]] = []

    async def call_tool(self, session: Session, name: str, arguments: dict[str, Any]) -> str:
        self.called.append((name, arguments))
        return f"{name} done"

    async def follow_up(self, row: Any, response: Response, session: Session) -> str | None:
        self.heard.append((response.text, len(response.tool_calls)))
        return self.questions.pop(0) if self.questions else None

    async def verify(self, row: Any, response: Response, session: Session) -> GradeResult:
        raise AssertionError("nothing is judged here")


def rollout(environment: Asks, model: Any, most: int = 9, tools: Any = None, **params: Any) -> dict[str, Any]:
    row = {"responses_create_params": {"input": "Go.", **params}}
    return asyncio.run(run_rollout(environment, row, Session(tools=tools or []), model, "m", most))


def calls(*names: str, arguments: str = "{}") -> list[dict[str, Any]]:
    return [{"type": "function_call", "name": name, "arguments": arguments, "call_id": f"c-{name}"} for name in names]


def said(text: str) -> list[dict[str, Any]]:
    return [message_item(text)]


def outputs(*names: str, told: str = "{} done") -> list[dict[str, Any]]:
    return [{"type": "function_call_output", "call_id": f"c-{name}", "output": told.format(name)} for name in names]


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def test_calls_are_run_in_order_and_the_environments_question_is_asked_next() -> None:
    environment, model = Asks("Sure?"), Model(calls("f", "g"), said("one"), said("two"))
    done = rollout(environment, model)
    turns = [*calls("f", "g"), *outputs("f", "g"), *said("one"), user("Sure?"), *said("two")]
    assert done == {"id": "r3", "output": turns}
    assert environment.called == [("f", {}), ("g", {})]
    assert environment.heard == [("one", 2), ("two", 2)]  # of the whole rollout
    assert [each["input"] for each in model.asked] == [
        [user("Go.")], [user("Go."), *turns[:4]], [user("Go."), *turns[:6]],
    ]  # fmt: skip


def test_arguments_that_are_no_object_are_told_to_the_model_and_none_are_an_empty_one() -> None:
    environment, model = Asks(), Model(calls("f", arguments="[1]"), calls("g", arguments=""), said("x"))
    done = rollout(environment, model)
    assert done["output"][1] == outputs("f", told="error: the arguments of `{}` are not a JSON object")[0]
    assert environment.called == [("g", {})]


@pytest.mark.parametrize("most", [1, 2])
def test_the_last_turn_that_there_may_be_is_neither_answered_nor_asked_about(most: int) -> None:
    for turn in (calls("f"), said("x")):
        environment = Asks("more?", "more?")
        done = rollout(environment, Model(*[turn] * most), most)
        assert done["output"][-1] == turn[0]
        assert len(environment.called) + len(environment.heard) == most - 1
