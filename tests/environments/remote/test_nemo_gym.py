"""NeMo-Gym's documented requests against our server, and what its servers answer, read by our client.

`SimpleAgent` asks as NeMo-Gym's agent of that name does: it seeds, calls tools by name, verifies, and after each answer
keeps that answer's cookies and no others.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from nemotron_steps.environments.base import (
    CannotJudgeError,
    Environment,
    EnvironmentConfig,
    GradeResult,
    Response,
    Row,
    Session,
)
from nemotron_steps.environments.http_client import JsonClient
from nemotron_steps.environments.registry import create
from nemotron_steps.environments.remote.serving import EnvironmentServer
from nemotron_steps.environments.responses import message_item


class Ledger(Environment):
    """Adds up what its tool is called with; the reward is whether the answer is the sum."""

    name: ClassVar[str] = "ledger"
    required_fields: ClassVar[tuple[str, ...]] = ("total",)
    released: ClassVar[list[int]] = []

    async def seed(self, row: Row) -> Session:
        return Session(tools=[{"type": "function", "name": "run", "parameters": {}}], state=0)

    async def call_tool(self, session: Session, name: str, arguments: dict[str, Any]) -> str:
        session.state += arguments["by"]
        return str(session.state)

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        if response.text == "?":
            raise CannotJudgeError("riddle")
        return GradeResult(float(session.state == row["total"] and response.text == str(row["total"])))

    async def release(self, session: Session) -> None:
        self.released.append(session.state)


ROW: dict[str, Any] = {
    "responses_create_params": {"input": "Add 2 and 3.", "tools": None, "temperature": None},
    "total": 5,
    "agent_ref": {"type": "responses_api_agents", "name": "ledger_simple_agent"},
    "_ng_task_index": 0,
    "_ng_rollout_index": 1,
}


def call_item(by: int, call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "name": "run", "arguments": json.dumps({"by": by}), "call_id": call_id}


def response_of(*output: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": "r", "object": "response", "created_at": 0.0, "model": "m", "output": list(output)}


TURNS = [[call_item(2, "a")], [call_item(3, "b")], [{**message_item("5"), "generation_token_ids": [7]}]]


class SimpleAgent:
    """See the module docstring."""

    def __init__(self, url: str) -> None:
        self._client = JsonClient(url, retries=0)

    async def run(self, row: dict[str, Any], turns: list[list[dict[str, Any]]]) -> dict[str, Any]:
        _, cookies = await self._client.post("/seed_session", row)
        output: list[dict[str, Any]] = []
        for turn in turns:
            output.extend(turn)
            for item in turn:
                if item["type"] == "function_call":
                    body = json.loads(item["arguments"])
                    answer, cookies = await self._client.post(f"/{item['name']}", body, cookies=cookies)
                    output.append({"type": "function_call_output", "call_id": item["call_id"], "output": answer})
        body = {**row, "response": response_of(*output)}
        graded, _ = await self._client.post("/verify", body, cookies=cookies)
        return dict(graded)


@contextmanager
def served(environment: Environment | None = None) -> Iterator[EnvironmentServer]:
    with EnvironmentServer(environment or Ledger(EnvironmentConfig(), {})) as server:
        yield server


def test_a_session_lasts_through_the_calls_of_its_tools_until_it_is_judged() -> None:
    Ledger.released.clear()
    with served() as server:
        graded = asyncio.run(SimpleAgent(server.url).run(ROW, TURNS))
    assert (graded["reward"], Ledger.released) == (1.0, [5])


def test_what_could_not_be_judged_is_masked_under_the_names_that_nemo_gym_reads() -> None:
    with served() as server:
        graded = asyncio.run(SimpleAgent(server.url).run(ROW, [[message_item("?")]]))
    assert graded["reward"] is None
    assert (graded["mask_sample"], graded["failure_kind"], graded["failure_reason"]) == (True, "riddle", "riddle")


def test_verify_alone_replays_the_tools_of_a_recorded_rollout() -> None:
    sent = {"recipient": "ann@example.com", "subject": "Hello", "body": "See you."}
    call = {"name": "email_send_email", "arguments": json.dumps(sent)}
    row = {"responses_create_params": {"input": "Write to Ann."}, "ground_truth": [call]}
    done = response_of({"type": "function_call", "call_id": "c", **call}, message_item("Done."))
    environment = create("workplace_assistant")
    environment.check_row_with_resources(row, "row:1")
    with served(environment) as server:
        client = JsonClient(server.url, retries=0)
        graded, _ = asyncio.run(client.post("/verify", {**row, "response": done}))
        idle, _ = asyncio.run(client.post("/verify", {**row, "response": response_of(message_item("Done."))}))
    assert (graded["reward"], idle["reward"]) == (1.0, 0.0)
