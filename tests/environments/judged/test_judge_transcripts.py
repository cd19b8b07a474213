"""What judges said is kept beside the verdict: in the order of the questions, bounded, no word in part."""

import asyncio
from typing import Any

import pytest

from nemotron_steps.environments.base import GradeResult, Response, Session
from nemotron_steps.environments.judged.genrm_messages import verdict_text
from nemotron_steps.environments.judged.judge_transcripts import (
    MAX_NOTES,
    REASONING_CHARACTERS,
    VERDICT_CHARACTERS,
    cut,
    notes_from,
)
from nemotron_steps.environments.judged.judging import JudgedConfig, JudgedEnvironment, last_label
from nemotron_steps.environments.registry import create


class SlowFirst:
    """A judge that answers the first question last."""

    def __init__(self) -> None:
        self.asked = 0

    async def complete(self, messages: Any, *, temperature: float, top_p: float, max_tokens: int) -> str:
        self.asked += 1
        number = self.asked
        for _ in range(10 - number):
            await asyncio.sleep(0)
        return f"<think>thoughts on {messages[-1]['content']}</think>\nSo it is. [[YES]]"


class Asks(JudgedEnvironment):
    name = "asks"

    async def verify(self, row: Any, response: Any, session: Any) -> Any:
        read = last_label(["[[YES]]", "[[NO]]"])
        labels = await asyncio.gather(*(self.ask("", f"{response.text} {number}", read) for number in range(6)))
        return GradeResult(float(all(label == "[[YES]]" for label in labels)))


def verdicts(environment: Any, row: dict[str, Any], *texts: str) -> list[Any]:
    responses = [Response(text) for text in texts]
    return asyncio.run(environment.judge_group(row, responses, [Session() for _ in texts]))


def test_every_answer_has_the_notes_on_it_alone_in_the_order_of_the_questions(row: dict[str, Any]) -> None:
    environment = Asks(JudgedConfig(), {"judge_model": SlowFirst()})
    first, second = verdicts(environment, row, "one", "two")
    for verdict, text in ((first, "one"), (second, "two")):
        assert verdict.reward == 1.0
        assert verdict.details["judge"] == [
            {"reasoning": f"thoughts on {text} {number}", "verdict": "So it is. [[YES]]"} for number in range(MAX_NOTES)
        ]


def test_what_is_kept_of_a_long_reply_is_bounded(scripted: Any, row: dict[str, Any]) -> None:
    judge = scripted(lambda _: f"<think>{'so ' * 9000}</think>{'well ' * 9000}{verdict_text(4, 2, 2)}")
    found = verdicts(
        create("genrm_compare", {"comparison_strategy": "all_pairs"}, {"genrm_model": judge}), row, *"1234567"
    )
    for verdict in found:
        notes = verdict.details["judge"]
        assert len(notes) == MAX_NOTES
        for note in notes:
            assert len(note["reasoning"]) <= REASONING_CHARACTERS and len(note["verdict"]) <= VERDICT_CHARACTERS
            assert note["verdict"].endswith(verdict_text(4, 2, 2)[-20:])
    assert notes_from(found[0].details) == found[0].details["judge"]  # a text that was cut is not cut again


def test_a_cut_shows_no_word_in_part() -> None:
    secret = "sk-" + "a1B2" * 30
    for shift in range(0, 400, 7):
        shown = cut("x " * shift + secret + " y" * (600 - shift), 400)
        assert len(shown) <= 400
        assert secret in shown or not set("aB12") & set(shown)


@pytest.mark.parametrize(
    "details",
    [
        {"judge": "text"},
        {"judge": [1, "x", None, [], {}]},
        {"judge": [{"verdict": 3, "x" * 40: "a"}]},
    ],
)
def test_what_another_process_sends_for_notes_may_be_anything(details: Any) -> None:
    assert notes_from(details) == []
