"""An agent outside of the run samples through its endpoint; what it brings back is trained."""

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from nemotron_steps.engine.grpo.loop import train
from nemotron_steps.errors import ConfigError
from tests.engine.grpo import grpo_runs
from tests.engine.serving.taught_model import MAX_LENGTH, QUESTION, TOOL


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def added_by(arguments: str) -> int:
    """What the model asks to add; 0 for what it makes up otherwise, as it samples freely."""
    try:
        by = json.loads(arguments).get("by")
    except (ValueError, AttributeError):
        by = None
    return by if type(by) is int else 0


def tool_agent(row: dict[str, Any]) -> dict[str, Any]:
    """What an agent framework does: ask, run the tools, ask again; reward by the answer."""
    asked = {**row["responses_create_params"], "model": row["policy_model_name"]}
    items, output, total = list(asked["input"]), [], 0
    for _ in range(4):
        turn = post(f"{row['policy_base_url']}/responses", {**asked, "input": items})["output"]
        output += turn
        items += turn
        calls = [item for item in turn if item["type"] == "function_call"]
        if not calls:
            break
        for call in calls:
            total += added_by(call["arguments"])
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": f"now {total}"}
            output.append(result)
            items.append(result)
    text = "".join(part["text"] for item in output if item["type"] == "message" for part in item["content"])
    return {"response": {"output": output}, "reward": float(text == f"It is {total}.")}


@contextmanager
def agent_server(run: Callable[[dict[str, Any]], Any]):
    """An agent server: POST /run, and nothing else."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(200, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                self._reply(200, run(body)) if self.path == "/run" else self._reply(404, {})
            except ValueError as error:
                self._reply(422, {"error": str(error)})

        def _reply(self, status: int, answer: Any) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def start(taught, work, agent_url, records, *, expose=True, **changes):
    rows = work / "rows.jsonl"
    row = {
        "responses_create_params": {"input": [QUESTION], "tools": [TOOL]},
        "agent_ref": {"type": "responses_api_agents", "name": "remote_agent"},
    }
    rows.write_text((json.dumps(row) + "\n") * 4)
    config = grpo_runs.config_of(
        taught,
        3,
        grpo__num_prompts_per_step=2,
        grpo__num_generations_per_prompt=4,
        policy__max_total_sequence_length=MAX_LENGTH,
        policy__megatron_cfg={"optimizer": {"lr": 1e-5}},
        policy__generation={"max_new_tokens": 100, "vllm_cfg": {"expose_http_server": expose}},
        env={"nemo_gym": {"environments": {"remote_agent": {"url": agent_url, "retries": 0}}}},
        data__train__data_path=str(rows),
        checkpointing={"enabled": False},
        **changes,
    )
    run = grpo_runs.start(config, work, records)
    run.sampled, run.groups = [], []
    step, collect_group = run.generator.step, run.collector.collect_group

    def recording_step():
        finished = step()
        run.sampled.extend(finished)
        return finished

    async def recording_collect(*args, **kwargs):
        group = await collect_group(*args, **kwargs)
        run.groups.append(group)
        return group

    run.generator.step, run.collector.collect_group = recording_step, recording_collect
    return run


def check_tokens(run, chat):
    """Every trained token, its logprob and its version are what the generator sampled; everything else is context."""
    sampled = {(tuple(c.token_ids), tuple(c.logprobs), tuple(c.weight_versions)) for c in run.sampled}
    for rollout in (r for group in run.groups for r in group.rollouts):
        assert rollout.failure is None, rollout
        taken = 0
        for start, end in rollout.turns:
            versions = tuple(rollout.weight_versions[taken : taken + end - start])
            assert (tuple(rollout.token_ids[start:end]), tuple(rollout.logprobs[start:end]), versions) in sampled
            taken += end - start
        inside = {t for start, end in rollout.turns for t in range(start, end)}
        assert [bool(m) for m in rollout.token_mask] == [t in inside for t in range(len(rollout.token_ids))]
        assert all(rollout.logprobs[t] == 0.0 for t in range(len(rollout.token_ids)) if t not in inside)


def test_an_agents_rollouts_are_the_generators_own_tokens_and_train(taught, chat, tmp_path):
    records: list[Any] = []
    with agent_server(tool_agent) as url:
        run = start(taught, tmp_path, url, records)
        asyncio.run(run.collector.environments.start())
        train(run)
        run.close()
    (event,) = grpo_runs.events_of(records, "policy_endpoint")
    assert event["url"].startswith("http://127.0.0.1:") and event["model"] == "policy"
    check_tokens(run, chat)
    rollouts = [r for group in run.groups for r in group.rollouts]
    assert len(rollouts) == 3 * 2 * 4
    two_turns = [r for r in rollouts if len(r.turns) == 2]
    assert len(two_turns) > 3 and any("now 2" in chat.decode(r.token_ids) for r in two_turns)  # sampled without a seed
    assert {r.reward for r in rollouts} <= {0.0, 1.0} and any(r.reward for r in rollouts)
    # The weights that sampled are the newest ones, and training recomputes the same logprobs from the same tokens.
    assert [set(group.rollouts[0].weight_versions) for group in run.groups] == [{0}, {0}, {1}, {1}, {2}, {2}]
    metrics = grpo_runs.metrics_of(records)
    assert len(metrics) == 3 and max(m["token_mult_prob_error"] for m in metrics) < 1 + 1e-4
    with pytest.raises(OSError):
        post(f"{event['url']}/responses", {"input": "x"})


def test_an_agent_without_an_endpoint_is_refused_before_training(taught, tmp_path):
    with agent_server(tool_agent) as url, pytest.raises(ConfigError) as caught:
        start(taught, tmp_path, url, [], expose=False)
    assert caught.value.hints == ("policy.generation.vllm_cfg.expose_http_server=true",)


def test_requests_made_while_the_policy_trains_are_answered_by_the_next_weights(taught, tmp_path):
    records: list[Any] = []
    answers: list[Any] = []
    with agent_server(tool_agent) as url:
        run = start(taught, tmp_path, url, records)
        (event,) = grpo_runs.events_of(records, "policy_endpoint")
        base = event["url"].removesuffix("/v1")
        with pytest.raises(urllib.error.HTTPError, match="503"):  # nothing samples yet
            urllib.request.urlopen(f"{base}/health", timeout=10)
        body = {"messages": [QUESTION], "return_token_ids": True, "max_tokens": 4}
        asking: list[threading.Thread] = []
        train_step = run.policy.train_step

        def train_and_ask(batch):
            if not asking:
                with urllib.request.urlopen(f"{base}/health", timeout=10) as health:
                    assert json.load(health)["weight_version"] == 0
                ask = threading.Thread(target=lambda: answers.append(post(f"{base}/v1/chat/completions", body)))
                asking.append(ask)
                ask.start()
                ask.join(0.3)
                assert ask.is_alive()  # waiting for the run to sample again
            return train_step(batch)

        run.policy.train_step = train_and_ask
        asyncio.run(run.collector.environments.start())
        train(run)
        asking[0].join(10)
        run.close()
    assert set(answers[0]["choices"][0]["weight_versions"]) == {1}
