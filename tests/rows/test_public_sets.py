"""Rows shaped like those of well-known public data sets, 200 of each: none is refused, and what each says is read."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from nemotron_steps.rows.layouts import read_chat, read_pair, read_prompt, without_padding

COUNT = 200
Row = dict[str, Any]
WORDS = [
    "the",
    "river –",
    "naïve",
    "東京",
    "\n-",
    "{b}",
    "'c'",
    '"d"',
    "<e>",
    "<think>",
    "1,000",
    "$x^2$",
    "🙂",
    "def h(i): i",
]


def words(rng: random.Random, most: int = 12) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def turns(rng: random.Random, keys: tuple[str, str], names: tuple[str, str, str], least: int = 1) -> list[Row]:
    role, content = keys
    count = rng.randint(least, 3)
    said = [{role: names[1 + place % 2], content: words(rng)} for place in range(2 * count)]
    return [{role: names[0], content: words(rng)}, *said] if rng.random() < 0.3 else said


OPENAI = (("role", "content"), ("system", "user", "assistant"))
SHAREGPT = (("from", "value"), ("system", "human", "gpt"))


def calls(rng: random.Random) -> tuple[list[Row], list[Row]]:
    """Tools, and calls of them."""
    tools = [
        {"name": f"get_{n}", "description": words(rng), "parameters": {"city": {"type": "str", "default": ""}}}
        for n in range(rng.randint(1, 3))
    ]
    return tools, [{"name": tool["name"], "arguments": {"city": words(rng), "n": rng.randint(0, 9)}} for tool in tools]


def xlam(rng: random.Random) -> Row:
    tools, made = calls(rng)
    return {"id": 1, "query": words(rng), "answers": json.dumps(made), "tools": json.dumps(tools)}


def hermes(rng: random.Random) -> Row:
    tools, made = calls(rng)
    nested = [{"type": "function", "function": tool} for tool in tools]
    said = [
        {"from": "system", "value": f"<tools>{json.dumps(nested)}</tools>"},
        {"from": "human", "value": words(rng)},
        {"from": "gpt", "value": "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in made)},
        {"from": "tool", "value": "<tool_response>\n{}\n</tool_response>"},
        {"from": "gpt", "value": words(rng)},
    ]
    return {"id": "x", "conversations": said, "tools": json.dumps(nested), "category": "c"}


def calling(rng: random.Random) -> Row:
    """As Arrow gives OpenAI's messages back: every key there, null where it is another row's."""
    tools, made = calls(rng)
    blank = dict.fromkeys(("role", "content", "tool_calls", "tool_call_id", "name"))
    padded = {"city": None, "n": None, "other": None}
    called = [
        {"id": f"c{n}", "type": "function", "function": {**call, "arguments": {**padded, **call["arguments"]}}}
        for n, call in enumerate(made)
    ]
    answers = [{**blank, "role": "tool", "tool_call_id": f"c{n}", "content": "{}"} for n in range(len(made))]
    return {
        "messages": [
            {**blank, "role": "user", "content": words(rng)},
            {**blank, "role": "assistant", "tool_calls": called},
            *answers,
            {**blank, "role": "assistant", "content": words(rng)},
        ],
        "tools": [{"type": "function", "function": {**tool, "strict": None}} for tool in tools],
    }


def pair(rng: random.Random, whole: bool = True, prompt: Any = None) -> Row:
    asked = turns(rng, *OPENAI)[:-1]
    sides = {
        side: [*asked, {"role": "assistant", "content": f"{side} {words(rng)}"}] for side in ("chosen", "rejected")
    }
    if not whole:
        sides = {side: said[-1:] for side, said in sides.items()}
    told = {"last": asked[-1]["content"], "messages": asked, None: None}[prompt]
    return {**({"prompt": told} if told is not None else {}), **sides, "score_chosen": 5.0, "source": "s"}


def transcripts(rng: random.Random) -> Row:
    asked = "".join(f"\n\nHuman: {words(rng)}\n\nAssistant: {words(rng)}" for _ in range(rng.randint(0, 2)))
    asked += f"\n\nHuman: {words(rng)}\n\nAssistant:"
    return {"chosen": f"{asked} yes {words(rng)}", "rejected": f"{asked} no {words(rng)}"}


def alpaca(rng: random.Random) -> Row:
    return {"instruction": words(rng), "input": rng.choice(["", words(rng)]), "output": words(rng), "text": words(rng)}


def sharegpt(rng: random.Random) -> Row:
    said = [{**turn, "weight": rng.choice([None, 1.0])} for turn in turns(rng, *SHAREGPT)]
    return {"id": "x", "conversations": said, "system_prompt": None, "model": None, "skip_prompt_formatting": False}


def verl(rng: random.Random) -> Row:
    truth = {"style": "rule", "ground_truth": "4"}
    asked = [{"role": "user", "content": words(rng)}]
    return {"data_source": "gsm8k", "prompt": asked, "ability": "math", "reward_model": truth, "extra_info": {"i": 1}}


SETS: dict[str, tuple[Callable[[Any, str], Any], Callable[[random.Random], Row]]] = {
    "UltraChat": (read_chat, lambda rng: {"prompt": "x", "prompt_id": "y", "messages": turns(rng, *OPENAI)}),
    "Tulu 3": (read_chat, lambda rng: {"id": "x", "messages": turns(rng, *OPENAI), "source": "y"}),
    "OpenHermes": (read_chat, sharegpt),
    "Alpaca": (read_chat, alpaca),
    "Dolly": (
        read_chat,
        lambda rng: {"instruction": words(rng), "context": "", "response": words(rng), "category": "x"},
    ),
    "MetaMathQA": (read_chat, lambda rng: {"type": "x", "query": words(rng), "response": words(rng)}),
    "OpenOrca": (
        read_chat,
        lambda rng: {"id": "x", "system_prompt": rng.choice(["", words(rng)]), "question": "q", "response": words(rng)},
    ),
    "Capybara": (
        read_chat,
        lambda rng: {"source": "x", "conversation": [{"input": words(rng), "output": words(rng)} for _ in range(3)]},
    ),
    "LIMA": (
        read_chat,
        lambda rng: {"conversations": [words(rng) for _ in range(2 * rng.randint(1, 3))], "source": "x"},
    ),
    "Guanaco": (read_chat, lambda rng: {"text": f"### Human: {words(rng)}### Assistant: {words(rng)}"}),
    "xLAM": (read_chat, xlam),
    "Hermes function calling": (read_chat, hermes),
    "OpenAI's messages in Arrow": (read_chat, calling),
    "NuminaMath": (
        read_prompt,
        lambda rng: {"problem": words(rng), "solution": words(rng), "messages": turns(rng, *OPENAI), "source": "x"},
    ),
    "GSM8K": (read_prompt, lambda rng: {"question": words(rng), "answer": f"{words(rng)}\n#### 4"}),
    "DAPO, verl": (read_prompt, verl),
    "UltraFeedback": (read_pair, lambda rng: {**pair(rng, prompt="last"), "messages": turns(rng, *OPENAI)}),
    "Skywork, implicit prompts": (read_pair, pair),
    "Tulu 3 preferences": (read_pair, lambda rng: pair(rng, prompt="messages")),
    "answers alone": (read_pair, lambda rng: pair(rng, whole=False, prompt="messages")),
    "HH": (read_pair, transcripts),
    "Orca DPO": (read_pair, lambda rng: {"system": "", "question": words(rng), "chosen": "a", "rejected": words(rng)}),
}


@pytest.mark.parametrize("name", SETS)
def test_no_row_of_a_public_set_is_refused_and_every_text_is_read(name: str) -> None:
    read, make = SETS[name]
    for number in range(COUNT):
        row = json.loads(json.dumps(make(random.Random(f"{name} {number}"))))
        for given in (row, without_padding(row)):
            found = read(given, f"{name}:{number}")
            text = json.dumps([vars(found.prompt), found.chosen, found.rejected] if read is read_pair else vars(found))
            for said in _texts(row.get("messages", row) if read is read_chat else row):
                assert read is not read_chat or json.dumps(said.strip())[1:-1] in text, said


def _texts(value: Any) -> list[str]:
    """What messages say, in whatever shape."""
    if isinstance(value, list):
        return [text for each in value for text in _texts(each)]
    if not isinstance(value, dict):
        return []
    keys = ("content", "value", "input", "output", "instruction", "response", "question", "query")
    found = [value[key] for key in keys if isinstance(value.get(key), str)]
    return found + [text for key in ("conversations", "conversation") for text in _texts(value.get(key))]
