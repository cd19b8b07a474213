"""Serving environments, using remote ones, and the HTTP judge: real sockets on loopback."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from nemotron_steps.environments.base import (
    CannotJudgeError,
    Environment,
    EnvironmentConfig,
    GradeResult,
    Response,
    Row,
    Session,
)
from nemotron_steps.environments.judged.judges import HttpJudge
from nemotron_steps.environments.registry import create
from nemotron_steps.environments.remote.serving import EnvironmentServer
from nemotron_steps.errors import ConfigError, JudgeUnavailableError, WorkerLostError


class Counter(Environment):
    """Counts its tool's calls; the reward is whether the answer names the count."""

    name: ClassVar[str] = "counter"
    required_fields: ClassVar[tuple[str, ...]] = ("target",)
    released: ClassVar[list[int]] = []

    async def seed(self, row: Row) -> Session:
        return Session(tools=[{"type": "function", "name": "add", "parameters": {}}], state=0)

    async def call_tool(self, session: Session, name: str, arguments: dict[str, Any]) -> str:
        session.state += arguments.get("by", 1)
        return f"{name} -> {session.state}"

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        if response.text == "?":
            raise CannotJudgeError("riddle", "no idea")
        return GradeResult(float(response.text == str(session.state) == row["target"]), {"count": float(session.state)})

    async def release(self, session: Session) -> None:
        self.released.append(session.state)


ROW = {"responses_create_params": {"input": "Count."}, "target": "5"}


def remote(url: str, **config: Any) -> Environment:
    return create("remote", {"url": url, "retries": 0, "ready_timeout_s": 5.0, "timeout_s": 10.0, **config})


def test_a_served_environment_behaves_like_the_local_one() -> None:
    async def rollout(environment: Environment) -> tuple[list[str], GradeResult, GradeResult]:
        await environment.start()
        session, other = await environment.seed(ROW), await environment.seed(ROW)
        assert session.tools[0]["name"] == "add"
        outputs = [
            await environment.call_tool(session, "add", {"by": 2}),
            await environment.call_tool(session, "add", {"by": 3}),
        ]
        await environment.call_tool(other, "add", {"by": 9})
        verdicts = await environment.verify_group(ROW, [Response("5"), Response("5")], [session, other])
        await environment.close()
        return outputs, verdicts[0], verdicts[1]

    with EnvironmentServer(Counter(EnvironmentConfig(), {})) as server:
        served = asyncio.run(rollout(remote(server.url)))
    local = asyncio.run(rollout(Counter(EnvironmentConfig(), {})))
    assert served == local
    assert served[0] == ["add -> 2", "add -> 5"]
    assert (served[1].reward, served[2].reward) == (1.0, 0.0)
    assert served[1].components == {"count": 5.0}


@contextmanager
def scripted_server(answer: Callable[[str, dict[str, Any]], tuple[int, Any]]) -> Iterator[tuple[str, list[Any]]]:
    seen: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(200, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, body, dict(self.headers)))
            self._reply(*answer(self.path, body))

        def _reply(self, status: int, payload: Any) -> None:
            data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        ({"reward": 1.0, "failure": "judge_unavailable"}, "judge_unavailable"),
        ({"reward": 0.0, "mask_sample": True, "failure_kind": "lost", "failure_reason": "it timed out"}, "lost"),
        ({"reward": 0.0, "instance_config": {"mask_sample": True}, "failure_reason": "lost"}, "lost"),
        ({"reward": None}, "environment_refused"),
        ({"reward": 1.0, "failure": {"why": 1}}, "environment_refused"),
        ({"reward": 1.0, "instance_config": "mask"}, "environment_refused"),
        ({"reward": 10**400}, "environment_refused"),
        ({"reward": float("nan")}, "environment_refused"),
        ({"reward": True}, "environment_refused"),
        ({"reward": 1.0, "components": {"a": float("nan")}}, "environment_refused"),
    ],
)
def test_a_contradiction_or_a_wrong_type_is_a_failure(answer: Any, failure: str) -> None:
    verdict = create("remote", {"url": "http://127.0.0.1:1"})._verdict(answer)  # type: ignore[attr-defined]
    assert (verdict.reward, verdict.failure) == (None, failure)


def test_a_public_servers_reason_for_a_zero_is_no_failure() -> None:
    environment: Any = create("remote", {"url": "http://127.0.0.1:1"})
    verdict = environment._verdict({"reward": 0.0, "failure_reason": "not_json", "components": {"n": 2, "s": "x"}})
    assert (verdict.reward, verdict.components) == (0.0, {"n": 2.0})


def test_an_answer_nested_too_deep_is_a_failure_of_who_gave_it() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    with scripted_server(lambda path, body: (200, deep)) as (url, seen):
        environment = create("remote", {"url": url})
        (verdict,) = asyncio.run(environment.judge_group(ROW, [Response("x")], [Session()]))
        with pytest.raises(JudgeUnavailableError, match="nested too deep"):
            ask(HttpJudge(url, "judge"))
    assert verdict.failure == "environment_refused"
    assert len([path for path, *_ in seen if path != "/seed_session"]) == 2  # another attempt would bring the same


@pytest.mark.parametrize(
    ("fails_over", "status", "reward", "failure"),
    [
        ("bad", 500, 0.0, "environment_unavailable"),
        ("bad", 200, 0.0, "verify_failed"),
        ("", 200, None, "verify_failed"),
        ("bad", 422, 0.0, "environment_refused"),
        ("bad", None, None, "environment_unavailable"),
        ("", 500, None, "environment_unavailable"),
        ("", 422, None, "environment_refused"),
        ("bad", 503, None, "environment_unavailable"),
    ],
)
def test_an_answer_that_a_server_fails_over_earns_the_least_if_it_grades_another(
    fails_over: str, status: int | None, reward: float | None, failure: str
) -> None:
    def answer(path: str, body: Any) -> tuple[int, Any]:
        if path == "/seed_session":
            return 200, {}
        if fails_over in json.dumps(body):
            if status is None:
                time.sleep(1.0)
            return status or 200, {"detail": "no", "failure": "verify_failed"}
        return 200, {"reward": 1.0}

    with scripted_server(answer) as (url, _):
        environment = remote(url, timeout_s=0.3 if status is None else 10.0)
        good, bad = asyncio.run(environment.judge_group(ROW, [Response("good"), Response("bad")], [Session()] * 2))
    assert good.reward == (1.0 if fails_over else None)
    assert (bad.reward, bad.failure or bad.details["failure"]) == (reward, failure)


def test_a_dead_server_is_a_named_error_within_its_time_out() -> None:
    with scripted_server(lambda path, body: (200, {})) as (url, _):
        pass
    with pytest.raises(WorkerLostError):
        asyncio.run(remote(url, ready_timeout_s=0.2).start())


def completion(text: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def ask(judge: HttpJudge) -> str:
    return asyncio.run(judge.complete([{"role": "user", "content": "q"}], temperature=0.6, top_p=0.95, max_tokens=9))


def test_the_judge_asks_and_retries() -> None:
    statuses = [503, 429, 200]
    with scripted_server(lambda path, body: (statuses.pop(0), completion("yes"))) as (url, seen):
        judge = HttpJudge(f"{url}/v1", "judge", backoff_s=0.01)
        judge.wait_until_ready(5.0)
        assert ask(judge) == "yes"
    assert len(seen) == 3
    assert seen[0][0] == "/v1/chat/completions"
    assert seen[0][1] == {
        "model": "judge",
        "messages": [{"role": "user", "content": "q"}],
        "temperature": 0.6,
        "top_p": 0.95,
        "max_tokens": 9,
    }


@pytest.mark.parametrize(
    ("status", "answer"), [(500, {}), (400, {"error": "x"}), (200, {"choices": []}), (200, b"<html>")]
)
def test_a_judge_without_an_answer_is_unavailable(status: int, answer: Any) -> None:
    with (
        scripted_server(lambda path, body: (status, answer)) as (url, seen),
        pytest.raises(JudgeUnavailableError) as caught,
    ):
        ask(HttpJudge(f"{url}/v1", "judge", retries=1, backoff_s=0.01))
    assert len(seen) <= 2
    assert caught.value.hints == (f"curl {url}/v1/models",)


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError):
        HttpJudge("http://127.0.0.1:1", "judge", api_key_env="NO_SUCH_KEY_HERE")
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with scripted_server(lambda path, body: (200, completion("x"))) as (url, seen):
        ask(HttpJudge(url, "judge", api_key_env="JUDGE_KEY"))
    assert seen[0][2]["Authorization"] == "Bearer secret"
