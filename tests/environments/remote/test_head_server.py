"""A running NeMo-Gym, found through its head server: real sockets, its documented config and requests."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nemotron_steps.environments.base import Environment, EnvironmentConfig, Response
from nemotron_steps.environments.http_server import Reply, Request
from nemotron_steps.environments.registry import create
from nemotron_steps.environments.remote.head_server import (
    GLOBAL_CONFIG,
    RESOURCES,
    HeadServer,
    HeadServerConfig,
)
from nemotron_steps.environments.remote.serving import EnvironmentServer
from nemotron_steps.environments.responses import message_item
from nemotron_steps.errors import ConfigError, DataError, WorkerLostError
from tests.environments.remote.test_nemo_gym import ROW, Ledger
from tests.environments.served import serving

CONFIG = """
head_server: {host: 127.0.0.1, port: 11000}
policy_base_url: http://127.0.0.1:8000/v1
sums:
  resources_servers:
    ledger: {entrypoint: app.py, domain: agent, host: %s, port: %d}
ledger_simple_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      host: %s
      port: %d
      resources_server: {type: resources_servers, name: sums}
      model_server: {type: responses_api_models, name: policy_model}
policy_model:
  responses_api_models:
    vllm_model: {entrypoint: app.py, host: 127.0.0.1, port: 8000}
"""


@contextmanager
def head(answer: Any) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """A head server on a port of its own: its settings, and the paths that it was asked for."""
    asked: list[str] = []

    async def reply(request: Request) -> Reply:
        asked.append(request.path)
        known = {"/": {"status": "ok"}, GLOBAL_CONFIG: answer}
        return Reply(200, known[request.path]) if request.path in known else Reply(404, {})

    with serving(reply) as server:
        yield {"host": "127.0.0.1", "port": int(server.url.rpartition(":")[2])}, asked


@contextmanager
def gym(host: str = "127.0.0.1") -> Iterator[tuple[dict[str, Any], list[str]]]:
    with EnvironmentServer(Ledger(EnvironmentConfig(), {})) as server:
        port = int(server.url.rpartition(":")[2])
        with head(CONFIG % (host, port, host, port)) as running:
            yield running


async def rollout(environment: Environment, row: dict[str, Any]) -> float | None:
    await environment.start()
    session = await environment.seed(row)
    for by in (2, 3):
        await environment.call_tool(session, "run", {"by": by})
    (verdict,) = await environment.judge_group(row, [Response.from_output([message_item("5")])], [session])
    await environment.close()
    return verdict.reward


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])  # the second: reached where the head server is
def test_a_resources_server_is_found_by_the_agent_that_the_row_names(host: str) -> None:
    with gym(host) as (settings, asked):
        environment = create("remote", {"head_server": settings, "retries": 0})
        environment.check_row_with_resources(ROW, "rows.jsonl:1")
        assert asyncio.run(rollout(environment, ROW)) == 1.0
    assert asked.count("/global_config_dict_yaml") == 1


def test_an_agent_server_is_found_by_the_agent_that_the_row_names() -> None:
    async def run(request: Request) -> Reply:
        assert request.path == "/run"
        return Reply(200, {"response": {"output": [message_item("5")]}, "reward": 1.0})

    with serving(run) as server:
        port = int(server.url.rpartition(":")[2])
        with head(CONFIG % ("127.0.0.1", 1, "127.0.0.1", port)) as (settings, _):
            agent = create("remote_agent", {"head_server": settings, "policy_base_url": "http://127.0.0.1:1/v1"})
            agent.check_row_with_resources(ROW, "rows.jsonl:1")
            assert asyncio.run(agent.run_agent(ROW, {})).verdict.reward == 1.0


def test_a_row_of_an_unknown_agent_is_refused_before_the_first_rollout() -> None:
    row = {**ROW, "agent_ref": {"type": "responses_api_agents", "name": "sums"}}
    with gym() as (settings, _):
        options = {"head_server": settings, "policy_base_url": "http://127.0.0.1:1/v1"}
        with pytest.raises(DataError) as caught:
            create("remote_agent", options).check_row_with_resources(row, "rows.jsonl:7")
    assert caught.value.where == "rows.jsonl:7 field agent_ref.name"
    assert str(caught.value.expected).endswith(": ledger_simple_agent")


def test_no_head_server_is_an_error_and_no_failed_rollout() -> None:
    with head("") as (settings, _):
        pass
    environment = create("remote", {"head_server": settings, "retries": 0, "ready_timeout_s": 0.2})
    with pytest.raises(WorkerLostError, match="head server of NeMo-Gym does not answer"):
        environment.check_row_with_resources(ROW, "f:1")
    with pytest.raises(WorkerLostError):
        asyncio.run(environment.start())


@pytest.mark.parametrize(
    "answer",
    [
        "a: [",
        "a: " + "[" * 5000,
        CONFIG % ("${host}", 1, "${host}", 1),
        CONFIG % ("127.0.0.1", 65536, "127.0.0.1", 1),
        f"sums: {{resources_servers: {{ledger: {{host: 127.0.0.1, port: 0x{'f' * 9999}}}}}}}",
    ],
)
def test_a_config_that_does_not_say_where_the_server_is_is_refused(answer: Any) -> None:
    with head(answer) as (settings, _):
        found = HeadServer(HeadServerConfig(**settings), ready_timeout_s=10.0, retries=0)
        with pytest.raises(ConfigError, match="does not say where") as caught:
            found.address("sums", RESOURCES)
    assert caught.value.hints == (f"curl http://127.0.0.1:{settings['port']}/global_config_dict_yaml",)


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({}, "env.nemo_gym.environments.remote.url=http://HOST:PORT"),
        (
            {"url": "http://127.0.0.1:1", "head_server": {}},
            "env.nemo_gym.environments.remote.head_server=null",
        ),
        ({"url": "http://127.0.0.1:1", "server_name": "x"}, "env.nemo_gym.environments.remote.server_name=null"),
    ],
)
def test_a_remote_environment_has_one_way_to_its_server(settings: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        create("remote", settings)
    assert hint in caught.value.hints
