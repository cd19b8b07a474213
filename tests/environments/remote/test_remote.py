"""What a remote environment asks its server, and what it makes of the answers. The server is told."""

import asyncio
from typing import Any

import pytest

from nemotron_steps.environments.base import Response
from nemotron_steps.environments.http_client import HttpStatusError, ServerUnreachableError
from nemotron_steps.environments.registry import create
from nemotron_steps.errors import WorkerLostError

URL = "http://127.0.0.1:9"
ROW: dict[str, Any] = {"responses_create_params": {"input": "Count.", "temperature": 1.0}, "target": "5"}


class Server:
    """Answers in turn, each with or without a cookie, or raises; notes what it is asked."""

    base_url = URL

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, Any, str | None]] = []
        self.closed = False

    async def post(self, path: str, body: Any, *, cookies: str | None = None) -> tuple[Any, str | None]:
        self.asked.append((path, body, cookies))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, tuple) else (answer, None)

    def close(self) -> None:
        self.closed = True


def served(*answers: Any, name: str = "remote", **settings: Any) -> tuple[Any, Server]:
    environment: Any = create(name, {"url": URL, **settings})
    server = Server(*answers)
    environment.client = server
    return environment, server


def test_a_session_keeps_the_newest_cookie_and_the_rows_tools_where_the_server_has_none() -> None:
    async def rollout(environment: Any, row: Any) -> list[str]:
        session = await environment.seed(row)
        assert session.tools == tools
        outputs = [await environment.call_tool(session, name, {"by": 1}) for name in ("add", "a/b", "add")]
        await environment.verify(row, Response("5"), session)
        return outputs

    tools = [{"type": "function", "name": "mine"}]
    row = {**ROW, "responses_create_params": {**ROW["responses_create_params"], "tools": tools}}
    mixed = {"output": "x", "more": 1}
    environment, server = served(({"tools": []}, "a=1"), ({"output": "2"}, None), (mixed, "a=2"), [3], {"reward": 1.0})
    assert asyncio.run(rollout(environment, row)) == ["2", '{"output": "x", "more": 1}', "[3]"]
    paths = ["/seed_session", "/add", "/a%2Fb", "/add", "/verify"]
    assert [(path, cookies) for path, _, cookies in server.asked] == list(
        zip(paths, [None, "a=1", "a=1", "a=2", "a=2"], strict=True)
    )
    tools = [{"name": "theirs"}]
    environment, _ = served(({"tools": tools}, "a=1"), {}, {}, {}, {"reward": 1.0})
    asyncio.run(rollout(environment, row))


def test_a_tool_that_is_refused_says_so_and_a_server_that_is_gone_ends_the_rollout() -> None:
    environment, _ = served({}, HttpStatusError(404, "no such tool"), ServerUnreachableError("gone"))

    async def run() -> str:
        session = await environment.seed(ROW)
        refused = await environment.call_tool(session, "x", {})
        with pytest.raises(WorkerLostError):
            await environment.call_tool(session, "x", {})
        return refused

    assert asyncio.run(run()) == "error: HTTP 404: no such tool"
    for error in (HttpStatusError(500, "x"), ServerUnreachableError("gone")):
        with pytest.raises(WorkerLostError):
            asyncio.run(served(error)[0].seed(ROW))


ITEM = {"type": "message", "role": "assistant", "content": "5"}


@pytest.mark.parametrize(
    ("answer", "reward", "failure", "truncated"),
    [
        ({"response": {"output": [ITEM]}, "reward": 1.0}, 1.0, None, False),
        ({"response": {"output": [ITEM], "incomplete_details": {"reason": "x"}}, "reward": 0.5}, 0.5, None, True),
        ({"response": {"output": [ITEM]}, "reward": None}, None, "environment_refused", False),
        ({"response": {"output": [ITEM, "x"]}, "reward": 1.0}, None, "environment_refused", False),
        ({"response": None, "reward": 1.0}, None, "environment_refused", False),
        (HttpStatusError(500, "x"), None, "environment_refused", False),
        (ServerUnreachableError("gone"), None, "environment_unavailable", False),
    ],
)
def test_an_agents_rollout_is_what_its_server_says(
    answer: Any, reward: float | None, failure: str | None, truncated: bool
) -> None:
    agent, server = served(answer, name="remote_agent", policy_base_url="http://p/v1")
    run = asyncio.run(agent.run_agent(ROW, {"temperature": 0.5, "top_p": 0.9}))
    assert (run.verdict.reward, run.verdict.failure, run.truncated) == (reward, failure, truncated)
    assert run.output == (
        [ITEM] if isinstance(answer, dict) and (answer["response"] or {}).get("output") == [ITEM] else []
    )
    ((path, body, _),) = server.asked
    assert path == "/run" and body["policy_base_url"] == "http://p/v1"
    assert body["responses_create_params"] == {"input": "Count.", "temperature": 0.5, "top_p": 0.9}
