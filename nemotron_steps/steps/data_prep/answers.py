"""Answers as a model of middling skill would give them: several styles, and slips. For making training data only."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from nemotron_steps.config.schema.data_prep import AnswerStyle

_GAPS = re.compile(r"(\s+)")


def write_answer(answer: str, styles: Sequence[AnswerStyle], rng: random.Random) -> str:
    """The answer in a style drawn by weight."""
    style = rng.choices(styles, [style.weight for style in styles])[0]
    return style.template.replace("{answer}", answer)


def slip(answer: str, rng: random.Random) -> str:
    """The answer with one slip: units swapped, dropped, doubled, replaced, overwritten by another one, or shuffled.

    Units are words where the answer has several, else characters. May return the answer itself (equal units swapped).
    """
    gaps = _GAPS.findall(answer)
    units = _GAPS.split(answer)[::2] if gaps else list(answer)
    if len(units) < 2:
        return answer + answer
    kind = rng.choices(("swap", "drop", "double", "replace", "overwrite", "shuffle"), (30, 15, 15, 15, 15, 10))[0]
    place = rng.randrange(len(units))
    if kind == "swap":
        left = rng.randrange(len(units) - 1)
        units[left], units[left + 1] = units[left + 1], units[left]
    elif kind == "drop":
        del units[place]
    elif kind == "double":
        units.insert(place, units[place])
    elif kind == "replace":
        unit = units[place]
        alphabet = "0123456789" if unit.isdigit() else "abcdefghijklmnopqrstuvwxyz"
        at = rng.randrange(len(unit))
        units[place] = unit[:at] + rng.choice([c for c in alphabet if c != unit[at].lower()]) + unit[at + 1 :]
    elif kind == "overwrite":
        units[place] = units[rng.choice([i for i in range(len(units)) if i != place])]
    else:
        rng.shuffle(units)
    separators = [*gaps, *gaps[-1:]] if gaps else []
    return "".join(unit + (separators[i] if gaps and i + 1 < len(units) else "") for i, unit in enumerate(units))
