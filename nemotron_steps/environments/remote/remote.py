"""remote: any NeMo-Gym resources server, or this package's own environment server, as an environment.

It is used by `url`, or found through the `head_server` of a running NeMo-Gym: the one that the row's agent uses there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import quote

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from nemotron_steps.environments.base import (
    FLOAT32_MAX,
    AgentRun,
    CannotJudgeError,
    Environment,
    EnvironmentConfig,
    GradeResult,
    GraderFailedError,
    Response,
    Row,
    RowError,
    Session,
    lookup,
)
from nemotron_steps.environments.http_client import HttpStatusError, JsonClient, ServerUnreachableError
from nemotron_steps.environments.judged.judge_transcripts import JUDGE_NOTES, notes_from
from nemotron_steps.environments.remote.head_server import (
    AGENTS,
    RESOURCES,
    HeadServer,
    HeadServerConfig,
    UnknownServerError,
)
from nemotron_steps.environments.responses import response_object, text_of
from nemotron_steps.errors import ConfigError, WorkerLostError

ENVIRONMENT_UNAVAILABLE = "environment_unavailable"
"""Failure class: the server did not answer within the retries."""
ENVIRONMENT_REFUSED = "environment_refused"
"""Failure class: the server answered with an error or something else than a verdict."""


class RemoteConfig(EnvironmentConfig):
    """Settings."""

    url: str | None = None
    """Of the server; or give head_server."""
    head_server: HeadServerConfig | None = None
    """NeMo-Gym's head server, which says where its servers are: {host, port}, by default 127.0.0.1 and 11000."""
    server_name: str | None = None
    """With head_server: what NeMo-Gym's config calls the server or the agent; None: each row's agent_ref.name."""
    reward_low: float = 0.0
    """The least that the server gives."""
    reward_high: float = 1.0
    """Rewards outside of [reward_low, reward_high] are refused."""
    row_fields: tuple[str, ...] = ()
    """Dotted paths the server needs in every row, checked before the first rollout."""
    judges_groups: bool = False
    """Send a prompt's rollouts together to /verify_group (this package's servers)."""
    timeout_s: float = Field(600.0, gt=0.0)
    """Of one request."""
    retries: int = Field(3, ge=0)
    """Further attempts after a connection that failed or a server that was busy."""
    ready_timeout_s: float = Field(60.0, gt=0.0)
    """How long the server, or the head server, may take to be there when a run begins."""
    max_concurrency: int = Field(64, ge=1)
    """Requests at once."""
    policy_base_url: str | None = None
    """OpenAI-compatible endpoint of the policy, told to the server; by default the run's own, where it has one."""
    policy_model_name: str = "policy"
    """Name of the policy at its endpoint, told to the server."""

    @model_validator(mode="after")
    def _one_way_there(self) -> RemoteConfig:
        hints = []
        if self.url is None and self.head_server is None:
            hints = ["url=http://HOST:PORT", "head_server.host=127.0.0.1"]
        elif self.url is not None and self.head_server is not None:
            hints = ["url=null", "head_server=null"]
        elif self.url is not None and self.server_name is not None:
            hints = ["server_name=null"]
        if hints:
            text = "give url, or head_server and perhaps the server_name that is looked up there"
            raise PydanticCustomError("one_of", text, {"hints": hints})
        return self


@dataclass
class _Opened:
    """A session at a server."""

    client: JsonClient
    cookies: str | None


class RemoteEnvironment(Environment):
    """See the module docstring."""

    name: ClassVar[str] = "remote"
    config_class = RemoteConfig
    config: RemoteConfig

    def _setup(self) -> None:
        self.reward_range = (self.config.reward_low, self.config.reward_high)
        self.judges_groups = self.config.judges_groups  # type: ignore[misc]
        head, ready_s = self.config.head_server, self.config.ready_timeout_s
        self._head = None if head is None else HeadServer(head, ready_timeout_s=ready_s, retries=self.config.retries)
        self._clients: dict[str, JsonClient] = {}
        self._policy: dict[str, str] = {}
        """What servers are told of the policy's endpoint, under NeMo-Gym's names."""
        if (url := self.config.policy_base_url) is not None:
            self._policy = {"policy_base_url": url, "policy_model_name": self.config.policy_model_name}

    async def start(self) -> None:
        """Wait for the server, or for the head server that knows it."""
        if self._head is not None:
            await self._head.load()
            return
        client = self._client_at(str(self.config.url))
        try:
            await client.wait_ready(self.config.ready_timeout_s)
        except ServerUnreachableError as error:
            raise _lost(client, error) from error

    async def close(self) -> None:
        """Close the clients."""
        for client in self._clients.values():
            client.close()

    def check_resources(self, row: Row) -> None:
        """The head server must know where the row goes."""
        self._client_of(row)

    def _client_at(self, url: str) -> JsonClient:
        if url not in self._clients:
            known = {name: getattr(self.config, name) for name in ("timeout_s", "retries", "max_concurrency")}
            self._clients[url] = JsonClient(url, **known)
        return self._clients[url]

    def _client_of(self, row: Row) -> JsonClient:
        """A client of the server that a row goes to."""
        if self._head is None:
            return self._client_at(str(self.config.url))
        name = self.config.server_name or lookup(row, "agent_ref.name")
        kind = "agents" if self.runs_agent else "resources servers, or agents that use one"
        expected = f"server_name=NAME, or here one of the {kind} of {self._head.url}"
        if name is None:
            raise RowError("agent_ref.name", expected, "nothing")
        try:
            return self._client_at(self._head.address(str(name), AGENTS if self.runs_agent else RESOURCES))
        except UnknownServerError as error:
            known = ", ".join(error.known) or "it has none"
            raise RowError("agent_ref.name", f"{expected}: {known}", str(error)) from error

    def check_values(self, row: Row) -> None:
        """The configured fields must be there."""
        for path in self.config.row_fields:
            if lookup(row, path) is None:
                raise RowError(path, f"a value at `{path}`", "nothing")

    async def seed(self, row: Row) -> Session:
        """Open the server's session; which server it is and its cookie are the state."""
        session, client = await super().seed(row), self._client_of(row)
        try:
            answer, cookies = await client.post("/seed_session", {**row, **self._policy})
        except (ServerUnreachableError, HttpStatusError) as error:
            raise _lost(client, error) from error
        session.state = _Opened(client, cookies)
        if isinstance(answer, dict) and isinstance(answer.get("tools"), list) and answer["tools"]:
            session.tools = answer["tools"]
        return session

    async def call_tool(self, session: Session, name: str, arguments: dict[str, Any]) -> str:
        """POST the arguments to /{name}. What the server refuses is the tool's output; a dead server is an error."""
        opened: _Opened = session.state
        try:
            path = f"/{quote(name, safe='')}"
            answer, cookies = await opened.client.post(path, arguments, cookies=opened.cookies)
        except HttpStatusError as error:
            return f"error: {error}"
        except ServerUnreachableError as error:
            raise _lost(opened.client, error) from error
        opened.cookies = cookies or opened.cookies
        output = answer.get("output") if isinstance(answer, dict) and set(answer) == {"output"} else answer
        try:
            return output if isinstance(output, str) else json.dumps(output)
        except RecursionError:
            return "error: the answer is nested too deep"

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        """The server's reward; a masked or missing one is a failure."""
        opened = session.state or _Opened(self._client_of(row), None)
        body = {**row, "response": response_object(response)}
        return self._verdict(await self._judged(opened.client, "/verify", body, opened.cookies))

    async def verify_group(
        self, row: Row, responses: Sequence[Response], sessions: Sequence[Session]
    ) -> list[GradeResult]:
        """One by one, or together for an environment that judges groups."""
        if not self.judges_groups:
            return await super().verify_group(row, responses, sessions)
        body = {"row": dict(row), "responses": [response_object(response) for response in responses]}
        answer = await self._judged(self._client_of(row), "/verify_group", body)
        verdicts = answer.get("verdicts") if isinstance(answer, dict) else None
        if not isinstance(verdicts, list) or len(verdicts) != len(responses):
            return [GradeResult.failed(ENVIRONMENT_REFUSED, message="not one verdict a response") for _ in responses]
        return [self._verdict(item) for item in verdicts]

    async def _judged(self, client: JsonClient, path: str, body: Any, cookies: str | None = None) -> Any:
        """A server's answer. An error over a request may be its answer's fault (Environment); a server that is not
        there, or busy, is no answer's."""
        try:
            return (await client.post(path, body, cookies=cookies))[0]
        except HttpStatusError as error:
            raise GraderFailedError(ENVIRONMENT_REFUSED, str(error)) from error
        except ServerUnreachableError as error:
            kind = GraderFailedError if error.over_request else CannotJudgeError
            raise kind(ENVIRONMENT_UNAVAILABLE, str(error)) from error

    def _verdict(self, answer: Any) -> GradeResult:
        """A server's answer as a verdict. A reward beside a `failure` does not count; `failure_reason` only names one,
        because public servers also write there why an answer earned 0."""
        if not isinstance(answer, dict):
            return _refused("no verdict", answer)
        instance = answer.get("instance_config")
        if not isinstance(instance, dict | None):
            return _refused("instance_config", instance)
        failure, reward = answer.get("failure"), answer.get("reward")
        if failure or reward is None or answer.get("mask_sample") or (instance or {}).get("mask_sample"):
            reason = failure or answer.get("failure_kind") or answer.get("failure_reason")
            named = reason if isinstance(reason, str) else ENVIRONMENT_REFUSED
            return GradeResult.failed(named[:100], message=text_of(answer.get("details") or "", 500))
        low, high = max(self.reward_range[0], -FLOAT32_MAX), min(self.reward_range[1], FLOAT32_MAX)
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not low <= reward <= high:
            return _refused(f"reward outside [{low}, {high}]", reward)
        components = answer.get("components")
        given = components if isinstance(components, dict) else {}
        numbers = {key: value for key, value in given.items() if isinstance(value, int | float)}
        for key, value in numbers.items():
            if not abs(value) <= FLOAT32_MAX:
                return _refused(f"component {key}", value)
        numbers = {key: float(value) for key, value in numbers.items()}
        notes = notes_from(answer.get("details"))
        return GradeResult(float(reward), numbers, details={JUDGE_NOTES: notes} if notes else {})


class RemoteAgent(RemoteEnvironment):
    """remote_agent: an agent server that runs whole rollouts against the policy's endpoint.

    Settings are those of `remote`. The server answers POST /run as NeMo-Gym's agents do: given a row with
    `policy_base_url` and `policy_model_name`, the run's OpenAI-compatible endpoint, it samples as often as it likes and
    returns `{"response": {"output": [...]}, "reward": ...}`. Output items must keep the token fields that the endpoint
    put on them; they are what is trained.
    """

    name: ClassVar[str] = "remote_agent"
    runs_agent: ClassVar[bool] = True

    def check_row(self, row: Row, where: str) -> None:
        """As every environment; and there must be an endpoint for the agent to use."""
        if self.config.policy_base_url is None:
            raise ConfigError(
                "an agent needs an endpoint to sample from",
                where="policy.generation.vllm_cfg.expose_http_server",
                expected="true, or env.nemo_gym.environments.remote_agent.policy_base_url",
                found="neither",
                hints=("policy.generation.vllm_cfg.expose_http_server=true",),
            )
        super().check_row(row, where)

    async def run_agent(self, row: Row, sampling: dict[str, Any]) -> AgentRun:
        """Have the server run one rollout. A server that fails is a failure to judge, never a reward."""
        asked = {**row["responses_create_params"], **sampling}
        body = {**row, "responses_create_params": asked, **self._policy}
        try:
            answer = await self._judged(self._client_of(row), "/run", body)
        except CannotJudgeError as error:
            return AgentRun([], GradeResult.of_error(error))
        response = (answer.get("response") if isinstance(answer, dict) else None) or {}
        output = response.get("output") if isinstance(response, dict) else None
        if not isinstance(output, list) or not all(isinstance(item, dict) for item in output):
            message = f"no output items: {text_of(answer, 200)}"
            return AgentRun([], GradeResult.failed(ENVIRONMENT_REFUSED, message=message))
        return AgentRun(output, self._verdict(answer), truncated=bool(response.get("incomplete_details")))

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        """Never asked for: the verdict comes with the rollout."""
        raise AssertionError("an agent's rollout carries its own verdict")


def _lost(client: JsonClient, error: Exception) -> WorkerLostError:
    message, url = "the remote environment does not answer", client.base_url
    return WorkerLostError(message, where=url, found=str(error), hints=(f"curl {url}/",))


def _refused(what: str, found: Any) -> GradeResult:
    return GradeResult.failed(ENVIRONMENT_REFUSED, message=f"{what}: {text_of(found, 200, repr)}")
