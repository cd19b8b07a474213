"""Questions of reasoning-gym, the forms they are asked in, and answers as a model of middling skill would give them. A
question's split follows from a hash of its text alone."""

from __future__ import annotations

import difflib
import hashlib
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemotron_steps.config.schema.data_prep import (
    AnswerStyle,
    QuestionForm,
    ReasoningGymSource,
    ReasoningGymTask,
    SplitRows,
)
from nemotron_steps.errors import ConfigError, DataError, UnknownNameError, UnsupportedError
from nemotron_steps.steps.data_prep.blends.splits import SPLITS, Split, split_at, wanted_rows

DRAWS_PER_QUESTION = 60
"""Draws before a task is said to have too few distinct questions: this many for each one wanted, and a thousand."""


def draw_questions(source: ReasoningGymSource, rows: SplitRows) -> dict[Split, list[Question]]:
    """Distinct questions of every split, tasks mixed by weight, in an order drawn from the seed."""
    drawn: dict[Split, list[Question]] = {split: [] for split in SPLITS}
    shares = {split: _quotas(source.tasks, count) for split, count in wanted_rows(rows).items()}
    for position, task in enumerate(source.tasks):
        quotas = {split: shares[split][position] for split in SPLITS}
        for split, questions in _draw_task(task, source, quotas).items():
            drawn[split] += questions
    for split in SPLITS:
        random.Random(f"{source.seed}:{split}").shuffle(drawn[split])
    return drawn


def _draw_task(
    task: ReasoningGymTask, source: ReasoningGymSource, quotas: Mapping[Split, int]
) -> dict[Split, list[Question]]:
    missing = sum(quotas.values())
    limit = DRAWS_PER_QUESTION * missing + 1000
    dataset = _create_dataset(task, source.seed, limit)
    found: dict[Split, list[Question]] = {split: [] for split in SPLITS}
    seen: set[str] = set()
    for index in range(limit):
        if missing == 0:
            break
        entry = dataset[index]
        text = entry["question"]
        if text in seen:
            continue
        seen.add(text)
        # The same in every form: by the text without what its form adds.
        place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
        split = split_at(place, source.heldout_fraction, source.validation_fraction)
        if len(found[split]) < quotas[split]:
            asked = ask(task.form, text, entry["answer"])
            found[split].append(Question(text + asked.suffix, entry["answer"], entry["metadata"], asked))
            missing -= 1
    if missing == 0:
        return found
    short = next(split for split in SPLITS if len(found[split]) < quotas[split])
    raise DataError(
        f"task `{task.dataset}` has too few distinct questions for the {short} split",
        where=f"reasoning_gym.tasks dataset={task.dataset}",
        expected=f"{quotas[short]} questions",
        found=f"{len(found[short])} among {len(seen)} distinct ones in {limit} draws",
        hints=(f"rows.{short}={len(found[short])}",),
    )


def _create_dataset(task: ReasoningGymTask, seed: int, size: int) -> Any:
    try:
        import reasoning_gym as gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UnsupportedError(
            "making questions needs the reasoning-gym package", found=str(error), hints=("pip install reasoning-gym",)
        ) from error

    where = f"reasoning_gym.tasks dataset={task.dataset}"
    if task.dataset not in DATASETS:
        raise UnknownNameError(
            f"reasoning-gym has no data set `{task.dataset}`",
            where=where,
            hints=tuple(f"dataset: {name}" for name in difflib.get_close_matches(task.dataset, DATASETS, n=3)),
        )
    try:
        return gym.create_dataset(task.dataset, seed=seed, size=size, **task.options)
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(
            f"`{task.dataset}` refuses its options: {error}",
            where=f"{where} options",
            found=repr(task.options),
            hints=(f"'reasoning_gym.tasks=[{{dataset: {task.dataset}}}]'   # with its own options",),
        ) from error


def _quotas(tasks: tuple[ReasoningGymTask, ...], rows: int) -> list[int]:
    """Rows of each task: proportional to its weight, largest remainders rounded up, sum exactly `rows`."""
    total = sum(task.weight for task in tasks)
    exact = [rows * task.weight / total for task in tasks]
    quotas = [int(share) for share in exact]
    by_remainder = sorted(range(len(tasks)), key=lambda i: (quotas[i] - exact[i], i))
    for i in by_remainder[: rows - sum(quotas)]:
        quotas[i] += 1
    return quotas


@dataclass(frozen=True)
class Asked:
    """How a question is asked, and what grades it where it is not the preparation's own agent."""

    suffix: str = ""
    reply: str | None = None
    """One that does as asked, with {answer} in it; None where any reply with the answer does."""
    agent: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """One question with what its scorer needs."""

    text: str
    answer: str
    metadata: Mapping[str, Any]
    asked: Asked = Asked()

    @property
    def fields(self) -> dict[str, Any]:
        """The verifier fields of a row."""
        own = {"question": self.text, "answer": self.answer, "metadata": dict(self.metadata)}
        return {**own, **self.asked.fields}


_INSTRUCTIONS: tuple[tuple[str, dict[str, Any] | None, str, str], ...] = (
    ("detectable_format:title", None, "Put it in angular brackets, like <<this>>.", "<<{answer}>>"),
    ("startend:quotation", None, "Wrap your whole reply in quotation marks.", '"{answer}"'),
    ("startend:end_checker", {"end_phrase": "That is all."}, "End with: That is all.", "{answer} That is all."),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 1},
        "Highlight it, like *this*.",
        "*{answer}*",
    ),
)
"""Instruction id, its arguments, how it is said, and a reply that follows it."""


def ask(form: QuestionForm, text: str, answer: str) -> Asked:
    """A question in a form. Which instruction it gets follows from its text alone."""
    if form == "instructed":
        place = int.from_bytes(hashlib.sha256(f"form:{text}".encode()).digest()[:4], "big") % len(_INSTRUCTIONS)
        name, arguments, said, reply = _INSTRUCTIONS[place]
        # The answer has to be there too: an instruction by itself is followed as well by a wrong one.
        fields = {
            "instruction_id_list": [name, "keywords:existence"],
            "kwargs": [arguments, {"keywords": [answer]}],
            "grading_mode": "binary",
        }
        return Asked(f" {said}", reply, "instruction_following_simple_agent", fields)
    if form == "structured":
        schema = {"type": "object", "properties": {"answer": {"type": "string", "const": answer}}}
        fields = {"schema_str": json.dumps(schema), "schema_type": "json"}
        said = ' Reply in JSON, like {"answer": "this"}.'
        return Asked(said, '{"answer": "{answer}"}', "structured_outputs_simple_agent", fields)
    return Asked()


_GAPS = re.compile(r"(\s+)")


def write_answer(answer: str, styles: Sequence[AnswerStyle], rng: random.Random) -> str:
    """The answer in a style drawn by weight."""
    style = rng.choices(styles, [style.weight for style in styles])[0]
    return style.template.replace("{answer}", answer)


def slip(answer: str, rng: random.Random) -> str:
    """The answer with one slip: units swapped, dropped, doubled, replaced, overwritten by another one, or shuffled."""
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
