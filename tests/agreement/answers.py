"""How policies say an answer: what stands around it, seeded. The weights are the mix that agreement is measured on.

Most answers are one message, with the reasoning in an item of its own, as a server with a reasoning parser gives them.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from nemotron_steps.environments.responses import message_item, reasoning_item

Items = list[dict[str, Any]]
T = TypeVar("T")

THOUGHTS = (
    "Let me think about this step by step. First I look at what is asked, then at what is given.",
    "The question wants one answer. I compare the candidates and rule out those that cannot be right.",
    "Okay, so I need to be careful with the format here. Wait, let me check again. Yes, that holds.",
)
OPENINGS = (
    "Sure! Here it is:",
    "Let us go through it.\n\nWe compare what is given with what is asked.",
    "Here you go.",
)
CLOSINGS = ("Let me know if you need anything else!", "I hope this helps.", "That is the final result.")


def pick(rng: random.Random, weighted: dict[T, float]) -> T:
    """One of the keys, by weight."""
    return rng.choices(list(weighted), list(weighted.values()))[0]


def message(text: str) -> Items:
    """One message."""
    return [message_item(text)]


def _reasoned(core: str, other: str, rng: random.Random) -> Items:
    return [reasoning_item(f"{rng.choice(THOUGHTS)} Perhaps {other}? No."), message_item(core)]


def _think_tags(core: str, other: str, rng: random.Random) -> Items:
    return message(f"<think>\n{rng.choice(THOUGHTS)} Perhaps {other}? No.\n</think>\n\n{core}")


def _two_messages(core: str, other: str, rng: random.Random) -> Items:
    return [message_item(rng.choice((f"Perhaps {other}? I look it up.", "I look it up."))), message_item(core)]


STYLES: dict[str, tuple[float, Callable[[str, str, random.Random], Items]]] = {
    "bare": (34, lambda core, other, rng: message(core)),
    "reasoning item": (30, _reasoned),
    "prose before": (12, lambda core, other, rng: message(f"{rng.choice(OPENINGS)}\n\n{core}")),
    "prose after": (4, lambda core, other, rng: message(f"{core}\n\n{rng.choice(CLOSINGS)}")),
    "bold": (3, lambda core, other, rng: message(f"**{core}**")),
    "code fence": (4, lambda core, other, rng: message(f"```\n{core}\n```")),
    "blank lines": (3, lambda core, other, rng: message(f"\n\n{core}\n")),
    "changed its mind": (3, lambda core, other, rng: message(f"{other}\n\nWait, that is wrong.\n\n{core}")),
    "think tags in the message": (2, _think_tags),
    "think tag never closed": (1, lambda core, other, rng: message(f"<think>\n{rng.choice(THOUGHTS)}\n{core}")),
    "two messages": (1, _two_messages),
    "cut in the middle": (1.5, lambda core, other, rng: message(core[: rng.randint(1, max(1, len(core) - 1))])),
    "empty": (1, lambda core, other, rng: message("")),
    "no message": (0.5, lambda core, other, rng: [reasoning_item(rng.choice(THOUGHTS))]),
}
"""Style → (weight, the output items of an answer; `other` is a wrong one, named on the way)."""


def styled(core: str, other: str, rng: random.Random) -> tuple[str, Items]:
    """(name of the style, output items)."""
    style = pick(rng, {name: weight for name, (weight, _) in STYLES.items()})
    return style, STYLES[style][1](core, other, rng)


def mutated_text(text: str, rng: random.Random) -> str:
    """A text with one word dropped, doubled, changed or two exchanged."""
    words = text.split(" ")
    place = rng.randrange(len(words))
    kind = rng.randrange(4)
    if kind == 0 and len(words) > 1:
        del words[place]
    elif kind == 1:
        words.insert(place, words[place])
    elif kind == 2 and place:
        words[place - 1], words[place] = words[place], words[place - 1]
    else:
        words[place] = words[place][::-1] or "x"
    return " ".join(words)


def mutated_value(value: Any, rng: random.Random) -> Any:
    """A JSON value with one scalar of another value or type, a key less, more or renamed, or an item less or more."""
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        changed = dict(value)
        kind = rng.random()
        if kind < 0.7:
            changed[key] = mutated_value(value[key], rng)
        elif kind < 0.8:
            del changed[key]
        elif kind < 0.9:
            changed["extra"] = "more"
        else:
            changed[f"{key}_"] = changed.pop(key)
        return changed
    if isinstance(value, list) and value:
        place = rng.randrange(len(value))
        kind = rng.random()
        if kind < 0.7:
            return [*value[:place], mutated_value(value[place], rng), *value[place + 1 :]]
        return value[:place] + value[place + 1 :] if kind < 0.85 else [*value, value[place]]
    if isinstance(value, bool):
        return rng.choice((not value, str(value).lower(), int(value), None))
    if isinstance(value, int | float):
        return rng.choice((value + 1, -value, str(value), None, float(value), value + 1e-7, True))
    if isinstance(value, str):
        return rng.choice((mutated_text(value, rng), value.upper(), f" {value}", "", None, 7, [value]))
    return rng.choice(("", "null", 0, False, {}, []))


def read(*paths: Path) -> list[dict[str, Any]]:
    """Rows of JSON Lines files, NeMo-Gym's own examples."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines() if line.strip()]


def asking(text: str, /, **fields: Any) -> dict[str, Any]:
    """A made-up row with one user message."""
    return {"responses_create_params": {"input": [{"role": "user", "content": text}]}, **fields}
