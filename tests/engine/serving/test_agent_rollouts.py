"""An agent outside of the run samples through its endpoint; what it brings back is trained."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from nemotron_steps.config.schema.eval import EvalConfig
from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.grpo.async_loop import train_async
from nemotron_steps.engine.grpo.loop import train
from nemotron_steps.engine.placement.run import build_run
from nemotron_steps.engine.rollouts.collector import RolloutCollector, StragglerError
from nemotron_steps.engine.rollouts.data import PromptRow, read_rows
from nemotron_steps.engine.rollouts.turns import BROKEN_TOKENS, BrokenTokensError, trajectory_of
from nemotron_steps.engine.setup.rows import RunRows
from nemotron_steps.engine.types import SamplingParams
from nemotron_steps.environments.base import AgentRun, Environment, EnvironmentConfig, GradeResult
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.errors import ConfigError, JudgeUnavailableError, StepsError
from nemotron_steps.runs.context import Tracker, plain_context
from nemotron_steps.steps import evaluation
from tests.engine.rollouts.scripted import cut_once
from tests.engine.serving.taught_model import MAX_LENGTH, QUESTION, TOOL, embedded


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


def start(taught, work, agent_url, records, *, expose=True, **grpo):
    rows = work / "rows.jsonl"
    row = {
        "responses_create_params": {"input": [QUESTION], "tools": [TOOL]},
        "agent_ref": {"type": "responses_api_agents", "name": "remote_agent"},
    }
    rows.write_text((json.dumps(row) + "\n") * 4)
    config = RlConfig.model_validate(
        {
            "grpo": {
                "num_prompts_per_step": 2,
                "num_generations_per_prompt": 4,
                "max_num_steps": 3,
                "max_num_epochs": 9,
                **grpo,
            },
            "loss_fn": {
                "force_on_policy_ratio": True,
                "use_importance_sampling_correction": "async_grpo" in grpo,
            },
            "policy": {
                "checkpoint": str(taught),
                "precision": "float32",
                "max_total_sequence_length": MAX_LENGTH,
                "megatron_cfg": {"optimizer": {"lr": 1e-5}},
                "generation": {"max_new_tokens": 100, "temperature": 1.0, "vllm_cfg": {"expose_http_server": expose}},
            },
            "env": {"nemo_gym": {"environments": {"remote_agent": {"url": agent_url, "retries": 0}}}},
            "data": {"train": {"data_path": str(rows)}},
            "checkpointing": {"enabled": False},
        }
    )
    tracker = Tracker("test", None, records.append)
    run, environments = build_run(
        config, RunRows(read_rows(rows)), work=work, started=time.monotonic(), reporter=tracker
    )
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
    return run, environments


def metrics_of(records):
    return [r["values"] for r in records if r["kind"] == "metrics"]


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
        run, environments = start(taught, tmp_path, url, records)
        asyncio.run(environments.start())
        train(run)
        run.close()
    (event,) = [r["fields"] for r in records if r["kind"] == "event" and r["name"] == "policy_endpoint"]
    assert event["url"].startswith("http://127.0.0.1:") and event["model"] == "policy"
    check_tokens(run, chat)
    rollouts = [r for group in run.groups for r in group.rollouts]
    assert len(rollouts) == 3 * 2 * 4
    two_turns = [r for r in rollouts if len(r.turns) == 2]
    assert len(two_turns) > 3 and any("now 2" in chat.decode(r.token_ids) for r in two_turns)  # sampled without a seed
    assert {r.reward for r in rollouts} <= {0.0, 1.0} and any(r.reward for r in rollouts)
    # The weights that sampled are the newest ones, and training recomputes the same logprobs from the same tokens.
    assert [set(group.rollouts[0].weight_versions) for group in run.groups] == [{0}, {0}, {1}, {1}, {2}, {2}]
    metrics = metrics_of(records)
    assert len(metrics) == 3 and max(m["token_mult_prob_error"] for m in metrics) < 1 + 1e-4
    with pytest.raises(OSError):
        post(f"{event['url']}/responses", {"input": "x"})


def test_agents_beside_asynchronous_training(taught, chat, tmp_path):
    records: list[Any] = []
    with agent_server(tool_agent) as url:
        run, environments = start(taught, tmp_path, url, records, async_grpo={"enabled": True})
        asyncio.run(environments.start())
        train_async(run)
        run.close()
    check_tokens(run, chat)
    metrics = metrics_of(records)
    assert len(metrics) == 3 and max(m["async/policy_lag_max"] for m in metrics) <= 1


@pytest.mark.parametrize("kind", ["no_tokens", "refused", "no_output", "unjudged"])
def test_a_rollout_that_cannot_be_trained_is_masked_not_scored(taught, tmp_path, kind):
    def broken(row):
        answer = tool_agent(row)
        if kind == "no_tokens":
            for item in answer["response"]["output"]:
                item.pop("generation_token_ids", None)
        elif kind == "refused":
            raise ValueError("no")
        elif kind == "no_output":
            del answer["response"]
        else:
            answer["reward"] = None
        return answer

    expected = {"no_tokens": BROKEN_TOKENS}.get(kind, "environment_refused")
    with agent_server(broken) as url:
        run, _ = start(taught, tmp_path, url, [])
        with pytest.raises(StepsError, match="could be graded") as caught:
            train(run)
        run.close()
    assert not isinstance(caught.value, JudgeUnavailableError)
    assert {r.failure for group in run.groups for r in group.rollouts} == {expected}
    assert all(r.token_mask == [0] for group in run.groups for r in group.rollouts)


def test_an_agent_without_an_endpoint_is_refused_before_training(taught, tmp_path):
    with agent_server(tool_agent) as url, pytest.raises(ConfigError) as caught:
        start(taught, tmp_path, url, [], expose=False)
    assert caught.value.hints == ("policy.generation.vllm_cfg.expose_http_server=true",)


def turn(prompt, generated, **fields):
    return {
        "type": "message",
        "prompt_token_ids": prompt,
        "generation_token_ids": generated,
        "generation_log_probs": [-0.5] * len(generated),
        **fields,
    }


PARAMS = SamplingParams(max_new_tokens=8)


def test_a_turn_that_a_stop_token_or_string_ended_is_not_truncated(chat):
    eos, other = chat.tokenizer.eos_token_id, chat.tokenizer.eos_token_id - 1
    said = chat.tokenizer.encode("It is 2.", add_special_tokens=False)

    def truncated(*ids, **stops):
        run = AgentRun([turn([5, 6], list(ids))], GradeResult(1.0))
        return trajectory_of(run, chat, 7, SamplingParams(max_new_tokens=8, **stops)).truncated

    assert [truncated(7, eos), truncated(7, other)] == [False, True]
    assert not truncated(7, other, stop_token_ids=(other,))
    assert not truncated(7, eos, stop_token_ids=(other,))
    assert truncated(other, 7, stop_token_ids=(other,))
    assert [truncated(*said, stop_strings=(stop,)) for stop in ("2.", "3.")] == [False, True]


def test_turns_must_continue_each_other(chat):
    eos = chat.tokenizer.eos_token_id

    def read(*items, **fields):
        return trajectory_of(AgentRun(list(items), GradeResult(1.0), **fields), chat, 7, PARAMS)

    good = read(turn([5, 6], [7, eos]), {"type": "function_call_output"}, turn([5, 6, 7, eos, 8], [9, eos]))
    assert good.token_ids == [5, 6, 7, eos, 8, 9, eos] and good.token_mask == [0, 0, 1, 1, 0, 1, 1]
    assert good.turns == [(2, 4), (5, 7)] and good.weight_versions == [7] * 4 and not good.truncated
    assert read(turn([5], [6, 7])).truncated and read(turn([5], [6, eos]), truncated=True).truncated
    for items in (
        [turn([5, 6], [7, eos]), turn([5, 6, 8, eos], [9])],
        [turn([5, 6], [7, eos]), turn([5, 6], [9])],
        [turn([5], [6], generation_log_probs=[])],
        [turn([5], [6], generation_log_probs=[None])],
        [turn([5], [6], generation_log_probs=[float("nan")])],
        [turn([5], [6], generation_weight_versions=[1, 2])],
        [turn([5], [6], generation_weight_versions=[6])],  # before the rollout began
        [turn([5], [10**6])],
        [turn([-1], [6])],
        [turn("x", [6])],
        [turn([5], [])],
        [{"type": "message"}],
    ):
        with pytest.raises(BrokenTokensError):
            read(*items)


def test_requests_made_while_the_policy_trains_are_answered_by_the_next_weights(taught, tmp_path):
    records: list[Any] = []
    answers: list[Any] = []
    with agent_server(tool_agent) as url:
        run, environments = start(taught, tmp_path, url, records)
        (event,) = [r["fields"] for r in records if r["kind"] == "event" and r["name"] == "policy_endpoint"]
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
        asyncio.run(environments.start())
        train(run)
        asking[0].join(10)
        run.close()
    assert set(answers[0]["choices"][0]["weight_versions"]) == {1}


class SlowAgent(Environment):
    """An agent whose first member never comes back."""

    name = "slow_agent"
    runs_agent = True

    async def run_agent(self, row, sampling):
        self.asked = getattr(self, "asked", [])
        self.asked.append((row, sampling))
        if len(self.asked) == 1:
            await asyncio.Event().wait()
        return AgentRun([turn([5, 6], [7, 8])], GradeResult(0.5))

    async def verify(self, row, response, session):
        raise AssertionError("an agent's rollout carries its own verdict")


def test_a_straggling_agent_is_cut_and_the_others_are_used(taught, chat):
    environment = SlowAgent(EnvironmentConfig(), {})
    sampler = AsyncSampler(embedded(taught, chat))
    params = SamplingParams(max_new_tokens=9, temperature=0.7)
    collector = RolloutCollector(sampler, chat, EnvironmentSet({}, {}), params, max_total_length=3)
    row = {"responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]}}

    async def collect(members):
        cut = cut_once(lambda: len(getattr(environment, "asked", [])) == members)
        prompt = PromptRow(0, row, "row")
        return await collector.collect_group(
            prompt, group_id="g", num_generations=members, environment=environment, cut=cut
        )

    group = asyncio.run(collect(3))
    assert [r.index for r in group.rollouts] == [1, 2]
    # Context and answer past the length limit are cut, and said to be.
    assert all(r.token_ids == [5, 6, 7] and r.token_mask == [0, 0, 1] and r.truncated for r in group.rollouts)
    asked, sampling = environment.asked[0]
    assert sampling == {"temperature": 0.7, "top_p": 1.0, "max_output_tokens": 9}
    assert [part["text"] for part in asked["responses_create_params"]["input"][-1]["content"]] == ["a"]
    environment.asked.clear()
    with pytest.raises(StragglerError):
        asyncio.run(collect(2))


def test_an_agent_is_evaluated(taught, tmp_path):
    rows = tmp_path / "rows.jsonl"
    row = {
        "responses_create_params": {"input": [QUESTION], "tools": [TOOL]},
        "agent_ref": {"type": "responses_api_agents", "name": "remote_agent"},
    }
    rows.write_text(json.dumps(row) + "\n")
    with agent_server(tool_agent) as url:
        config = EvalConfig.model_validate(
            {
                "model": str(taught),
                "data": {"data_path": str(rows)},
                "evaluation": {"samples_per_prompt": 2, "max_total_sequence_length": MAX_LENGTH},
                "generation": {"max_new_tokens": 100, "temperature": 0, "vllm_cfg": {"expose_http_server": True}},
                "env": {"nemo_gym": {"environments": {"remote_agent": {"url": url}}}},
            }
        )
        context = plain_context(config, tmp_path / "run", outputs={"report": "eval_report"})
        evaluation.model_eval(context)
    report = json.loads((context.outputs["report"].path / "report.json").read_text())
    assert report["reward"] == 1.0
