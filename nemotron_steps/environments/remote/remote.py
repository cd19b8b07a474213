"""remote: any NeMo-Gym resources server, or this package's own environment server, used by URL as an environment."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote

from pydantic import Field

from nemotron_steps.environments.base import (
    Environment,
    EnvironmentConfig,
    Response,
    Row,
    RowError,
    Session,
    Verdict,
    lookup,
)
from nemotron_steps.environments.remote.json_http import HttpStatusError, JsonClient, ServerUnreachableError
from nemotron_steps.environments.responses import response_object
from nemotron_steps.errors import WorkerLostError

if TYPE_CHECKING:
    from nemotron_steps.environments.judged.judges import Judge

ENVIRONMENT_UNAVAILABLE = "environment_unavailable"
"""Failure class: the server did not answer within the retries."""
ENVIRONMENT_REFUSED = "environment_refused"
"""Failure class: the server answered with an error or something that is no verdict."""


class RemoteConfig(EnvironmentConfig):
    """Settings."""

    url: str
    reward_low: float = 0.0
    reward_high: float = 1.0
    """Rewards outside of [reward_low, reward_high] are refused."""
    row_fields: tuple[str, ...] = ()
    """Dotted paths the server needs in every row, checked before the first rollout."""
    judges_groups: bool = False
    """Send a prompt's rollouts together to /verify_group (this package's servers)."""
    timeout_s: float = Field(600.0, gt=0.0)
    retries: int = Field(3, ge=0)
    ready_timeout_s: float = Field(60.0, gt=0.0)
    max_concurrency: int = Field(64, ge=1)
    policy_base_url: str | None = None
    """OpenAI-compatible endpoint of the policy, told to the server; by default the run's own, where it has one."""
    policy_model_name: str = "policy"


class RemoteEnvironment(Environment):
    """See the module docstring."""

    name: ClassVar[str] = "remote"
    config_class = RemoteConfig
    config: RemoteConfig

    def __init__(self, config: RemoteConfig, judges: Mapping[str, Judge]) -> None:
        super().__init__(config, judges)
        self.reward_range = (config.reward_low, config.reward_high)
        self._client = JsonClient(
            config.url, timeout_s=config.timeout_s, retries=config.retries, max_concurrency=config.max_concurrency
        )

    async def start(self) -> None:
        """Wait for the server.

        Raises:
            WorkerLostError: it does not answer.
        """
        try:
            await self._client.wait_ready("/", self.config.ready_timeout_s)
        except ServerUnreachableError as error:
            raise self._lost(error) from error

    async def close(self) -> None:
        """Stop the client's threads."""
        self._client.close()

    def check_values(self, row: Row) -> None:
        """The configured fields must be there."""
        for path in self.config.row_fields:
            if lookup(row, path) is None:
                raise RowError(path, f"a value at `{path}`", "nothing")

    async def seed(self, row: Row) -> Session:
        """Open the server's session; its cookie is the state.

        Raises:
            WorkerLostError: the server did not open one.
        """
        session = await super().seed(row)
        try:
            answer, session.state = await self._post("/seed_session", {**row, **self.policy_fields()})
        except (ServerUnreachableError, HttpStatusError) as error:
            raise self._lost(error) from error
        if isinstance(answer, dict) and isinstance(answer.get("tools"), list) and answer["tools"]:
            session.tools = answer["tools"]
        return session

    def policy_fields(self) -> dict[str, str]:
        """What the server is told of the policy's endpoint, under NeMo-Gym's names."""
        if self.config.policy_base_url is None:
            return {}
        return {
            "policy_base_url": self.config.policy_base_url,
            "policy_model_name": self.config.policy_model_name,
        }

    async def call_tool(self, session: Session, name: str, arguments: dict[str, Any]) -> str:
        """POST the arguments to /{name}. What the server refuses is the tool's output; a dead server is an error."""
        try:
            answer, cookie = await self._post(f"/{quote(name, safe='')}", arguments, session.state)
        except HttpStatusError as error:
            return f"error: {error}"
        except ServerUnreachableError as error:
            raise self._lost(error) from error
        session.state = cookie or session.state
        output = answer.get("output") if isinstance(answer, dict) and set(answer) == {"output"} else answer
        return output if isinstance(output, str) else json.dumps(output)

    async def verify(self, row: Row, response: Response, session: Session) -> Verdict:
        """The server's reward; a masked or missing one is a failure."""
        try:
            body = {**row, "response": response_object(response)}
            answer, _ = await self._post("/verify", body, session.state)
        except ServerUnreachableError as error:
            return Verdict.failed(ENVIRONMENT_UNAVAILABLE, message=str(error))
        except HttpStatusError as error:
            return Verdict.failed(ENVIRONMENT_REFUSED, message=str(error))
        return self._verdict(answer)

    async def verify_group(self, row: Row, responses: Sequence[Response], sessions: Sequence[Session]) -> list[Verdict]:
        """One by one, or together for an environment that judges groups."""
        if not self.config.judges_groups:
            return await super().verify_group(row, responses, sessions)
        body = {"row": dict(row), "responses": [response_object(response) for response in responses]}
        try:
            answer, _ = await self._post("/verify_group", body)
        except ServerUnreachableError as error:
            return [Verdict.failed(ENVIRONMENT_UNAVAILABLE, message=str(error)) for _ in responses]
        except HttpStatusError as error:
            return [Verdict.failed(ENVIRONMENT_REFUSED, message=str(error)) for _ in responses]
        verdicts = answer.get("verdicts") if isinstance(answer, dict) else None
        if not isinstance(verdicts, list) or len(verdicts) != len(responses):
            return [Verdict.failed(ENVIRONMENT_REFUSED, message="not one verdict a response") for _ in responses]
        return [self._verdict(item) for item in verdicts]

    def _verdict(self, answer: Any) -> Verdict:
        """A server's answer as a verdict. A reward beside a `failure` is none; `failure_reason` only names one, because
        public servers also write there why an answer earned 0."""
        if not isinstance(answer, dict):
            return _refused("no verdict", answer)
        instance = answer.get("instance_config")
        if not isinstance(instance, dict | None):
            return _refused("instance_config", instance)
        failure, reward = answer.get("failure"), answer.get("reward")
        if failure or reward is None or answer.get("mask_sample") or (instance or {}).get("mask_sample"):
            reason = failure or answer.get("failure_kind") or answer.get("failure_reason")
            named = reason if isinstance(reason, str) else ENVIRONMENT_REFUSED
            return Verdict.failed(named[:100], message=str(answer.get("details") or "")[:500])
        low, high = self.reward_range
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not low <= reward <= high:
            return _refused(f"reward outside [{low}, {high}]", reward)
        components = answer.get("components")
        numbers = {}
        for key, value in components.items() if isinstance(components, dict) else ():
            if isinstance(value, int | float):
                if not abs(value) <= sys.float_info.max:
                    return _refused(f"component {key}", value)
                numbers[key] = float(value)
        return Verdict(float(reward), numbers)

    async def _post(self, path: str, body: Any, cookies: str | None = None) -> tuple[Any, str | None]:
        """JsonClient.post; an answer nested too deep to be read is one the server should not have given."""
        try:
            return await self._client.post(path, body, cookies=cookies)
        except RecursionError as error:
            raise HttpStatusError(200, "the answer is nested too deep") from error

    def _lost(self, error: Exception) -> WorkerLostError:
        return WorkerLostError(
            "the remote environment does not answer",
            where=self.config.url,
            found=str(error),
            hints=(f"curl {self.config.url}/",),
        )


def _refused(what: str, found: Any) -> Verdict:
    try:
        shown = repr(found)[:200]
    except (ValueError, RecursionError):  # too many digits, or too deep, to be written out
        shown = type(found).__name__
    return Verdict.failed(ENVIRONMENT_REFUSED, message=f"{what}: {shown}")
