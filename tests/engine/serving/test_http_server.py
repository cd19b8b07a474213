"""The HTTP server and the sampler beneath the endpoint, where clients and loops misbehave."""

from __future__ import annotations

import asyncio
import socket
from urllib.parse import urlsplit

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.types import SamplingParams
from tests.engine.serving.taught_model import GREETING, embedded
from tests.engine.serving.test_chat_api import call

LINES = st.sampled_from(
    [
        b"GET /health HTTP/1.1\r\n",
        b"Host: localhost\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"POST /v1/responses HTTP/1.1\r\n",
        b"Content-Length: 5\r\n",
        b"\r\n",
        b"{}",
        b"\x00",
    ]
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(LINES | st.binary(max_size=12), max_size=6))
def test_no_bytes_bring_the_server_down(endpoint, pieces):
    parts = urlsplit(endpoint.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
        connection.sendall(b"".join(pieces))
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass
    assert call(endpoint, "/health")[0] == 200


def test_a_body_may_come_in_pieces_and_ask_before(endpoint):
    parts = urlsplit(endpoint.url)
    body = b'{"messages": [{"role": "user", "content": "hello"}], "temperature": 0}'
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nConnection: close\r\n"
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body))
        assert connection.recv(100).startswith(b"HTTP/1.1 100 Continue")
        for start in range(0, len(body), 9):
            connection.sendall(body[start : start + 9])
        received = b""
        while piece := connection.recv(4096):
            received += piece
    assert b" 200 OK" in received and b'"content": "Hi."' in received


def test_what_a_loop_leaves_behind_is_dropped_when_it_ends(taught, chat):
    generator = embedded(taught, chat)
    sampler = AsyncSampler(generator)
    params = SamplingParams(max_new_tokens=100, stop_token_ids=(chat.tokenizer.eos_token_id,), temperature=0)
    prompt = chat.render([GREETING])

    async def leave() -> None:
        sampler.submit(prompt, params, request_id="left")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert generator.pending() == 1

    asyncio.run(leave())
    assert generator.pending() == 0
    again = asyncio.run(sampler.sample(prompt, params, request_id="left"))
    assert chat.decode(again.token_ids).endswith("Hi.")


def test_cancelling_one_request_leaves_its_namesakes(taught, chat):
    generator = embedded(taught, chat)
    sampler = AsyncSampler(generator)
    params = SamplingParams(max_new_tokens=100, stop_token_ids=(chat.tokenizer.eos_token_id,), temperature=0)

    async def cancel_one() -> str:
        (gone,) = sampler.submit(chat.render([GREETING]), params, request_id="a/1")
        (kept,) = sampler.submit(chat.render([GREETING]), params, request_id="a/10")
        sampler.cancel_request("a/1")
        sampler.cancel_request("unknown")
        assert gone.cancelled()
        return chat.decode((await kept).token_ids)

    assert asyncio.run(cancel_one()).endswith("Hi.")
