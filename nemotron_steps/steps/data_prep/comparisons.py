"""Comparison chats: what a generative reward model is asked and how it should reply, labelled by the task's own score.
The reply works the answer out and checks both: a small model learns to judge only what it can write down."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from nemotron_steps.config.schema.data_prep import ComparisonConfig
from nemotron_steps.environments.base import EnvironmentConfig
from nemotron_steps.environments.judged.genrm_messages import (
    ATTACK_ANSWERS,
    EMPTY_ANSWER,
    comparison_messages,
    is_contentless,
    neutralize,
    verdict_text,
)
from nemotron_steps.environments.responses import split_reasoning
from nemotron_steps.environments.text.reasoning_gym import ReasoningGym, extract_answer
from nemotron_steps.rows.lines import Row
from nemotron_steps.rows.messages import texts_of, wrong
from nemotron_steps.steps.data_prep.blends.shards import RowFunction, RowLeftOut
from nemotron_steps.steps.data_prep.gym_tasks import Question, slip, write_answer
from nemotron_steps.steps.data_prep.preference_prep import answer_pair

RIGHT = 5
WRONG = 1
"""Judge's scores of an answer that the task's own score calls fully right, and of any other."""

FULL_SCORE = 0.999
REDRAWS = 20
"""Second answers drawn before a pair without a preference is taken as it is."""


class ComparisonMaker:
    """Makes comparison chats."""

    def __init__(self, config: ComparisonConfig, pool: Sequence[Question]) -> None:
        self._config = config
        self._pool = pool
        self._attacks = ("", *(attack for attack in ATTACK_ANSWERS if len(attack) <= config.max_attack_chars))
        self._grader = ReasoningGym(EnvironmentConfig(), {})
        self._assessed: dict[tuple[str, str], Assessment] = {}

    def chat(self, question: Question, rng: random.Random) -> dict[str, Any]:
        """One row: `messages`, the question itself, and the grades of both answers for whoever checks the label."""
        answers = self._answer(question, rng), self._answer(question, rng)
        for _ in range(REDRAWS):
            # The same answer twice is worth showing as it is.
            first, second = (self._assess(question, answer).key for answer in answers)
            if answers[0] == answers[1] or first != second:
                break
            answers = answers[0], self._answer(question, rng)
        return self.row(question, *answers)

    def row(self, question: Question, answer_1: str, answer_2: str) -> dict[str, Any]:
        """The comparison chat of two given answers."""
        conversation = [{"role": "user", "content": question.text}]
        # As genrm_compare shows them: an answer that says nothing is an empty one.
        shown_1, shown_2 = ("" if is_contentless(answer) else answer for answer in (answer_1, answer_2))
        asked = comparison_messages(conversation, shown_1, shown_2, None, self._config.layout)
        first, second = self._assess(question, answer_1), self._assess(question, answer_2)
        work = f"{question.answer} | {first.work} | {second.work}"
        # Much better where the scores differ; hardly where they tie and only the key differs.
        ranking = (3 if first.key >= second.key else 4) if first.right == second.right else 1 if first.right else 6
        reply = f"<think>{work}</think>{verdict_text(first.score, second.score, ranking)}"
        return {
            "messages": [*asked, {"role": "assistant", "content": reply}],
            "question": question.text,
            "right": [first.right, second.right],
        }

    def _answer(self, question: Question, rng: random.Random) -> str:
        config = self._config
        draw = rng.random()
        if draw < config.attack_rate:
            return rng.choice(self._attacks)
        answer = question.answer
        if draw < config.attack_rate + config.foreign_rate:
            answer = rng.choice(self._pool).answer
        elif rng.random() < config.slip_rate:
            answer = slip(answer, rng)
        return write_answer(answer, config.styles, rng)

    def _assess(self, question: Question, answer: str) -> Assessment:
        known = (question.text, answer)
        if known not in self._assessed:
            right = (self._grader.grade(question.fields, answer).reward or 0.0) >= FULL_SCORE
            given = EMPTY_ANSWER if is_contentless(answer) else neutralize(extract_answer(answer))
            same = takewhile(lambda pair: pair[0] == pair[1], zip(given, question.answer, strict=False))
            agreed = sum(1 for _ in same)
            # A wrong answer is copied up to and including its first wrong character: the copy is then there to see.
            work = f"{given} yes" if right else f"{given[: agreed + 1]} no"
            self._assessed[known] = Assessment(right, agreed, len(answer.strip()), work)
        return self._assessed[known]


@dataclass(frozen=True)
class Assessment:
    """What the rule says of one answer."""

    right: bool
    agreed: int
    """Characters from the start that agree with the reference answer."""
    length: int
    work: str

    @property
    def score(self) -> int:
        """The judge's score."""
        return RIGHT if self.right else WRONG

    @property
    def key(self) -> tuple[bool, int]:
        """Larger is better: right before wrong, a shorter right answer, a wrong answer that is right for longer."""
        return (True, -self.length) if self.right else (False, self.agreed)


RANKINGS = {-3: 1, -2: 2, -1: 3, 1: 4, 2: 5, 3: 6}
SCORES = {1: (4, 3), 2: (4, 2), 3: (5, 1)}


def comparison_rows(config: ComparisonConfig) -> RowFunction:
    """Of the user's own pairs: a comparison chat each, its ranking the preference, 1 (the first much better) to 6."""

    def become(where: str, row: Row) -> list[Row]:
        pair = answer_pair(row, where)
        if pair.preference == 0:
            raise RowLeftOut("neither answer is preferred")
        # As genrm_compare shows them: without reasoning, and one that says nothing as an empty one.
        answers = [split_reasoning(answer)[1] for answer in (pair.answer_1, pair.answer_2)]
        shown = ["" if is_contentless(answer) else answer for answer in answers]
        principle = pair.principle or config.principle
        talk = [{"role": m["role"], "content": texts_of(m)} for m in pair.conversation]
        asked = comparison_messages(talk, shown[0], shown[1], principle, config.layout)
        reply = verdict_text(*_scores(row, pair.preference, where), RANKINGS[pair.preference])
        return [{"messages": [*asked, {"role": "assistant", "content": reply}], "preference": pair.preference}]

    return become


def _scores(row: Row, preference: int, where: str) -> tuple[int, int]:
    given = row.get("helpfulness_1"), row.get("helpfulness_2")
    if given != (None, None):
        for number, score in enumerate(given, start=1):
            if isinstance(score, bool) or not isinstance(score, int) or not 1 <= score <= 5:
                field = f"helpfulness_{number}"
                raise wrong(f"{field} must be a whole number from 1 to 5", where, field, found=score)
        return given[0], given[1]  # type: ignore[return-value]
    better, worse = SCORES[abs(preference)]
    return (better, worse) if preference < 0 else (worse, better)
