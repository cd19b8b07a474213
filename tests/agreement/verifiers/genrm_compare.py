"""genrm_compare: whole groups, by turns with the defaults (no bonus, no terms) and with the weights of an RLHF run."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

from nemotron_steps.environments.base import Session
from nemotron_steps.environments.judged.genrm_messages import is_contentless, neutralize
from nemotron_steps.environments.registry import create
from nemotron_steps.environments.responses import Response, message_item, reasoning_item, response_object
from tests.agreement.answers import Items, pick
from tests.agreement.compare import Answer, Rule
from tests.agreement.gym import Gym
from tests.agreement.judges import REASONS, judged_grader

NAME = "genrm_compare"
RLHF = {
    "reasoning_bonus": 0.5,
    "answer_bonus": 0.5,
    "group_reasoning_length_penalty_coeff": 0.3,
    "group_answer_length_penalty_coeff": 0.35,
    "group_style_penalty_coeff": 0.05,
}
TEXTS = (
    "# Title\n\nFirst, **this**.\n- a\n- b\n",
    "1. one\n2. two\n\n__bold__ and **bold**, **__both__**",
    "A plain sentence that says it all.",
    "Done \U0001f600\u2728 \u2705 great \u2b50 \u2764\ufe0f",
    "```python\n# code\n- x\n```\nThat is it.",
    "A longer paragraph without any marks in it, which goes on for a while to be long enough. " * 3,
    "\u2192 see | a | b | \u2264 3",
)
CHINESE = "\u7b54\u6848\u662f\u4e1c\u4eac\u3002"

STYLES = {
    "JSON in a fence": 40.0,
    "JSON alone": 25.0,
    "words, then JSON": 15.0,
    "thoughts, then JSON": 15.0,
    "overall": 2.0,
    "numbers as text": 0.5,
    "a key missing": 0.5,
    "out of range": 0.2,
    "several verdicts": 0.6,
    "broken JSON": 0.6,
    "words without a verdict": 0.3,
    "nothing": 0.3,
}


def reply(style: str, rng: random.Random) -> str:
    """A judge's reply."""
    verdict: dict[str, Any] = {"score_1": rng.randint(1, 5), "score_2": rng.randint(1, 5), "ranking": rng.randint(1, 6)}
    if style == "numbers as text":
        verdict = {name: str(number) for name, number in verdict.items()}
    elif style == "a key missing":
        del verdict[rng.choice(list(verdict))]
    elif style == "out of range":
        verdict |= rng.choice(({"score_1": 9}, {"score_2": 0}, {"ranking": 0}, {"score_1": 10, "score_2": 7}))
    text, why = json.dumps(verdict), rng.choice(REASONS)
    shapes = {
        "JSON in a fence": f"{why}\n```json\n{json.dumps(verdict, indent=2)}\n```",
        "words, then JSON": f"{why}\n\n{text}",
        "thoughts, then JSON": f"<think>{why}</think>{text}",
        "overall": json.dumps({"rubric_evaluations": [{"score_1": 1}], "overall": verdict}),
        "several verdicts": f'{{"score_1": 1, "score_2": 5, "ranking": 6}}\n{why}\n{text}',
        "broken JSON": rng.choice((text.replace('"', "'"), text[:-1] + ",}", text[:-6])),
        "words without a verdict": why,
        "nothing": "",
    }
    return shapes.get(style, text)


def group(rng: random.Random) -> list[tuple[str, Items]]:
    """Answers of one prompt: what each is, and its items."""
    chinese = rng.random() < 0.02
    made = []
    for number in range(rng.choice((2, 4, 8, 16))):
        kinds = {"answer": 98.5, "empty": 0.5, "contentless": 0.5, "Chinese": 60 if chinese else 0}
        kind = pick(rng, kinds)
        text = {
            "answer": f"{rng.choice(TEXTS)} ({number})" + " and so on" * rng.randint(0, 2),
            "empty": "",
            "contentless": rng.choice((":", "Thought process:", "...")),
            "Chinese": f"{CHINESE * rng.randint(1, 3)} {number}",
        }[kind]
        thoughts = [reasoning_item("r" * rng.randint(3, 60))] if rng.random() < 0.8 else []
        made.append((f"{kind}, group with Chinese" if chinese else kind, [*thoughts, message_item(text)]))
    return made


def shown(text: str) -> str:
    """An answer as ours shows it."""
    return "None" if is_contentless(text) else neutralize(text)


async def compared(gym: Gym, count: int, seed: int) -> list[Answer]:
    """Both rewards of `count` answers and a few."""
    rng = random.Random(f"{NAME} {seed}")
    said: dict[tuple[str, str], tuple[str, str]] = {}

    def judge(first: str, second: str) -> str:
        if (first, second) not in said:
            style = pick(rng, STYLES)
            said[first, second] = (style, reply(style, rng))
        return said[first, second][1]

    class Ours:
        async def complete(self, messages: Any, **sampling: float) -> str:
            by_role = {message["role"]: message["content"] for message in messages}
            return judge(by_role["response_1"], by_role["response_2"])

    def of_theirs(request: Any) -> str:
        return judge(shown(request.metadata["response_1"]), shown(request.metadata["response_2"]))

    pairs = []
    for weights in ({}, RLHF):
        settings = {**weights, "genrm_parse_retry_sleep_s": 0.0}
        theirs = judged_grader(gym, NAME, "GenRMCompare", NAME, of_theirs, parser=False, **settings)
        pairs.append((create(NAME, weights, {"genrm_model": Ours()}), theirs.server))
    request = gym.module(NAME).GenRMCompareRequest
    conversation = [{"role": "user", "content": "Name one."}]
    row = {"responses_create_params": {"input": conversation}}
    found: list[Answer] = []
    for environment, server in itertools.cycle(pairs):
        if len(found) >= count:
            break
        said.clear()
        answers = group(rng)
        responses = [Response.from_output(items) for _, items in answers]
        verdicts = await environment.judge_group(row, responses, [Session() for _ in answers])
        objects = [response_object(Response("", output=items)) for _, items in answers]
        given = await server.compare(request(conversation_history=conversation, response_objs=objects))
        in_group = ", ".join({*(label for label, _ in answers), *(style for style, _ in said.values())})
        for (label, items), response, verdict, theirs in zip(answers, responses, verdicts, given.rewards, strict=True):
            own = {style for pair, (style, _) in said.items() if shown(response.text) in pair}
            ours = f"masked: {verdict.failure}" if verdict.reward is None else verdict.reward
            label = ", ".join((label, *sorted(style for style in own if STYLES[style] < 1)))
            found.append(Answer({**row, "group": in_group}, label, items, ours, theirs, verdict.details))
    return found


RULES = (
    Rule(
        "an answer without content is shown as None, earns no bonus (the next one may) and never more than one with"
        " content",
        lambda answer: "empty" in answer.row["group"] or "contentless" in answer.row["group"],
    ),
    Rule(
        "a score out of its range is no score: asked again, then the defaults",
        lambda answer: "out of" in answer.row["group"],
    ),
    Rule(
        "style counts emoji and symbols, not every character from U+24C2 to U+1F251, which are Chinese, Japanese and"
        " Korean too",
        lambda answer: "Chinese" in answer.row["group"],
    ),
)
