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
from nemotron_steps.engine.serving.chat_api import chat_completion, tokenize
from nemotron_steps.engine.serving.responses_api import create_response
from nemotron_steps.engine.serving.served_model import ApiError, SamplerBridge, ServedModel
from nemotron_steps.engine.types import SamplingParams
from nemotron_steps.environments.http_server import EventStream, HttpServer, Reply, Request
from nemotron_steps.environments.loop_thread import LoopThread
from nemotron_steps.models.chat import ChatFormat

_LOG = logging.getLogger(__name__)


class Endpoint:
    """A generator on a loopback port, from `with` to its end.

    Args:
        sampler: shared with the training run, whose loop steps it; or used by this endpoint alone.
        chat: the generator's tokenizer and template.
        name: model name that requests use.
        max_total_length: most tokens of prompt and answer together.
        defaults: sampling of requests that say nothing.
        own_loop: step the sampler on the endpoint's own loop, for a generator that nothing else uses (a judge).
            Otherwise requests get 503 until a run has bound the sampler to its loop.
        host, port: where to listen; port 0 picks a free one, see `url`.
    """

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
        path = request.path.rstrip("/")
        gets = {"/health": self._health, "/v1/models": self._models}
        posts = ("/v1/chat/completions", "/v1/responses", "/tokenize", "/v1/tokenize")
        if path not in gets and path not in posts:
            raise ApiError(404, f"no such path: {request.path}", code="not_found")
        if request.method != ("GET" if path in gets else "POST"):
            raise ApiError(405, f"{request.method} is not allowed for {path}", code="method_not_allowed")
        if path in gets:
            self._require_ready()
            return gets[path]()
        body = _json_object(request.body)
        if path.endswith("/tokenize"):
            return tokenize(self._model, body)
        self._require_ready()
        if path == "/v1/responses":
            return await create_response(self._model, body, request.headers.get("x-request-id"))
        return await chat_completion(self._model, body, request.headers.get("x-request-id"))

    def _require_ready(self) -> None:
        if not self._model.bridge.ready:
            raise ApiError(503, "the generator is not ready", code="not_ready")

    def _health(self) -> Reply:
        return Reply(200, {"status": "ok", "weight_version": self._model.bridge.weight_version})

    def _models(self) -> Reply:
        card = {
            "id": self._model.name,
            "object": "model",
            "created": 0,
            "owned_by": "nemotron_steps",
            "max_model_len": self._model.max_total_length,
        }
        return Reply(200, {"object": "list", "data": [card]})


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body is no JSON object", code="invalid_json")
    return body
