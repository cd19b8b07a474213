"""Equal servers behind one client, real sockets: load is shared, a dead one is routed around and reported."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nemotron_steps.environments import http_client
from nemotron_steps.environments.base import Response, Session
from nemotron_steps.environments.http_server import HttpServer, Reply, Request
from nemotron_steps.environments.judged.judges import HttpJudge
from nemotron_steps.environments.loop_thread import LoopThread
from nemotron_steps.environments.registry import create
from nemotron_steps.errors import JudgeUnavailableError

EQUAL = "[[A=B]]"
ROW = {"responses_create_params": {"input": "Who?"}, "expected_answer": "Darwin"}


class Server:
    """A judge's server: lists a model, and answers chats with its name once `gate` is open."""

    def __init__(self, name: str, asked: Counter[str], port: int = 0) -> None:
        self.name, self.asked, self.status, self.running = name, asked, 200, True
        self.gate = asyncio.Event()
        self.gate.set()
        self._thread = LoopThread("test-server")
        self._http = HttpServer(self._answer, port=port)
        self._thread.run(self._http.start())
        self.url = f"{self._http.url}/v1"

    async def _answer(self, request: Request) -> Reply:
        if request.path == "/v1/models":
            return Reply(200, {"data": [{"id": "judge"}]})
        self.asked[self.name] += 1
        await self.gate.wait()
        return Reply(self.status, {"choices": [{"message": {"content": self.name}}]})

    def kill(self) -> None:
        if self.running:
            self.running = False
            self._thread.run(self._http.stop())
            self._thread.stop()


@contextmanager
def servers(*names: str) -> Iterator[tuple[list[Server], Counter[str]]]:
    asked: Counter[str] = Counter()
    started = [Server(name, asked) for name in names]
    try:
        yield started, asked
    finally:
        for each in started:
            each.kill()


async def ask(judge: HttpJudge) -> str:
    return await judge.complete([{"role": "user", "content": "q"}], temperature=1.0, top_p=1.0, max_tokens=9)


async def until(true: Any) -> None:
    deadline = time.monotonic() + 10.0
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_questions_go_to_the_least_loaded_server_and_in_turn() -> None:
    async def body(slow: Server, asked: Counter[str], judge: HttpJudge) -> list[str]:
        assert sorted(await asyncio.gather(*(ask(judge) for _ in range(6)))) == ["a"] * 3 + ["b"] * 3
        slow.gate.clear()
        held = [asyncio.ensure_future(ask(judge)) for _ in range(4)]
        await until(lambda: asked["a"] == 5 and asked["b"] == 5)
        quick = [await ask(judge) for _ in range(4)]  # a still has its two: b has none left
        slow._thread.loop.call_soon_threadsafe(slow.gate.set)
        await asyncio.gather(*held)
        return quick

    with servers("a", "b") as ((a, b), asked):
        judge = HttpJudge([a.url, b.url], "judge", retries=0)
        assert asyncio.run(body(a, asked, judge)) == ["b"] * 4
        judge.close()


def test_a_server_killed_under_its_questions_is_routed_around_and_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body(b: Server, asked: Counter[str], judge: HttpJudge) -> list[str]:
        b.gate.clear()
        asking = [asyncio.ensure_future(ask(judge)) for _ in range(8)]
        await until(lambda: asked["b"] == 4)
        await asyncio.to_thread(b.kill)
        return await asyncio.gather(*asking, *(ask(judge) for _ in range(3)))

    with servers("a", "b") as ((a, b), asked):
        judge = HttpJudge([a.url, b.url], "judge", retries=0)
        assert asyncio.run(body(b, asked, judge)) == ["a"] * 11
        judge.close()
    (warned,) = warnings(caplog)
    assert warned.startswith(f"{b.url} gives no answer (")
    assert asked["b"] == 4, "nobody asks a lost server while another one answers"


def test_all_servers_dead_is_one_error_that_names_each_and_never_a_reward() -> None:
    with servers(EQUAL, EQUAL) as ((a, b), _):
        judge = HttpJudge([a.url, b.url], "judge", retries=1, backoff_s=0.01)
        environment = create("equivalence_llm_judge", {"check_twice_swap": False}, {"judge_model": judge})

        def verdict() -> Any:
            (found,) = asyncio.run(environment.judge_group(ROW, [Response("Charles Darwin")], [Session()]))
            return found

        assert verdict().reward == 1.0
        b.kill()
        assert verdict().reward == 1.0
        a.kill()
        with pytest.raises(JudgeUnavailableError) as caught:
            asyncio.run(ask(judge))
        failed = verdict()
        judge.close()
    assert (failed.reward, failed.failure) == (None, "judge_unavailable")
    assert caught.value.hints == (f"curl {a.url}/models", f"curl {b.url}/models")
    found = str(caught.value.found)
    assert "none of 2 servers answers /chat/completions" in found and a.url in found and b.url in found


def test_a_lost_server_is_asked_last_until_it_answers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "LOST_FOR_S", 0.2)

    async def body(judge: HttpJudge, asked: Counter[str], port: int) -> Server:
        assert [await ask(judge) for _ in range(2)] == ["a"] * 2
        again = Server("again", asked, port)
        assert await ask(judge) == "a"
        await asyncio.sleep(0.3)
        assert sorted([await ask(judge) for _ in range(4)]) == ["a", "a", "again", "again"]
        return again

    with servers("a", "b") as ((a, b), asked):
        judge = HttpJudge([a.url, b.url], "judge", retries=0)
        b.kill()
        asyncio.run(body(judge, asked, int(b.url.rpartition(":")[2].split("/")[0]))).kill()
        judge.close()


def test_a_server_that_hangs_gets_one_question_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "LOST_FOR_S", 0.01)

    async def body(judge: HttpJudge, asked: Counter[str]) -> None:
        assert [await ask(judge) for _ in range(2)] == ["a"] * 2
        assert await ask(judge) == "a" and asked["b"] == 1, "it is lost as long as it was waited for"
        await asyncio.sleep(0.6)
        assert await asyncio.gather(*(ask(judge) for _ in range(8))) == ["a"] * 8
        assert asked["b"] == 2

    with servers("a", "b") as ((a, b), asked):
        judge = HttpJudge([a.url, b.url], "judge", retries=0, timeout_s=0.5)
        b._thread.loop.call_soon_threadsafe(b.gate.clear)
        asyncio.run(body(judge, asked))
        b._thread.loop.call_soon_threadsafe(b.gate.set)
        judge.close()


def test_a_run_begins_with_the_servers_that_are_ready() -> None:
    with servers("a", "b") as ((a, b), _):
        b.kill()
        judge = HttpJudge([b.url, a.url], "judge", retries=0)
        started = time.monotonic()
        judge.wait_until_ready(60.0)
        assert time.monotonic() - started < 5.0
        assert [asyncio.run(ask(judge)) for _ in range(2)] == ["a"] * 2
        a.kill()
        with pytest.raises(JudgeUnavailableError) as caught:
            judge.wait_until_ready(0.2)
        judge.close()
    assert str(caught.value.found).count("not ready") == 2
    assert "`judge` gave no answer" in caught.value.what
