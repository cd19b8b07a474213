"""Rollouts of several turns under the published chat templates: what is trained is what was sampled."""

import random

import pytest

from nemotron_steps.config.schema.policy import GenerationConfig
from nemotron_steps.engine.rollouts.conversation import TurnFormat, parse_assistant
from nemotron_steps.engine.types import FinishReason
from nemotron_steps.environments.base import EnvironmentConfig
from tests.engine.rollouts.scripted import Talk, a_call, a_turn, collector_of, grouped
from tests.models.stock_chats import FAMILIES, stock_chat, tool_parser_of


def format_of(family, chat) -> TurnFormat:
    return TurnFormat.of(GenerationConfig(tool_parser=tool_parser_of(family)), chat)


def converse(family, seed):
    """A group of conversations of tool calls and questions; the generator that spoke in them."""
    chat, drawn = stock_chat(family), random.Random(seed)

    def speak(request, index):
        by_stop_string = drawn.random() < 0.2
        return a_turn(family, chat, drawn, calls=drawn.choice([0, 0, 1, 2])), not by_stop_string, FinishReason.STOP

    collector, generator = collector_of(chat, speak, turn_format=format_of(family, chat))
    system = [{"role": "system", "content": "be brief"}] if drawn.random() < 0.5 else []
    row = {"responses_create_params": {"input": [*system, {"role": "user", "content": "add"}]}}
    return chat, generator, grouped(collector, Talk(drawn, turns=3), row, 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_trained_tokens_are_the_sampled_ones_and_prompts_only_grow(family):
    lengths = set()
    for seed in range(8):
        chat, generator, group = converse(family, seed)
        spoken = {(c.request_id, c.index): c for c in generator.completions}
        asked = {r.request_id: list(r.prompt_ids) for r in generator.requests}
        for rollout in group.rollouts:
            assert rollout.failure is None and not rollout.truncated
            lengths.add(len(rollout.turns))
            inside: set[int] = set()
            for turn, (start, end) in enumerate(rollout.turns):
                name = "g/0" if turn == 0 else f"g/{rollout.index}/{turn}"
                completion = spoken[name, rollout.index if turn == 0 else 0]
                assert asked[name] == rollout.token_ids[:start]  # everything before, as it was: prefix and context
                assert rollout.token_ids[start:end] == completion.token_ids
                assert rollout.logprobs[start:end] == completion.logprobs
                inside |= set(range(start, end))
            assert [bool(m) for m in rollout.token_mask] == [t in inside for t in range(len(rollout.token_ids))]
            assert all(rollout.logprobs[t] == 0 for t in range(len(rollout.token_ids)) if t not in inside)
            for (_, end), (start, _) in zip(rollout.turns, rollout.turns[1:], strict=False):
                # One end of turn between two turns, sampled or written, wherever the first one stopped.
                around = rollout.token_ids[end - 1 : end + 1]
                assert around.count(chat.tokenizer.eos_token_id) == 1 and end < start
    assert len(lengths) > 2 and max(lengths) == 6


@pytest.mark.parametrize("family", FAMILIES)
def test_reasoning_is_told_from_the_answer_as_the_template_begins_the_turn(family):
    """`enable_thinking=false` closes the thinking in the prompt: a turn without tags is all answer then."""
    chat = stock_chat(family)
    for parser in ("qwen3", "nano_v3", "deepseek_r1"):
        turn_format = TurnFormat.of(GenerationConfig(reasoning_parser=parser), chat)
        said = parse_assistant("seven", turn_format=turn_format)
        assert (said.reasoning, said.text) == (("seven", "") if chat.opens_thinking else ("", "seven"))
        closed = parse_assistant("six?\n</think>\n\nseven", turn_format=turn_format)
        assert (closed.reasoning, closed.text) == ("six?", "seven")
    assert TurnFormat.of(GenerationConfig(reasoning_parser="none"), chat).reasoning_parser == "none"


def said_to(row_fields, environment=None, family="qwen3"):
    """The prompts of a group of one, as text, and its rollout; every turn calls a tool."""
    chat = stock_chat(family)

    def speak(request, index):
        return "six?\n</think>\n\n" * chat.opens_thinking + a_call(family, 1), True, FinishReason.STOP

    collector, generator = collector_of(chat, speak, turn_format=format_of(family, chat))
    row = {"responses_create_params": {"input": "add", **row_fields.pop("asked", {})}, **row_fields}
    group = grouped(collector, environment or Talk(random.Random(0), turns=9), row, 1)
    return [chat.tokenizer.decode(request.prompt_ids) for request in generator.requests], group.rollouts[0]


@pytest.mark.parametrize(
    "row",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"asked": {"metadata": {"chat_template_kwargs": '{"enable_thinking": false}'}}},
        None,
    ],
)
def test_a_row_or_its_agent_turns_reasoning_off_for_itself_alone(row):
    quiet = Talk(random.Random(0), turns=9)
    if row is None:
        quiet.config = EnvironmentConfig(chat_template_kwargs={"enable_thinking": False})
    prompts, _ = said_to(row or {}, quiet)
    closed = "<think>\n\n</think>"
    assert prompts and all(prompt.rstrip().endswith(closed) for prompt in prompts), prompts[0]
    assert not any(prompt.rstrip().endswith(closed) for prompt in said_to({})[0])
