"""NeMo-Gym's documented requests against our server, and what its servers answer, read by our client.

`SimpleAgent` asks as NeMo-Gym's agent of that name does: it seeds, calls tools by name, verifies, and after each answer
keeps that answer's cookies and no others.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
from omegaconf import OmegaConf

from nemotron_steps.environments.base import (
    CannotJudgeError,
    Environment,
    EnvironmentConfig,
    GradeResult,
    Response,
    Row,
    Session,
)
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.environments.http_client import HttpStatusError, JsonClient
from nemotron_steps.environments.http_server import Reply, Request
from nemotron_steps.environments.judged.genrm_messages import verdict_text
from nemotron_steps.environments.registry import create
from nemotron_steps.environments.remote.serving import EnvironmentServer, aggregate
from nemotron_steps.environments.responses import message_item
from tests.environments.served import serving


class Ledger(Environment):
    """Adds up what its tool is called with; the reward is whether the answer is the sum."""

    name: ClassVar[str] = "ledger"
    required_fields: ClassVar[tuple[str, ...]] = ("total",)
    released: ClassVar[list[int]] = []

    async def seed(self, row: Row) -> Session:
        return Session(tools=[{"type": "function", "name": "run", "parameters": {}}], state=0)

    async def call_tool(self, session: Session, name: str, arguments: dict[str, Any]) -> str:
        session.state += arguments["by"]
        return str(session.state)

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        if response.text == "?":
            raise CannotJudgeError("riddle")
        return GradeResult(float(session.state == row["total"] and response.text == str(row["total"])))

    async def release(self, session: Session) -> None:
        self.released.append(session.state)


ROW: dict[str, Any] = {
    "responses_create_params": {"input": "Add 2 and 3.", "tools": None, "temperature": None},
    "total": 5,
    "agent_ref": {"type": "responses_api_agents", "name": "ledger_simple_agent"},
    "_ng_task_index": 0,
    "_ng_rollout_index": 1,
}


def call_item(by: int, call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "name": "run", "arguments": json.dumps({"by": by}), "call_id": call_id}


def response_of(*output: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": "r", "object": "response", "created_at": 0.0, "model": "m", "output": list(output)}


TURNS = [[call_item(2, "a")], [call_item(3, "b")], [{**message_item("5"), "generation_token_ids": [7]}]]


class SimpleAgent:
    """See the module docstring."""

    def __init__(self, url: str) -> None:
        self._client = JsonClient(url, retries=0)

    async def run(self, row: dict[str, Any], turns: list[list[dict[str, Any]]]) -> dict[str, Any]:
        _, cookies = await self._client.post("/seed_session", row)
        output: list[dict[str, Any]] = []
        for turn in turns:
            output.extend(turn)
            for item in turn:
                if item["type"] == "function_call":
                    body = json.loads(item["arguments"])
                    answer, cookies = await self._client.post(f"/{item['name']}", body, cookies=cookies)
                    output.append({"type": "function_call_output", "call_id": item["call_id"], "output": answer})
        body = {**row, "response": response_of(*output)}
        graded, _ = await self._client.post("/verify", body, cookies=cookies)
        return dict(graded)


@contextmanager
def model_server(turns: list[list[dict[str, Any]]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A model server that says the turns, whatever it is asked: as many as its input has of the model's already."""
    asked: list[dict[str, Any]] = []

    async def answer(request: Request) -> Reply:
        body = json.loads(request.body)
        asked.append({"path": request.path, **body})
        outputs = sum(item.get("type") == "function_call_output" for item in body["input"])
        return Reply(200, response_of(*turns[outputs]))

    with serving(answer) as server:
        yield f"{server.url}/v1", asked


@contextmanager
def served(environment: Environment | None = None, **options: Any) -> Iterator[EnvironmentServer]:
    with EnvironmentServer(environment or Ledger(EnvironmentConfig(), {}), **options) as server:
        yield server


def test_what_could_not_be_judged_is_masked_under_the_names_that_nemo_gym_reads() -> None:
    with served() as server:
        graded = asyncio.run(SimpleAgent(server.url).run(ROW, [[message_item("?")]]))
    assert graded["reward"] is None
    assert (graded["mask_sample"], graded["failure_kind"], graded["failure_reason"]) == (True, "riddle", "riddle")


def test_run_samples_from_the_model_server_calls_the_tools_and_grades() -> None:
    Ledger.released.clear()
    with model_server(TURNS) as (model_url, asked), served(model_url=model_url) as server:
        graded, _ = asyncio.run(JsonClient(server.url, retries=0).post("/run", ROW))
    assert graded["reward"] == 1.0
    kinds = [item["type"] for item in graded["response"]["output"]]
    assert kinds == ["function_call", "function_call_output"] * 2 + ["message"]
    assert graded["response"]["output"][-1]["generation_token_ids"] == [7]
    assert [item["path"] for item in asked] == ["/v1/responses"] * 3
    assert asked[0]["input"] == [{"type": "message", "role": "user", "content": "Add 2 and 3."}]
    assert asked[0]["tools"][0]["name"] == "run" and "temperature" not in asked[0]
    assert [item.get("output") for item in asked[2]["input"]][-1] == "5"
    assert Ledger.released == [5]


def test_run_without_a_model_server_and_with_a_dead_one_is_an_error_not_a_reward() -> None:
    Ledger.released.clear()
    with served() as server:
        client = JsonClient(server.url, retries=0)
        with pytest.raises(HttpStatusError, match="no model server") as caught:
            asyncio.run(client.post("/run", ROW))
        assert caught.value.status == 400
        options = {"url": server.url, "retries": 0, "policy_base_url": server.url + "/v1"}
        agent = EnvironmentSet({"remote_agent": options}, {}, only="remote_agent").get("remote_agent")
        run = asyncio.run(agent.run_agent(ROW, {}))
    assert run.verdict.reward is None and run.verdict.failure in ("environment_refused", "environment_unavailable")
    assert Ledger.released == [0]


def test_the_head_server_says_where_environment_agent_and_model_are() -> None:
    with served(model_url="http://10.0.0.7:8000/v1", agent="my_agent") as server:
        client = JsonClient(server.url, retries=0)
        url = server.url
        # NeMo-Gym's client decodes the answer as JSON, and what it finds as YAML with OmegaConf.
        config: Any = OmegaConf.create(asyncio.run(client.get("/global_config_dict_yaml")))
        instances = asyncio.run(client.get("/server_instances"))

    def address(name: str) -> str:
        """As NeMo-Gym finds a server: the first entry of the first entry below its name."""
        first = next(iter(config[name].values()))
        found = next(iter(first.values()))
        return f"http://{found['host']}:{found['port']}"

    assert address("ledger") == address("my_agent") == url
    assert address("policy_model") == "http://10.0.0.7:8000"
    agent = config["my_agent"]["responses_api_agents"]["simple_agent"]
    assert agent["resources_server"] == {"type": "resources_servers", "name": "ledger"}
    assert agent["model_server"] == {"type": "responses_api_models", "name": "policy_model"}
    assert [(each["process_name"], each["server_type"], each["name"], each["url"]) for each in instances] == [
        ("ledger", "resources_servers", "ledger", url),
        ("my_agent", "responses_api_agents", "simple_agent", url),
    ]
    documented = {"host", "port", "pid", "entrypoint", "config_path", "start_time"}
    assert all(documented <= set(each) for each in instances)


def test_aggregate_metrics_describes_each_task_and_all_of_them() -> None:
    answers = [
        {"_ng_task_index": task, "reward": reward, "response": {"usage": {"output_tokens": 10}}, "passed": reward > 0}
        for task, reward in ((0, 1.0), (0, 0.0), (1, 1.0))
    ]
    answers.append({"_ng_task_index": 1, "reward": 0.0, "mask_sample": True})
    answers.append({"_ng_task_index": 2, "reward": None})
    with served() as server:
        metrics, _ = asyncio.run(JsonClient(server.url).post("/aggregate_metrics", {"verify_responses": answers}))
    assert [(each["_ng_task_index"], each["mean/reward"]) for each in metrics["group_level_metrics"]] == [
        (0, 0.5),
        (1, 1.0),
    ]
    assert metrics["agent_metrics"]["mean/reward"] == pytest.approx(2 / 3)
    assert metrics["agent_metrics"]["std/reward"] == pytest.approx(0.57735, abs=1e-5)
    assert metrics["agent_metrics"]["masked"] == 2
    assert metrics["key_metrics"] == {"mean/passed": pytest.approx(2 / 3), "mean/reward": pytest.approx(2 / 3)} | {
        "mean/output_tokens": 10.0
    }
    assert aggregate([]) == {"group_level_metrics": [], "agent_metrics": {}, "key_metrics": {}}


def test_verify_waits_for_the_whole_group_where_an_environment_judges_groups(scripted: Callable[..., Any]) -> None:
    judge = scripted(lambda m: verdict_text(5, 1, 1) if m[-2]["content"] == "good" else verdict_text(1, 5, 6))
    environment = create("genrm_compare", {}, {"genrm_model": judge})

    async def ask(url: str) -> tuple[list[float], bool]:
        agent = SimpleAgent(url)
        row = {"responses_create_params": {"input": "Hi."}, "_ng_task_index": 3}
        other = asyncio.ensure_future(agent.run({**row, "_ng_task_index": 4}, [[message_item("good")]]))
        answers = await asyncio.gather(*(agent.run(row, [[message_item(text)]]) for text in ("good", "bad", "bad")))
        waits = not other.done()
        other.cancel()
        return [answer["reward"] for answer in answers], waits

    with served(environment, group_size=3) as server:
        rewards, waits = asyncio.run(ask(server.url))
        until = time.monotonic() + 5
        while server._groups and time.monotonic() < until:
            time.sleep(0.01)
        assert server._groups == {}, "nothing is kept of a group whose clients are gone"
    assert sorted(rewards) == [1.0, 3.0, 5.0] and rewards[0] == 5.0
    assert waits, "a rollout of another prompt is not judged with them"


def test_verify_alone_replays_the_tools_of_a_recorded_rollout() -> None:
    sent = {"recipient": "ann@example.com", "subject": "Hello", "body": "See you."}
    call = {"name": "email_send_email", "arguments": json.dumps(sent)}
    row = {"responses_create_params": {"input": "Write to Ann."}, "ground_truth": [call]}
    done = response_of({"type": "function_call", "call_id": "c", **call}, message_item("Done."))
    environment = create("workplace_assistant")
    environment.check_row_with_resources(row, "row:1")
    with served(environment) as server:
        client = JsonClient(server.url, retries=0)
        graded, _ = asyncio.run(client.post("/verify", {**row, "response": done}))
        idle, _ = asyncio.run(client.post("/verify", {**row, "response": response_of(message_item("Done."))}))
    assert (graded["reward"], idle["reward"]) == (1.0, 0.0)
