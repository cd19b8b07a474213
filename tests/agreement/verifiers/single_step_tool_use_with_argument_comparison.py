"""single_step_tool_use_with_argument_comparison, with the threshold of its main config."""

from __future__ import annotations

import json
import random
from typing import Any

from nemotron_steps.environments.responses import message_item, reasoning_item
from tests.agreement.answers import THOUGHTS, Items, asking, call_item, mutated_text, mutated_value, pick, read, styled
from tests.agreement.compare import FINAL_MESSAGE, Rule
from tests.agreement.gym import Gym

NAME = "single_step_tool_use_with_argument_comparison"


def rows(gym: Gym, rng: random.Random) -> list[dict[str, Any]]:
    arguments = {
        "filters": {"name": "late orders of the spring sale", "limit": 10, "ratio": 0.25, "deep": True, "note": None},
        "tags": ["red shoes", "blue", "size 44"],
    }
    goal = {"goal": "find the cheapest flight to Oslo", "query": "flights to Oslo in May"}
    made = [("search_orders", arguments), ("browse", goal), ("set_volume", {"level": 3, "mute": False})]
    actions = [{"type": "function_call", "name": name, "arguments": json.dumps(given)} for name, given in made]
    return [
        *read(gym.data(NAME), gym.data(NAME, "parallel_example.jsonl")),
        *(asking("What next?", expected_action=action) for action in actions),
    ]


def calls_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The expected calls, none where a message is."""
    action = row["expected_action"]
    return action.get("calls") or ([action] if action["type"] == "function_call" else [])


def answer(row: dict[str, Any], rng: random.Random) -> tuple[str, Items]:
    calls = calls_of(row)
    if not calls:
        kind = pick(rng, {"a message": 6, "a call": 3})
        if kind == "a call":
            return kind, [call_item("get_weather", '{"city": "Oslo"}')]
        style, items = styled(row["expected_action"]["content"].strip(), "Which one do you mean?", rng)
        return f"{kind}, {style}", items
    kinds = {
        "right": 35,
        "mutated arguments": 30,
        "other words": 8,
        "another tool": 6,
        "a message": 6,
        "call in text": 2,
    }
    kinds |= {"one call more": 3, "doubled call": 2, "other order": 2, "one call less": 2, "broken JSON": 3, "goal": 1}
    kind = pick(rng, kinds)
    made = [(call["name"], call["arguments"]) for call in calls]
    place = rng.randrange(len(made))
    name, arguments = made[place]
    if kind == "mutated arguments":
        made[place] = name, json.dumps(mutated_value(json.loads(arguments), rng))
    elif kind == "other words":
        changed = {
            key: mutated_text(each, rng) if isinstance(each, str) else each
            for key, each in json.loads(arguments).items()
        }
        made[place] = name, json.dumps(changed)
    elif kind == "another tool":
        made[place] = rng.choice((f"{name}_v2", name.upper(), "transfer_to_human_agents")), arguments
    elif kind == "one call more":
        made.insert(rng.randrange(len(made) + 1), ("get_time", "{}"))
    elif kind == "doubled call":
        made.append(made[place])
    elif kind == "other order":
        rng.shuffle(made)
    elif kind == "one call less":
        made.pop(place)
    elif kind == "broken JSON":
        made[place] = name, rng.choice((arguments[:-1], arguments.replace('"', "'"), "", f"{arguments} ok"))
    elif kind in ("a message", "call in text"):
        core = "Could you tell me more?" if kind == "a message" else f"<tool_call>{arguments}</tool_call>"
        style, items = styled(core, "I see.", rng)
        return f"{kind}, {style}", items
    elif kind == "goal":
        made[place] = name, json.dumps({**json.loads(arguments), "goal": rng.choice(("something else entirely", ""))})
    items = [call_item(*call, number) for number, call in enumerate(made)]
    before = pick(rng, {"bare": 5, "reasoning item": 4, "message before": 2})
    if before == "reasoning item":
        items.insert(0, reasoning_item(rng.choice(THOUGHTS)))
    elif before == "message before":
        items.insert(0, message_item("I will look that up."))
    return f"{kind}, {before}", items


def theirs(gym: Gym) -> Any:
    thresholds = {"word_count_similarity_threshold": 0.1, "floating_point_comparison_threshold": 1e-6}
    module = gym.module(NAME)
    given = module.ToolCallComparatorConfig(**thresholds)
    return gym.grader(NAME, "SingleStepToolUseArgumentComparison", tool_call_comparator_config=given)


RULES = (
    FINAL_MESSAGE,
    Rule(
        "calls beside the expected ones earn nothing, or calling everything would",
        lambda answer: answer.details.get("category") == "number_of_calls_differs",
    ),
    Rule(
        "true and false are no numbers",
        lambda answer: answer.details.get("category") == "argument_type_differs" and answer.ours == 0,
    ),
)
