"""Both verdicts on one answer, which rule explains a difference, and the count of a whole verifier."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import json
import pkgutil
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nemotron_steps.environments.base import Environment
from nemotron_steps.environments.registry import create
from nemotron_steps.environments.responses import Response
from nemotron_steps.errors import DataError
from tests.agreement import verifiers
from tests.agreement.gym import Gym, Items
from tests.agreement.table import Deviation, Line

Reward = float | str
"""A number, or why there is none."""


@dataclass(frozen=True)
class Answer:
    """One answer, and both verdicts."""

    row: dict[str, Any]
    label: str
    items: Items
    ours: Reward
    theirs: Reward
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """All messages, one after the other."""
        parts = [part for item in self.items if item["type"] == "message" for part in item["content"]]
        return "".join(part["text"] for part in parts)

    @property
    def final(self) -> str:
        """The last message as ours reads it."""
        return Response.from_output(self.items).text

    def agrees(self) -> bool:
        """Whether the rewards are the same."""
        if isinstance(self.ours, str) or isinstance(self.theirs, str):
            return False
        return abs(self.ours - self.theirs) <= 1e-6


@dataclass(frozen=True)
class Rule:
    """Why some verdicts differ on purpose: the first rule of a verifier that holds for an answer explains it."""

    why: str
    holds: Callable[[Answer], bool]


FINAL_MESSAGE = Rule(
    "the answer is the last message (there all of them joined) without its `<think>` block (split off there by the"
    " model server, not by the verifier), and an empty one earns nothing",
    lambda answer: answer.text != answer.final or not answer.final.strip(),
)
MASKED = Rule("an answer that the grader cannot take is masked", lambda answer: isinstance(answer.ours, str))
"""Rules that many verifiers share."""


def names() -> list[str]:
    """Verifiers that can be compared."""
    return [module.name for module in pkgutil.iter_modules(verifiers.__path__)]


async def compare(gym: Gym, name: str, count: int, seed: int) -> list[Answer]:
    """Both verdicts on `count` answers to the rows of a verifier, whose module may do it by itself (`compared`)."""
    module = importlib.import_module(f"tests.agreement.verifiers.{name}")
    if hasattr(module, "compared"):
        return list(await module.compared(gym, count, seed))
    return await graded(gym, name, module, count, seed)


async def graded(gym: Gym, name: str, module: Any, count: int, seed: int) -> list[Answer]:
    """Both verdicts on `count` answers to the rows of a module, or of what has the names of one, for an environment."""
    rng = random.Random(f"{name} {seed}")
    rows = module.rows(gym, rng)
    theirs = module.theirs(gym)
    settings = module.settings(gym) if hasattr(module, "settings") else {}
    environment = create(name, settings, getattr(module, "JUDGES", {}))
    refused = [_refused(environment, row, f"{name}:{number + 1}") for number, row in enumerate(rows)]
    await environment.start()
    try:
        found: list[Answer] = []
        for start in range(0, count, 16):
            numbers = [n % len(rows) for n in range(start, min(count, start + 16))]
            drawn = [(rows[n], *module.answer(rows[n], rng)) for n in numbers]
            both = (_both(environment, theirs, refused[n], *each) for n, each in zip(numbers, drawn, strict=True))
            with contextlib.redirect_stdout(io.StringIO()):  # their graders print what they could not read
                graded = await asyncio.gather(*both)
            found += [Answer(*each, *verdicts) for each, verdicts in zip(drawn, graded, strict=True)]
        return found
    finally:
        await environment.close()


def _refused(environment: Environment, row: dict[str, Any], where: str) -> str:
    try:
        environment.check_row_with_resources(row, where)
    except DataError as error:
        return f"refused: {error.what}"
    return ""


async def _both(
    environment: Environment, theirs: Any, refused: str, row: dict[str, Any], label: str, items: Items
) -> tuple[Reward, Reward, dict[str, Any]]:
    given = await theirs(row, items)
    if refused:
        return refused, given, {}
    session = await environment.seed_recorded(row)
    try:
        [verdict] = await environment.judge_group(row, [Response.from_output(items)], [session])
    finally:
        await environment.release(session)
    ours = f"masked: {verdict.failure}" if verdict.reward is None else verdict.reward
    return ours, given, verdict.details


def line_of(name: str, answers: list[Answer], examples: int) -> Line:
    """The table's line of a verifier; prints the mix, the rules and examples of each."""
    module = importlib.import_module(f"tests.agreement.verifiers.{name}")
    differing = [answer for answer in answers if not answer.agrees()]
    paid = sum(answer.theirs == 1.0 for answer in answers)
    print(f"\n{name}: {len(answers)} answers, {paid} of them 1 there, {len(answers) - len(differing)} agree", end="")
    print(f" ({100 - 100 * len(differing) / len(answers):.1f} %)")
    mix, apart = Counter(answer.label for answer in answers), Counter(answer.label for answer in differing)
    print("  mix (answers, differing): " + ", ".join(f"{label} {n}, {apart[label]}" for label, n in mix.most_common()))
    rules = [*module.RULES, Rule("unexplained", lambda answer: True)]
    by_rule: dict[str, list[Answer]] = {rule.why: [] for rule in rules}
    for answer in differing:
        by_rule[next(rule.why for rule in rules if rule.holds(answer))].append(answer)
    deviations = []
    for why, group in by_rule.items():
        if not group:
            continue
        verdicts = Counter((_shown(answer.ours), _shown(answer.theirs)) for answer in group)
        print(f"  {why}: {len(group)}")
        for (ours, theirs), number in verdicts.most_common():
            print(f"    ours {ours}, theirs {theirs}: {number}")
            shown = [answer for answer in group if (_shown(answer.ours), _shown(answer.theirs)) == (ours, theirs)]
            for answer in shown[:examples]:
                print(f"      [{answer.label}] {json.dumps(answer.items, ensure_ascii=False)[-900:]}")
                print(f"         details {json.dumps(answer.details, default=str)[:400]}")
        (ours, theirs), _ = verdicts.most_common(1)[0]
        deviations.append(Deviation(len(group), ours, theirs, why))
    return Line(name, len(answers), len(answers) - len(differing), tuple(deviations))


def _shown(reward: Reward) -> str:
    return reward if isinstance(reward, str) else f"{reward:.2g}"
