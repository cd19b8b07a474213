"""remote_agent: an agent server that runs whole rollouts against the policy's endpoint.

It is used by `url`, or found through the `head_server` of a running NeMo-Gym: the one that the row's agent_ref names.

The server answers POST /run as NeMo-Gym's agents do: given a row, it samples from the policy as often as it likes,
uses whatever tools it has, and returns `{"response": {"output": [...]}, "reward": ...}`. The row it gets also names
`policy_base_url` and `policy_model_name`: the OpenAI-compatible endpoint of the run that asks. Output items must keep
the token fields that the endpoint put on them; they are what is trained.
"""

from __future__ import annotations

from typing import Any, ClassVar

from nemotron_steps.environments.base import AgentRun, GradeResult, Response, Row, Session
from nemotron_steps.environments.http_client import HttpStatusError, ServerUnreachableError
from nemotron_steps.environments.remote.remote import ENVIRONMENT_REFUSED, RemoteEnvironment, no_verdict
from nemotron_steps.environments.responses import text_of
from nemotron_steps.errors import ConfigError


class RemoteAgent(RemoteEnvironment):
    """See the module docstring. Settings are those of `remote`."""

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
        body = {**row, "responses_create_params": asked, **self.policy_fields()}
        try:
            answer, _ = await self._client_of(row).post("/run", body)
        except (ServerUnreachableError, HttpStatusError) as error:
            return AgentRun([], GradeResult.of_error(no_verdict(error)))
        response = (answer.get("response") if isinstance(answer, dict) else None) or {}
        output = response.get("output") if isinstance(response, dict) else None
        if not isinstance(output, list) or not all(isinstance(item, dict) for item in output):
            return AgentRun(
                [], GradeResult.failed(ENVIRONMENT_REFUSED, message=f"no output items: {text_of(answer, 200)}")
            )
        return AgentRun(output, self._verdict(answer), truncated=bool(response.get("incomplete_details")))

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        """Never asked for: the verdict comes with the rollout."""
        raise AssertionError("an agent's rollout carries its own verdict")
