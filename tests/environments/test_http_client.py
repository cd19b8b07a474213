"""The JSON client on real sockets: what it keeps open, breaks off, waits for and refuses."""

import asyncio
import threading
import time

import pytest

from nemotron_steps.environments import http_client
from nemotron_steps.environments.http_client import HttpStatusError, JsonClient, ServerUnreachableError
from nemotron_steps.environments.http_server import EventStream, Reply, Request
from tests.environments.served import serving


async def echo(request: Request) -> Reply:
    return Reply(200, {"path": request.path, "cookie": request.headers.get("cookie")}, (("Set-Cookie", "a=b; Path=/"),))


async def never(request: Request) -> Reply:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def test_one_connection_serves_several_event_loops_and_blocking_callers() -> None:
    with serving(echo) as server:
        client = JsonClient(server.url)
        client.wait_until_ready(5.0)
        for path in ("/v1/x", "/a%2Fb"):
            answer, cookies = asyncio.run(client.post(path, {}, cookies="c=d"))
            assert (answer, cookies) == ({"path": path, "cookie": "c=d"}, "a=b")
        assert asyncio.run(client.get("/"))["cookie"] is None  # cookies are the callers' alone
        assert server._connections is not None
        assert len(server._connections.connections) == 1
        client.close()
        with pytest.raises(ServerUnreachableError, match="closed"):
            asyncio.run(client.get("/"))


def test_a_request_nobody_waits_for_any_more_is_broken_off() -> None:
    begun, ended = threading.Event(), threading.Event()

    async def answer(request: Request) -> Reply:
        begun.set()
        try:
            return await never(request)
        finally:
            ended.set()

    async def ask(client: JsonClient) -> None:
        asking = asyncio.ensure_future(client.post("/run", {}))
        await asyncio.to_thread(begun.wait, 10)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    with serving(answer) as server:
        client = JsonClient(server.url)
        asyncio.run(ask(client))
        assert ended.wait(10)
        client.close()


def test_an_attempt_ends_with_its_time_out_however_long_others_wait_before_it() -> None:
    async def slow(request: Request) -> Reply:
        await asyncio.sleep(0.2)
        return Reply(200, {})

    async def ask(client: JsonClient, times: int) -> None:
        await asyncio.gather(*(client.get("/") for _ in range(times)))

    with serving(slow) as server:
        patient = JsonClient(server.url, timeout_s=5.0, retries=0, max_concurrency=1)
        begun = time.monotonic()
        asyncio.run(ask(patient, 4))  # one after another
        assert time.monotonic() - begun >= 0.8
        patient.close()
    with serving(never) as server:
        hasty = JsonClient(server.url, timeout_s=0.2, retries=0, max_concurrency=1)
        with pytest.raises(ServerUnreachableError, match=r"no answer within 0\.2 s"):
            asyncio.run(hasty.get("/"))
        hasty.close()


def test_a_redirect_and_an_answer_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_ANSWER", 10_000)

    async def flood(request: Request) -> Reply | EventStream:
        async def events():  # type: ignore[no-untyped-def]
            while True:
                yield "x" * 1000

        return Reply(307, {}, (("Location", "/flood"),)) if request.path == "/" else EventStream(events())

    with serving(flood) as server:
        client = JsonClient(server.url, retries=0)
        with pytest.raises(HttpStatusError, match="307"):
            asyncio.run(client.get("/"))
        with pytest.raises(ServerUnreachableError, match="over 10000 bytes"):
            asyncio.run(client.get("/flood"))
        client.close()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses of the client, which take no time and have no jitter."""
    taken: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        taken.extend([seconds] if seconds else [])
        await sleep(0)

    monkeypatch.setattr(http_client.asyncio, "sleep", note)
    monkeypatch.setattr(http_client.random, "uniform", lambda low, high: high)
    return taken


@pytest.mark.parametrize(
    ("status", "asked"),
    [
        *((again, 2) for again in (408, 409, 425, 429, 500, 502, 503, 504)),
        *((final, 1) for final in (400, 404, 422, 501)),
    ],
)
def test_only_what_another_attempt_may_change_is_asked_again(status: int, asked: int, pauses: list[float]) -> None:
    seen: list[dict[str, str]] = []

    async def refusing(request: Request) -> Reply:
        seen.append(request.headers)
        return Reply(status if len(seen) == 1 else 200, {})

    with serving(refusing) as server:
        client = JsonClient(server.url, retries=1, headers={"X-Mine": "1"})

        async def ask() -> None:
            await client.post("/", {}, cookies="a=b", headers={"X-Request-Id": "7"})

        if asked == 2:
            asyncio.run(ask())
        else:
            with pytest.raises(HttpStatusError) as caught:
                asyncio.run(ask())
            assert caught.value.status == status
        client.close()
    assert len(seen) == asked
    for headers in seen:
        told = ("accept", "x-mine", "x-request-id", "cookie", "content-type")
        assert [headers[name] for name in told] == ["application/json", "1", "7", "a=b", "application/json"]
