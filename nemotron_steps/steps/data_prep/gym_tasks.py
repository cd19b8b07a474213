"""Questions of reasoning-gym, split so that no question is in two splits, and their grading by the library's own score.

A question's split follows from its text alone (a hash), never from the order in which it was drawn.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemotron_steps.config.schema.data_prep import ReasoningGymSource, ReasoningGymTask, SplitRows
from nemotron_steps.errors import ConfigError, DataError, UnknownNameError, UnsupportedError
from nemotron_steps.steps.data_prep.forms import PLAIN, Asked, ask
from nemotron_steps.steps.data_prep.split_files import SPLITS, Split

DRAWS_PER_QUESTION = 60
"""Draws before a task is said to have too few distinct questions: this many for each one wanted, and a thousand."""


@dataclass(frozen=True)
class Question:
    """One question with what its scorer needs."""

    text: str
    answer: str
    metadata: Mapping[str, Any]
    asked: Asked = PLAIN
    """The form it has in `text`."""

    @property
    def fields(self) -> dict[str, Any]:
        """The verifier fields of a row."""
        own = {"question": self.text, "answer": self.answer, "metadata": dict(self.metadata)}
        return {**own, **self.asked.fields}


def split_of(text: str, source: ReasoningGymSource) -> Split:
    """The split a question belongs to, by its text without what its form adds: the same in every form."""
    place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
    if place < source.heldout_fraction:
        return "heldout"
    return "validation" if place < source.heldout_fraction + source.validation_fraction else "train"


def draw_questions(source: ReasoningGymSource, rows: SplitRows) -> dict[Split, list[Question]]:
    """Distinct questions of every split, tasks mixed by weight, in an order drawn from the seed.

    Raises:
        UnknownNameError: the library has no such data set. ConfigError: it refuses an option.
        DataError: a task has fewer distinct questions than wanted.
    """
    wanted = {"train": rows.train or 0, "validation": rows.validation, "heldout": rows.heldout}
    drawn: dict[Split, list[Question]] = {split: [] for split in SPLITS}
    shares = {split: _quotas(source.tasks, wanted[split]) for split in SPLITS}
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
    total = sum(quotas.values())
    limit = DRAWS_PER_QUESTION * total + 1000
    dataset = _create_dataset(task, source.seed, limit)
    found: dict[Split, list[Question]] = {split: [] for split in SPLITS}
    seen: set[str] = set()
    missing = total
    for index in range(limit):
        if missing == 0:
            return found
        entry = dataset[index]
        text = entry["question"]
        if text in seen:
            continue
        seen.add(text)
        split = split_of(text, source)
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
    gym = load_library()
    from reasoning_gym.factory import DATASETS

    where = f"reasoning_gym.tasks dataset={task.dataset}"
    if task.dataset not in DATASETS:
        raise UnknownNameError(
            f"reasoning-gym has no data set `{task.dataset}`",
            where=where,
            expected="a data set of the installed reasoning-gym",
            hints=tuple(f"dataset: {name}" for name in difflib.get_close_matches(task.dataset, DATASETS, n=3)),
        )
    fields = {field.name for field in dataclasses.fields(DATASETS[task.dataset][1])} - {"seed", "size"}
    unknown = sorted(set(task.options) - fields)
    if unknown:
        raise ConfigError(
            f"`{task.dataset}` has no option `{unknown[0]}`",
            where=f"{where} options.{unknown[0]}",
            expected=", ".join(sorted(fields)),
            hints=tuple(f"options.{name}" for name in difflib.get_close_matches(unknown[0], fields, n=3)),
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


def load_library() -> Any:
    """The reasoning_gym module. UnsupportedError when it is not installed."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise UnsupportedError(
            "making questions needs the reasoning-gym package", found=str(error), hints=("pip install reasoning-gym",)
        ) from error
    return reasoning_gym


def _quotas(tasks: tuple[ReasoningGymTask, ...], rows: int) -> list[int]:
    """Rows of each task: proportional to its weight, largest remainders rounded up, sum exactly `rows`."""
    total = sum(task.weight for task in tasks)
    exact = [rows * task.weight / total for task in tasks]
    quotas = [int(share) for share in exact]
    by_remainder = sorted(range(len(tasks)), key=lambda i: (quotas[i] - exact[i], i))
    for i in by_remainder[: rows - sum(quotas)]:
        quotas[i] += 1
    return quotas
