"""terminus_judge: its rules. The judge of ours calls nothing equal, and that of theirs is off, which is the same."""

import json
import random
from collections.abc import Sequence
from typing import Any

from tests.agreement.answers import Items, mutated_text, mutated_value, pick, read, styled
from tests.agreement.compare import FINAL_MESSAGE, Rule
from tests.agreement.gym import Gym


class Never:
    """A judge that calls nothing equal: what is paid is paid by the rules."""

    async def complete(self, messages: Sequence[dict[str, str]], **sampling: float) -> str:
        return "[[A!=B]]"


JUDGES = {"judge_model": Never()}


def rows(gym: Gym, rng: random.Random) -> list[dict[str, Any]]:
    found = read(gym.data("terminus_judge"))
    done = []
    for row in found:
        step = json.loads(row["expected_answer"])
        step["task_complete" if row["metadata"]["harness"] == "terminus_2" else "is_task_complete"] = True
        done.append({**row, "expected_answer": json.dumps(step)})
    return [*found, *done, *({**row, "threshold": 0.8} for row in found)]


def answer(row: dict[str, Any], rng: random.Random) -> tuple[str, Items]:
    step = json.loads(row["expected_answer"])
    flag = "task_complete" if row["metadata"]["harness"] == "terminus_2" else "is_task_complete"
    kinds = {"right": 30, "other thoughts": 15, "keystrokes changed": 20, "mutated": 20, "completion flag": 6}
    kinds |= {"other commands": 6, "no commands": 3, "not JSON": 3, "a list": 1}
    kind = pick(rng, kinds)
    if kind == "other thoughts":
        for key in ("analysis", "plan", "state_analysis", "explanation"):
            if key in step:
                step[key] = "I look at what is there."
    elif kind == "keystrokes changed":
        command = rng.choice(step["commands"])
        keys = command["keystrokes"]
        command["keystrokes"] = rng.choice((mutated_text(keys, rng), keys.strip(), f"{keys}\n", f" {keys}"))
    elif kind == "mutated":
        step = mutated_value(step, rng)
    elif kind == "completion flag":
        step[flag] = not step.get(flag, False)
        if rng.random() < 0.3:
            del step[flag]
    elif kind == "other commands":
        step["commands"] = [{**command, "keystrokes": "ls -la /app\n"} for command in step["commands"][:1]]
    elif kind == "no commands":
        step["commands"] = []
    core = json.dumps([step] if kind == "a list" else step, indent=rng.choice((None, 2)))
    if kind == "not JSON":
        core = rng.choice((core.replace('"', "'"), core[:-1], f"{core},", "I would run ls."))
    style, items = styled(core, json.dumps({**step, "commands": []} if isinstance(step, dict) else {}), rng)
    return f"{kind}, {style}", items


def theirs(gym: Gym) -> Any:
    return gym.grader("terminus_judge", "TerminusJudge", enable_string_similarity=True, enable_llm_judge=False)


RULES = (
    FINAL_MESSAGE,
    Rule(
        "the completion flag must be the same, not only set where it is expected",
        lambda answer: answer.details.get("gate") == "task_complete",
    ),
)
