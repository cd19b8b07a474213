"""Judges: language models that environments ask for a verdict.

A judge only completes messages; what is asked and how the answer is read belongs to the environment. The in-process
judge over a generator lives in the engine layer; here are the protocol and the OpenAI-compatible HTTP judge.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from nemotron_steps.environments.http_client import HttpStatusError, JsonClient, ServerUnreachableError
from nemotron_steps.environments.responses import content_text, text_of
from nemotron_steps.errors import ConfigError, JudgeUnavailableError, WorkerLostError

Messages = Sequence[dict[str, str]]


class JudgeLostError(WorkerLostError):
    """A judge that runs beside the policy is dead. Nothing is graded by it until the run is resumed, so it ends the
    run; a judge that somebody else serves is only unavailable."""

    @classmethod
    def of(cls, error: WorkerLostError) -> JudgeLostError:
        return cls(error.what, where=error.where, expected=error.expected, found=error.found, hints=error.hints)


class Judge(Protocol):
    """Completes a conversation. Implementations are safe to call concurrently."""

    async def complete(self, messages: Messages, *, temperature: float, top_p: float, max_tokens: int) -> str:
        """The completion's text, reasoning included when the model writes it into its text."""


@runtime_checkable
class MeasuringJudge(Protocol):
    """A judge that knows beforehand how it is asked."""

    def refuse_longer(self, messages: Messages, where: str, *, max_tokens: int) -> None:
        """Refuse a question about the row at `where` that fills the judge's context."""

    def unwritten(self, messages: Messages) -> tuple[str, ...]:
        """Roles of a question whose messages the judge would never see: its chat template refuses or drops them."""


def longer_context(key: str, tokens: int) -> str:
    """A hint: the key of a judge's context with the power of two that holds so many tokens."""
    return f"{key}={1 << (tokens - 1).bit_length()}"


class QuestionLabels:
    """Names every question a judge is asked: by the question itself, how often it was asked in this training step,
    and the step. A seeded judge samples by that name, so a resumed run is judged exactly as an unbroken one."""

    def __init__(self) -> None:
        self._step = ""
        self._asked: Counter[str] = Counter()

    def start_step(self, step: str) -> None:
        self._step = step
        self._asked.clear()

    def next(self, messages: Messages) -> str:
        digest = hashlib.sha256(json.dumps(list(messages)).encode()).hexdigest()[:24]
        self._asked[digest] += 1
        return f"judge/{self._step}/{digest}/{self._asked[digest]}"


class HttpJudge:
    """A judge behind an OpenAI-compatible `/chat/completions` endpoint (vLLM, SGLang, NIM, ...), or behind several of
    one model: each question goes to the least loaded, and one that gives no answer is routed around.

    Args:
        base_url: up to and including `/v1`; one, or those of all replicas.
        model: name the server knows the model by; empty until ask_for_listed_model.
        api_key_env: environment variable holding the bearer token; the token itself never enters a config.
        seed: sent with every question, whose name (QuestionLabels) goes into the X-Request-Id header: this package's
            endpoint then answers as the same judge in the process would. None sends neither.
        options: as JsonClient's: timeout_s, retries, backoff_s, max_concurrency.
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
        model: str,
        *,
        api_key_env: str | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        self.model = model
        self._seed = seed
        self._labels = QuestionLabels()
        self.start_step = self._labels.start_step
        self._client = JsonClient(base_url, ready_path="/models", headers=_authorization(api_key_env), **options)

    def wait_until_ready(self, timeout_s: float = 600.0) -> None:
        """Return once the server, or the first replica, lists its models; blocks."""
        try:
            self._client.wait_until_ready(timeout_s)
        except ServerUnreachableError as error:
            raise self._unavailable(str(error)) from error

    def ask_for_listed_model(self) -> None:
        """Ask for the first model that the server lists, whatever the name given before; blocks."""
        self.model = _listed_model(self._client)

    async def complete(self, messages: Messages, *, temperature: float, top_p: float, max_tokens: int) -> str:
        sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
        body: dict[str, Any] = {"model": self.model, "messages": list(messages), **sampling}
        headers: dict[str, str] = {}
        if self._seed is not None:
            body["seed"] = self._seed
            headers["X-Request-Id"] = self._labels.next(messages)
        try:
            answer, _ = await self._client.post("/chat/completions", body, headers=headers)
        except (ServerUnreachableError, HttpStatusError) as error:
            raise self._unavailable(str(error)) from error
        try:
            return content_text(answer["choices"][0]["message"].get("content"))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise self._unavailable(f"unexpected answer {text_of(answer, 200)}") from error

    def close(self) -> None:
        self._client.close()

    def _unavailable(self, cause: str) -> JudgeUnavailableError:
        return JudgeUnavailableError(
            f"judge `{self.model}` gave no answer" if self.model else "a judge gave no answer",
            where=self._client.base_url,
            expected="a chat completion",
            found=cause,
            hints=tuple(f"curl {url}/models" for url in self._client.base_urls),
        )


def served_model(base_url: str, api_key_env: str | None = None) -> str:
    """The first model that a server lists; blocks."""
    client = JsonClient(base_url, headers=_authorization(api_key_env), timeout_s=30.0, retries=1)
    try:
        return _listed_model(client)
    finally:
        client.close()


def _listed_model(client: JsonClient) -> str:
    try:
        name = client.read("/models")["data"][0]["id"]
        if not isinstance(name, str):
            raise TypeError(f"its first id is {text_of(name, 200, repr)}")
        return name
    except (ServerUnreachableError, HttpStatusError, KeyError, IndexError, TypeError) as error:
        answers = "--judge http://HOST:PORT/v1   # of a server that answers"
        raise JudgeUnavailableError(
            "a judge's server lists no model",
            where=f"{client.base_url}/models",
            expected='{"data": [{"id": "NAME"}]}',
            found=str(error),
            hints=(answers, f"curl {client.base_urls[0]}/models   # what this one says"),
        ) from error


def _authorization(api_key_env: str | None) -> dict[str, str]:
    if api_key_env is None:
        return {}
    key = os.environ.get(api_key_env)
    if not key:
        where = f"environment variable {api_key_env}"
        raise ConfigError("the judge's API key is not set", where=where, hints=(f"export {api_key_env}=...",))
    return {"Authorization": f"Bearer {key}"}
