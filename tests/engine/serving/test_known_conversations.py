"""Agents that send messages, not tokens: their requests go on from what was sampled, under the published templates."""

import random
from contextlib import contextmanager

import pytest

from nemotron_steps.config.schema.policy import GenerationConfig
from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.rollouts.conversation import TurnFormat
from nemotron_steps.engine.rollouts.turns import trajectory_of
from nemotron_steps.engine.serving.endpoint import Endpoint
from nemotron_steps.engine.types import FinishReason, SamplingParams
from nemotron_steps.environments.base import AgentRun, GradeResult
from tests.engine.rollouts.scripted import TOOL, WORDS, ScriptedGenerator, a_turn
from tests.engine.serving.test_chat_api import call
from tests.models.stock_chats import FAMILIES, stock_chat, tool_parser_of

NESTED_TOOL = {"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}
QUESTION = {"role": "user", "content": "add"}
PARAMS = SamplingParams(max_new_tokens=400)


@contextmanager
def served(family, drawn, speak=None):
    """An endpoint whose model says what a family's models say; its chat format and generator."""
    chat = stock_chat(family)

    def talk(request, index):
        cut = drawn.random() < 0.15
        text = a_turn(family, chat, drawn, calls=drawn.choice([0, 1, 1, 2]))
        return (text[:9], False, FinishReason.LENGTH) if cut else (text, True, FinishReason.STOP)

    generator = ScriptedGenerator(chat, speak or talk)
    with Endpoint(
        AsyncSampler(generator),
        chat,
        name="policy",
        max_total_length=8000,
        defaults=SamplingParams(max_new_tokens=400, stop_token_ids=(chat.tokenizer.eos_token_id,)),
        turn_format=TurnFormat.of(GenerationConfig(tool_parser=tool_parser_of(family)), chat),
        own_loop=True,
    ) as endpoint:
        yield endpoint, chat, generator


def post(endpoint, path, body):
    status, answer = call(endpoint, path, body)
    assert status == 200, answer
    return answer


def chat_agent(endpoint, drawn):
    """Turns over the chat API, as items with token fields; of what it was answered it sends on text and calls alone."""
    messages, items = [{"role": "system", "content": "be brief"}, QUESTION], []
    for _ in range(4):
        body = {"messages": messages, "tools": [NESTED_TOOL], "return_token_ids": True, "logprobs": True}
        answer = post(endpoint, "/v1/chat/completions", body)
        (choice,) = answer["choices"]
        items.append(
            {
                "type": "message",
                "prompt_token_ids": answer["prompt_token_ids"],
                "generation_token_ids": choice["token_ids"],
                "generation_log_probs": [entry["logprob"] for entry in choice["logprobs"]["content"]],
            }
        )
        said = choice["message"]
        messages.append({"role": "assistant", "content": (said["content"] or "").strip()})
        if said.get("tool_calls"):
            messages[-1]["tool_calls"] = said["tool_calls"]
        for made in said.get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": made["id"], "content": drawn.choice(WORDS)})
        if not said.get("tool_calls"):
            messages.append({"role": "user", "content": drawn.choice(WORDS)})
    return items


def responses_agent(endpoint, drawn):
    """The same over the Responses API."""
    told, items = [QUESTION], []
    for _ in range(4):
        answer = post(endpoint, "/v1/responses", {"input": told, "instructions": "be brief", "tools": [TOOL]})
        items += answer["output"]
        for item in answer["output"]:
            if item["type"] == "message":
                told.append({"role": "assistant", "content": item["content"]})
            elif item["type"] == "function_call":
                told.append({k: item[k] for k in ("type", "name", "arguments", "call_id")})
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        for made in calls:
            output = {"type": "function_call_output", "call_id": made["call_id"], "output": drawn.choice(WORDS)}
            told.append(output)
        if not calls:
            told.append({"role": "user", "content": drawn.choice(WORDS)})
    return items


@pytest.mark.parametrize("agent", [chat_agent, responses_agent])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_agent_that_sends_messages_is_trained_on_what_was_sampled(family, agent):
    drawn = random.Random(family)
    with served(family, drawn) as (endpoint, chat, generator):
        for _ in range(3):
            first = len(generator.completions)
            items = agent(endpoint, drawn)
            spoken = generator.completions[first:]
            trajectory = trajectory_of(
                AgentRun(items, GradeResult(1.0)), chat, 0, PARAMS
            )  # raises where turns do not continue
            assert len(trajectory.turns) == len(spoken) == 4
            for (start, end), completion in zip(trajectory.turns, spoken, strict=True):
                assert trajectory.token_ids[start:end] == completion.token_ids
                assert trajectory.logprobs[start:end] == completion.logprobs
            inside = {t for start, end in trajectory.turns for t in range(start, end)}
            assert [bool(m) for m in trajectory.token_mask] == [t in inside for t in range(len(trajectory.token_ids))]
            for (_, end), (start, _) in zip(trajectory.turns, trajectory.turns[1:], strict=False):
                assert trajectory.token_ids[end - 1 : start].count(chat.tokenizer.eos_token_id) >= 1
                assert trajectory.token_ids[end - 1 : end + 1].count(chat.tokenizer.eos_token_id) == 1


def test_calls_of_the_same_text_are_told_apart_by_their_ids():
    """A group's rollouts begin alike: each goes on from its own thoughts."""
    thoughts = iter(["one", "two", "three", "four"])
    code = '<tool_call>\n{"name": "add", "arguments": {"by": 1}}\n</tool_call>'

    def speak(request, index):
        return f"<think>\n{next(thoughts)}\n</think>\n\n{code}", True, FinishReason.STOP

    with served("qwen3", random.Random(0), speak) as (endpoint, _, _):
        body = {"messages": [QUESTION], "tools": [NESTED_TOOL], "return_token_ids": True}
        answers = [post(endpoint, "/v1/chat/completions", body) for _ in range(2)]
        answers += [{**post(endpoint, "/v1/chat/completions", {**body, "n": 2})}]
        choices = [choice for answer in answers for choice in answer["choices"]]
        thoughts = iter(["more"] * 4)
        for choice in random.Random(1).sample(choices, 4):
            said = choice["message"]
            result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "1"}
            told = [QUESTION, {"role": "assistant", "content": "", "tool_calls": said["tool_calls"]}, result]
            ids = post(endpoint, "/v1/chat/completions", {**body, "messages": told})["prompt_token_ids"]
            start = len(answers[0]["prompt_token_ids"])
            assert ids[start : start + len(choice["token_ids"])] == choice["token_ids"]


def test_another_chat_is_rendered_by_the_template():
    """An edited answer, other tools, another question before it: nothing that was sampled."""
    with served("qwen3", random.Random(0), lambda r, i: ("<think>\nhm\n</think>\n\nyes", True, FinishReason.STOP)) as (
        endpoint,
        chat,
        _,
    ):
        body = {"messages": [QUESTION], "return_token_ids": True}
        first = post(endpoint, "/v1/chat/completions", body)
        said, thanks = {"role": "assistant", "content": "yes"}, {"role": "user", "content": "thanks"}
        known = first["prompt_token_ids"] + first["choices"][0]["token_ids"]

        def asked(*messages, **fields):
            return post(endpoint, "/tokenize", {"messages": list(messages), **fields})["tokens"]

        assert asked(QUESTION, said, thanks) == known + chat.render_continuation([thanks])
        for told in ([QUESTION, {**said, "content": "no"}, thanks], [thanks, said, thanks]):
            assert asked(*told) == chat.render(told)
        assert asked(QUESTION, said, thanks, tools=[NESTED_TOOL]) == chat.render(
            [QUESTION, said, thanks], [NESTED_TOOL]
        )
        assert asked(QUESTION, said) == chat.render([QUESTION, said])  # nothing follows
        status, refused = call(endpoint, "/tokenize", {"messages": [QUESTION, {**said, "content": 5}, thanks]})
        assert (status, refused["error"]["param"]) == (400, "messages.1.content")
