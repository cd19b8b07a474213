"""A judge behind the endpoint answers as the same judge in the process; a run waits until it is ready."""

import asyncio
import socket
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from nemotron_steps.config.schema.rl import VllmModelConfig
from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.rollouts.conversation import TurnFormat
from nemotron_steps.engine.serving.endpoint import Endpoint
from nemotron_steps.engine.setup.backends import GeneratorJudge, build_judge
from nemotron_steps.engine.types import SamplingParams
from nemotron_steps.environments.judged.judges import HttpJudge
from nemotron_steps.errors import JudgeUnavailableError
from tests.engine.serving.taught_model import GREETING, MAX_LENGTH, QUESTION, embedded

SEED = 11
UNKNOWN = {"role": "user", "content": "which?"}


def judge_endpoint(taught, chat, **options):
    return Endpoint(
        AsyncSampler(embedded(taught, chat), name="judge"),
        chat,
        name="judge",
        max_total_length=MAX_LENGTH,
        defaults=SamplingParams(max_new_tokens=MAX_LENGTH, stop_token_ids=(chat.tokenizer.eos_token_id,)),
        turn_format=TurnFormat("none", "none"),
        **options,
    )


async def ask_all(judge, between=lambda: None):
    """Two training steps, in each of which one question is asked twice at a time; `between` them something is done."""
    answers = []
    for step in ("0", "1"):
        if step == "1":
            await asyncio.to_thread(between)
        judge.start_step(step)
        asked = [[QUESTION], [UNKNOWN], [UNKNOWN]]
        answers += await asyncio.gather(
            *(judge.complete(m, temperature=2.0, top_p=0.95, max_tokens=500) for m in asked)
        )
    return answers


def test_the_http_judge_answers_as_the_judge_in_the_process(taught, chat):
    sampler = AsyncSampler(embedded(taught, chat), name="judge")
    local = GeneratorJudge(sampler, chat, max_total_length=MAX_LENGTH, length_key="length", seed=SEED)
    expected = asyncio.run(ask_all(local))
    with judge_endpoint(taught, chat, own_loop=True) as endpoint:
        config = VllmModelConfig(backend="http", base_url=endpoint.url, model="judge", readiness_timeout_s=5)
        remote = build_judge("judge_model", config, defer_to=None, seed=SEED)
        assert isinstance(remote, HttpJudge)
        assert asyncio.run(ask_all(remote)) == expected
        other = build_judge("judge_model", config, defer_to=None, seed=SEED + 1)
        assert asyncio.run(ask_all(other)) != expected
        remote.close()
        other.close()
    assert expected[1] != expected[2] and len(set(expected)) > 3


def test_replicas_behind_http_answer_as_one_judge_and_go_on_without_the_one_that_is_killed(taught, chat):
    sampler = AsyncSampler(embedded(taught, chat), name="judge")
    local = GeneratorJudge(sampler, chat, max_total_length=MAX_LENGTH, length_key="length", seed=SEED)
    expected = asyncio.run(ask_all(local))

    with ExitStack() as first, judge_endpoint(taught, chat, own_loop=True) as second:
        killed = first.enter_context(judge_endpoint(taught, chat, own_loop=True))
        config = VllmModelConfig(backend="http", base_url=(killed.url, second.url), model="judge", max_retries=0)
        judge = build_judge("judge_model", config, defer_to=None, seed=SEED)
        assert asyncio.run(ask_all(judge, between=first.close)) == expected
        judge.close()


def test_a_judge_that_never_gets_ready_stops_the_run_before_training(taught, chat):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        dead = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
    with judge_endpoint(taught, chat) as never:
        for url in (dead, never.url):
            config = VllmModelConfig(backend="http", base_url=url, readiness_timeout_s=1.5)
            started = time.monotonic()
            with pytest.raises(JudgeUnavailableError, match="not ready"):
                build_judge("judge_model", config, defer_to=None, seed=0)
            assert time.monotonic() - started < 15


def test_a_judge_in_the_process_waits_while_the_policy_samples(taught):
    policy = SimpleNamespace(busy=True)
    config = VllmModelConfig(model=str(taught), max_total_sequence_length=MAX_LENGTH)
    judge = build_judge("judge_model", config, defer_to=policy, seed=0)

    async def ask():
        asking = asyncio.ensure_future(judge.complete([GREETING], temperature=1.0, top_p=1.0, max_tokens=5))
        await asyncio.wait({asking}, timeout=0.5)
        assert not asking.done()
        policy.busy = False
        await asking

    asyncio.run(ask())
