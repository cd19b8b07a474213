"""remote: any NeMo-Gym resources server, or this package's own environment server, as an environment."""

import json
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import quote

from pydantic import Field

from nemotron_steps.environments.base import (
    FLOAT32_MAX,
    VERIFIER_CRASHED,
    VERIFIER_TIMEOUT,
    VERIFY_FAILED,
    AgentRun,
    Environment,
    EnvironmentConfig,
    GradeResult,
    Row,
    Session,
    lookup,
)
from nemotron_steps.environments.failures import CannotJudgeError, GraderFailedError, RowError
from nemotron_steps.environments.http_client import HttpStatusError, JsonClient, ServerUnreachableError
from nemotron_steps.environments.judged.judge_transcripts import JUDGE_NOTES, notes_from
from nemotron_steps.environments.responses import Response, response_object, text_of
from nemotron_steps.errors import ConfigError, WorkerLostError

ENVIRONMENT_UNAVAILABLE = "environment_unavailable"
ENVIRONMENT_REFUSED = "environment_refused"


class RemoteConfig(EnvironmentConfig):
    """Settings."""

    url: str
    """Of the server."""
    reward_low: float = 0.0
    """The least that the server gives."""
    reward_high: float = 1.0
    """Rewards outside of [reward_low, reward_high] are refused."""
    row_fields: tuple[str, ...] = ()
    """Dotted paths the server needs in every row, checked before the first rollout."""
    timeout_s: float = Field(600.0, gt=0.0)
    """Of one request."""
    retries: int = Field(3, ge=0)
    """Further attempts after a connection that failed or a server that was busy."""
    ready_timeout_s: float = Field(60.0, gt=0.0)
    """How long the server may take to be there when a run begins."""
    max_concurrency: int = Field(64, ge=1)
    """Requests at once."""
    policy_base_url: str | None = None
    """OpenAI-compatible endpoint of the policy, told to the server; by default the run's own, where it has one."""
    policy_model_name: str = "policy"
    """Name of the policy at its endpoint, told to the server."""


@dataclass
class _Opened:
    """A session at the server."""

    cookies: str | None


class RemoteEnvironment(Environment):
    """See the module docstring."""

    name: ClassVar[str] = "remote"
    config_class = RemoteConfig
    config: RemoteConfig

    def _setup(self) -> None:
        config = self.config
        self.reward_range = (config.reward_low, config.reward_high)
        self.client = JsonClient(
            config.url, timeout_s=config.timeout_s, retries=config.retries, max_concurrency=config.max_concurrency
        )
        self._policy: dict[str, str] = {}
        """What the server is told of the policy's endpoint, under NeMo-Gym's names."""
        if config.policy_base_url is not None:
            self._policy["policy_base_url"] = config.policy_base_url
            self._policy["policy_model_name"] = config.policy_model_name

    async def start(self) -> None:
        try:
            await self.client.wait_ready(self.config.ready_timeout_s)
        except ServerUnreachableError as error:
            raise self._lost(error) from error

    async def close(self) -> None:
        self.client.close()

    def check_values(self, row: Row) -> None:
        for path in self.config.row_fields:
            if lookup(row, path) is None:
                raise RowError(path, f"a value at `{path}`", "nothing")

    async def seed(self, row: Row) -> Session:
        session = await super().seed(row)
        try:
            answer, cookies = await self.client.post("/seed_session", {**row, **self._policy})
        except (ServerUnreachableError, HttpStatusError) as error:
            raise self._lost(error) from error
        session.state = _Opened(cookies)
        if isinstance(answer, dict) and isinstance(answer.get("tools"), list) and answer["tools"]:
            session.tools = answer["tools"]
        return session

    async def call_tool(self, session: Session, name: str, arguments: dict[str, Any]) -> str:
        """POST the arguments to /{name}. What the server refuses is the tool's output; a dead server is an error."""
        opened: _Opened = session.state
        try:
            path = f"/{quote(name, safe='')}"
            answer, cookies = await self.client.post(path, arguments, cookies=opened.cookies)
        except HttpStatusError as error:
            return f"error: {error}"
        except ServerUnreachableError as error:
            raise self._lost(error) from error
        opened.cookies = cookies or opened.cookies
        output = answer.get("output") if isinstance(answer, dict) and set(answer) == {"output"} else answer
        try:
            return output if isinstance(output, str) else json.dumps(output)
        except RecursionError:
            return "error: the answer is nested too deep"

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        cookies = session.state.cookies if session.state else None
        body = {**row, "response": response_object(response)}
        verdict = self._verdict(await self._judged("/verify", body, cookies))
        if verdict.failure in (VERIFIER_CRASHED, VERIFIER_TIMEOUT, VERIFY_FAILED):
            raise GraderFailedError(verdict.failure, str(verdict.details.get("message", "")))
        return verdict

    def _lost(self, error: Exception) -> WorkerLostError:
        message, url = "the remote environment does not answer", self.config.url
        return WorkerLostError(message, where=url, found=str(error), hints=(f"curl {url}/",))

    async def _judged(self, path: str, body: Any, cookies: str | None = None) -> Any:
        """A server's answer. A request that is refused may be its answer's fault (Environment)."""
        try:
            return (await self.client.post(path, body, cookies=cookies))[0]
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
        if any(not abs(value) <= FLOAT32_MAX for value in numbers.values()):
            return _refused("components", numbers)
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
        if self.config.policy_base_url is None:
            key = "policy.generation.vllm_cfg.expose_http_server"
            expected = "true, or env.nemo_gym.environments.remote_agent.policy_base_url"
            what = "an agent needs an endpoint to sample from"
            raise ConfigError(what, where=key, expected=expected, found="neither", hints=(f"{key}=true",))
        super().check_row(row, where)

    async def run_agent(self, row: Row, sampling: dict[str, Any]) -> AgentRun:
        """Have the server run one rollout. A server that fails is a failure to judge, never a reward."""
        asked = {**row["responses_create_params"], **sampling}
        body = {**row, "responses_create_params": asked, **self._policy}
        try:
            answer = await self._judged("/run", body)
        except CannotJudgeError as error:
            return AgentRun([], GradeResult.of_error(error))
        response = (answer.get("response") if isinstance(answer, dict) else None) or {}
        output = response.get("output") if isinstance(response, dict) else None
        if not isinstance(output, list) or not all(isinstance(item, dict) for item in output):
            message = f"no output items: {text_of(answer, 200)}"
            return AgentRun([], GradeResult.failed(ENVIRONMENT_REFUSED, message=message))
        return AgentRun(output, self._verdict(answer), truncated=bool(response.get("incomplete_details")))

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        raise AssertionError("an agent's rollout carries its own verdict")


def _refused(what: str, found: Any) -> GradeResult:
    return GradeResult.failed(ENVIRONMENT_REFUSED, message=f"{what}: {text_of(found, 200, repr)}")
