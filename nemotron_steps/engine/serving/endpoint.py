"""The endpoint: which path is answered by what, in a thread of its own.

/health  /v1/models  /v1/chat/completions  /v1/responses  /tokenize
"""

from __future__ import annotations

import json
import logging
from types import TracebackType
from typing import Any

from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.rollouts.conversation import DEFAULT_FORMAT, TurnFormat
from nemotron_steps.engine.serving.apis import chat_completion, create_response, tokenize
from nemotron_steps.engine.serving.served_model import ApiError, SamplerBridge, ServedModel
from nemotron_steps.engine.types import SamplingParams
from nemotron_steps.environments.http_server import EventStream, HttpServer, Reply, Request
from nemotron_steps.environments.loop_thread import LoopThread
from nemotron_steps.models.chat import ChatFormat

_LOG = logging.getLogger(__name__)
_METHODS = {"/health": "GET", "/v1/models": "GET"} | dict.fromkeys(
    ("/v1/chat/completions", "/v1/responses", "/tokenize", "/v1/tokenize"), "POST"
)


class Endpoint:
    """A generator on a loopback port, from `with` to its end."""

    def __init__(
        self,
        sampler: AsyncSampler,
        chat: ChatFormat,
        *,
        name: str,
        max_total_length: int,
        defaults: SamplingParams,
        turn_format: TurnFormat = DEFAULT_FORMAT,
        own_loop: bool = False,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._sampler = sampler
        self._own_loop = own_loop
        self._model = ServedModel(
            SamplerBridge(sampler),
            chat,
            name=name,
            max_total_length=max_total_length,
            turn_format=turn_format,
            defaults=defaults,
        )
        self._http = HttpServer(self._answer, host=host, port=port)

    @property
    def url(self) -> str:
        """Base URL as OpenAI clients want it, up to and including /v1."""
        return f"{self._http.url}/v1"

    @property
    def model_name(self) -> str:
        """What requests call the model."""
        return self._model.name

    def __enter__(self) -> Endpoint:
        self._thread = LoopThread("endpoint")
        self._thread.run(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.run(self._http.stop())
        self._thread.stop()

    async def _start(self) -> None:
        if self._own_loop:
            self._sampler.bind()
        await self._http.start()

    async def _answer(self, request: Request) -> Reply | EventStream:
        try:
            return await self._route(request)
        except ApiError as error:
            return error.reply()
        except Exception as error:  # one request must not take the others down; the client and the log learn of it
            _LOG.exception("request %s %s failed", request.method, request.path)
            return ApiError(500, f"{type(error).__name__}: {error}", code="internal_error").reply()

    async def _route(self, request: Request) -> Reply | EventStream:
        model, path = self._model, request.path.rstrip("/")
        if path not in _METHODS:
            raise ApiError(404, f"no such path: {request.path}", code="not_found")
        if request.method != _METHODS[path]:
            raise ApiError(405, f"{request.method} is not allowed for {path}", code="method_not_allowed")
        body: Any = {}
        if request.method == "POST":
            try:
                body = json.loads(request.body)
            except (ValueError, RecursionError) as error:
                raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
        if not isinstance(body, dict):
            raise ApiError(400, "the body must be a JSON object", code="invalid_json")
        if path.endswith("/tokenize"):
            return tokenize(model, body)
        if not model.bridge.ready:
            raise ApiError(503, "the generator is not ready", code="not_ready")
        if path == "/health":
            return Reply(200, {"status": "ok", "weight_version": model.bridge.weight_version})
        if path == "/v1/models":
            card = {"id": model.name, "object": "model", "created": 0, "owned_by": "nemotron_steps"}
            return Reply(200, {"object": "list", "data": [{**card, "max_model_len": model.max_total_length}]})
        answer = create_response if path == "/v1/responses" else chat_completion
        return await answer(model, body, request.headers.get("x-request-id"))
