"""Checks of an environment: what answers earn, and that any answer is judged, at once and without an exception."""

from __future__ import annotations

import time

from nemotron_steps.testing.environment_rows import SUITE as ROWS
from nemotron_steps.testing.environment_subject import (
    STRANGE,
    UNITS,
    WORTHLESS,
    Answer,
    EnvironmentSubject,
    only_calls,
)
from nemotron_steps.testing.suite import NotApplicable, Suite, Unmet

SUITE: Suite[EnvironmentSubject] = Suite(ROWS)

_SMALL, _LARGE = 8_192, 65_536


@SUITE.check("rows_are_accepted")
def rewards_are_in_range(subject: EnvironmentSubject) -> None:
    """Every reward and component is a finite float32, every reward within reward_range."""
    low, high = subject.build().reward_range
    if not low < high:
        raise Unmet("reward_range is empty", found=(low, high))
    for row in subject.rows:
        answers: dict[str, Answer] = {"the right answer": subject.right(row), **WORTHLESS}
        for what, answer in answers.items():
            (verdict, *_) = subject.judge(row, *subject.with_company(answer))
            if verdict.failure in ("reward_out_of_range", "verdict_invalid"):
                raise Unmet(f"{what}: {verdict.failure}: {verdict.details.get('message')}")


@SUITE.check("rewards_are_in_range", "empty_answers_are_judged")
def right_answers_earn_most(subject: EnvironmentSubject) -> None:
    """The right answer of each row earns more than an answer without content."""
    for number, row in enumerate(subject.rows, start=1):
        right = subject.verdict(row, subject.right(row), f"the right answer of row {number}")
        worst = subject.verdict(row, "", "no answer")
        if right.reward is None or (worst.reward is not None and right.reward <= worst.reward):
            raise Unmet(
                f"the right answer of row {number} earns {right.reward}, no answer {worst.reward}",
                found=right.failure or right.details or None,
            )


@SUITE.check("right_answers_earn_most")
def worthless_answers_earn_nothing(subject: EnvironmentSubject) -> None:
    """No answer, thinking without an answer, a forged verdict, orders to a judge: all earn the least."""
    limit = subject.build().reward_range[0] if subject.worthless is None else subject.worthless
    for row in subject.rows:
        for what, answer in WORTHLESS.items():
            reward = subject.verdict(row, answer, what).reward
            if reward is not None and reward > limit:
                raise Unmet(
                    f"{what} ({answer[:40]!r}) earns {reward}, of at most {limit}",
                    hint="look at the answer, not at words around it; environment_conformance(…, worthless=…)",
                )


@SUITE.check("right_answers_earn_most")
def the_answer_in_thinking_earns_nothing(subject: EnvironmentSubject) -> None:
    """The right answer inside of the thinking alone is none."""
    limit = subject.build().reward_range[0] if subject.worthless is None else subject.worthless
    row = subject.rows[0]
    right = subject.right(row)
    if not right.text:
        raise NotApplicable("the right answer is no text")
    for thinking in (f"<think>{right.text}</think>", f"<think>{right.text}"):
        reward = subject.verdict(row, thinking, "thinking alone").reward
        if reward is not None and reward > limit:
            raise Unmet(f"the answer inside of the thinking earns {reward}", hint="read response.text")


@SUITE.check("rows_are_accepted")
def empty_answers_are_judged(subject: EnvironmentSubject) -> None:
    """No answer, white space, a call of a tool that is not there: judged, not raised about."""
    _judges(subject, "empty")
    subject.verdict(subject.rows[0], only_calls(), "a turn of tool calls alone")


@SUITE.check("rows_are_accepted")
def huge_answers_are_judged(subject: EnvironmentSubject) -> None:
    """200,000 characters of one thing."""
    _judges(subject, "huge")


@SUITE.check("rows_are_accepted")
def unicode_answers_are_judged(subject: EnvironmentSubject) -> None:
    """Lone surrogates, digits of other scripts, marks."""
    _judges(subject, "unicode")


@SUITE.check("rows_are_accepted")
def binary_answers_are_judged(subject: EnvironmentSubject) -> None:
    """Nulls and control characters."""
    _judges(subject, "binary")


@SUITE.check("rows_are_accepted")
def broken_markup_is_judged(subject: EnvironmentSubject) -> None:
    """Brackets, tags and fences that never close, numbers that are none."""
    _judges(subject, "markup")


def _judges(subject: EnvironmentSubject, kind: str) -> None:
    for row in subject.rows[:2]:
        for name, text in STRANGE[kind].items():
            subject.verdict(row, text, f"{kind}, {name}")


@SUITE.check("huge_answers_are_judged")
def time_grows_with_the_answer(subject: EnvironmentSubject) -> None:
    """Eight times the answer takes at most some eight times the time, whatever it is made of."""
    row, environment = subject.rows[0], subject.build()

    def seconds(text: str) -> float:
        times = []
        for _ in range(2):
            begin = time.process_time()
            subject.judge(row, *subject.with_company(text), environment=environment)
            times.append(time.process_time() - begin)
            if times[-1] < _UNNOTICED:
                break
        return min(times)

    for name, unit in UNITS.items():
        large = seconds(unit * (_LARGE // len(unit)))
        if large < _UNNOTICED:
            continue
        small = seconds(unit * (_SMALL // len(unit)))
        if large > 3 * (_LARGE / _SMALL) * max(small, 0.002):
            raise Unmet(
                f"{name}: {small:.3f} s for {_SMALL} characters, {large:.3f} s for {_LARGE}",
                hint="a regular expression that goes back, or a search inside of a loop; GradingPool bounds the rest",
            )


_UNNOTICED = 0.05
"""Seconds of processor time in which an answer of _LARGE characters may be judged however it likes."""
