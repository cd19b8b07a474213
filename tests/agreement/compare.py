"""Both verdicts on one answer, which rule explains a difference, and the count of a whole verifier."""

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
    """Both verdicts on `count` answers to the rows of a verifier."""
    module = importlib.import_module(f"tests.agreement.verifiers.{name}")
    rng = random.Random(f"{name} {seed}")
    rows = module.rows(gym, rng)
    theirs = module.theirs(gym)
    environment = create(name, getattr(module, "SETTINGS", {}), getattr(module, "JUDGES", {}))
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
    """The table's line of a verifier; prints the rules with examples of each."""
    module = importlib.import_module(f"tests.agreement.verifiers.{name}")
    rules = [*module.RULES, Rule("unexplained", lambda answer: True)]
    by_rule: dict[str, list[Answer]] = {rule.why: [] for rule in rules}
    for answer in answers:
        if not answer.agrees():
            by_rule[next(rule.why for rule in rules if rule.holds(answer))].append(answer)
    deviations = []
    for why, group in by_rule.items():
        if not group:
            continue
        print(f"{name}: {why}: {len(group)}")
        for answer in group[:examples]:
            print(f"  [{answer.label}] ours {_shown(answer.ours)}, theirs {_shown(answer.theirs)}")
            print(f"  {json.dumps(answer.items, ensure_ascii=False)[-900:]}")
        (ours, theirs), _ = Counter((_shown(each.ours), _shown(each.theirs)) for each in group).most_common(1)[0]
        deviations.append(Deviation(len(group), ours, theirs, why))
    agree = len(answers) - sum(each.count for each in deviations)
    print(f"{name}: {len(answers)} answers, {agree} agree")
    return Line(name, len(answers), agree, tuple(deviations))


def _shown(reward: Reward) -> str:
    return reward if isinstance(reward, str) else f"{reward:.2g}"
