"""Forms of made-up questions: what each asks for earns its environment's reward, and nothing else does."""

import asyncio

import pytest

from nemotron_steps.config.schema.data_prep import (
    ReasoningGymSource,
    ReasoningGymTask,
    RlPrepConfig,
    SplitRows,
)
from nemotron_steps.environments.base import Response, Session
from nemotron_steps.environments.registry import create, resolve
from nemotron_steps.steps.data_prep.gym_tasks import draw_questions
from nemotron_steps.steps.data_prep.rl_prep import gym_rows

pytest.importorskip("reasoning_gym")
ROWS = SplitRows(train=12, validation=4, heldout=4)


def source(form):
    return ReasoningGymSource(tasks=(ReasoningGymTask(dataset="spell_backward", form=form),))


async def graded(row, text):
    found = resolve(row["agent_ref"]["name"], {})
    assert found is not None
    environment = create(*found)
    environment.check_row(row, "row")
    try:
        return (await environment.verify(row, Response(text), Session("id"))).reward
    finally:
        await environment.close()


@pytest.mark.parametrize("form", ["instructed", "structured"])
def test_only_the_right_answer_in_the_form_that_was_asked_for_is_rewarded(form):
    questions = draw_questions(source(form), ROWS)["train"]
    rows = gym_rows(RlPrepConfig(reasoning_gym=source(form), rows=ROWS), source(form))["train"]
    for question, row in zip(questions, rows, strict=True):
        asked = question.asked.reply
        replies = [asked.replace("{answer}", question.answer), asked.replace("{answer}", "wrong"), question.answer]
        assert [asyncio.run(graded(row, reply)) for reply in replies] == [1.0, 0.0, 0.0], question.text
