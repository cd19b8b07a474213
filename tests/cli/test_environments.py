"""`steps env`: what there is, recorded rollouts graded again, an environment behind HTTP."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.environments.http_client import JsonClient
from nemotron_steps.environments.http_server import HttpServer, Reply, Request
from nemotron_steps.environments.loop_thread import LoopThread
from nemotron_steps.environments.registry import BUILT_IN
from nemotron_steps.environments.responses import message_item


def rollout(answer: str, reward: Any, **fields: Any) -> dict[str, Any]:
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "Which letter?"}]},
        "response": {"output": [message_item(answer)]},
        "reward": reward,
        **fields,
    }


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


KEY = {"options": [{"A": "red"}, {"B": "blue"}], "expected_answer": "B"}


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_show_tells_every_environment_as_its_class_has_it(cli, name: str) -> None:
    from nemotron_steps.environments.registry import environment_class

    shown = cli("env", "show", name, "--json").json
    loaded = environment_class(name)
    assert {each["name"] for each in shown["settings"]} == set(loaded.config_class.model_fields)
    assert set(loaded.required_fields) < set(shown["required_fields"])
    assert shown["judges_groups"] == loaded.judges_groups and shown["text"]
    assert cli("env", "show", name).code == 0


def test_verify_shows_every_difference_and_exits_with_1(cli, workplace: Path) -> None:
    file = write(
        workplace / "r.jsonl",
        rollout("\\boxed{B}", 0.0, **KEY),
        rollout("\\boxed{A}", 0.0, **KEY),
        rollout("\\boxed{B}", 1.0, mask_sample=True, **KEY),
    )
    result = cli("env", "verify", "mcqa", file)
    assert result.code == 1
    assert f"{file}:1  recorded 0, here 1" in result.out and f"{file}:3  recorded none, here 1" in result.out
    assert f"{file}:2" not in result.out
    rewards = cli("env", "verify", "mcqa", file, "--json").json["rewards"]
    assert [(each["recorded"], each["reward"], each["agrees"]) for each in rewards] == [
        (0.0, 1.0, False),
        (0.0, 0.0, True),
        (None, 1.0, False),
    ]
    assert cli("env", "verify", "mcqa", file, "--tolerance", "1").code == 1, "what was masked has no reward"
    told = cli("env", "verify", "mcqa", file, "--json").json
    assert (told["environment"], told["rollouts"], told["different"]) == ("mcqa", 3, 2)


@pytest.fixture
def judge() -> Iterator[str]:
    """The URL of an endpoint whose model finds `4` equal to `four` and nothing else."""

    async def answer(request: Request) -> Reply:
        if request.method == "GET":
            return Reply(200, {"data": [{"id": "the-judge"}]})
        body = json.loads(request.body)
        assert body["model"] == "the-judge"
        said = "[[A=B]]" if "four" in body["messages"][-1]["content"] else "[[A!=B]]"
        return Reply(200, {"choices": [{"message": {"content": said}}]})

    server, thread = HttpServer(answer), LoopThread("the-judge")
    thread.run(server.start())
    try:
        yield f"{server.url}/v1"
    finally:
        thread.run(server.stop())
        thread.stop()


def test_a_judge_is_named_by_url_and_one_that_is_missing_is_asked_for(cli, workplace: Path, judge: str) -> None:
    file = write(
        workplace / "r.jsonl",
        rollout("four", 1.0, expected_answer="4", question="2+2?"),
        rollout("five", 0.0, expected_answer="4", question="2+2?"),
    )
    missing = cli("env", "verify", "equivalence_llm_judge", file)
    assert missing.code == 2 and "--judge judge_model=http" in missing.err
    assert cli("env", "verify", "equivalence_llm_judge", file, "--judge", judge).code == 0
    assert cli("env", "verify", "equivalence_llm_judge", file, "--judge", f"judge_model={judge}").code == 0
    wrong = cli("env", "verify", "equivalence_llm_judge", file, "--judge", f"judge={judge}")
    assert wrong.code == 2 and "judge_model" in wrong.err


def test_serve_answers_on_loopback_until_it_is_told_to_stop(workplace: Path) -> None:
    command = [sys.executable, "-m", "nemotron_steps.cli.main", "env", "serve", "mcqa", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    try:
        assert process.stdout is not None
        told = ""
        while not told.endswith("}\n"):
            line = process.stdout.readline()
            assert line, "the server ended"
            told += line
        url = json.loads(told)["url"]
        assert url.startswith("http://127.0.0.1:")
        row = {**rollout("\\boxed{B}", None), **KEY}
        graded, _ = asyncio.run(JsonClient(url, retries=0).post("/verify", row))
        assert graded["reward"] == 1.0
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
