"""Which teacher a row has, and what is refused."""

import pytest

from nemotron_steps.config.schema.opd import OnPolicyDistillationConfig
from nemotron_steps.engine.setup.rows import TeacherChoice
from nemotron_steps.errors import DataError

TWO = {"teachers": {"math": "m", "chat": "c"}}


def choice(only=None, **settings):
    return TeacherChoice(OnPolicyDistillationConfig.model_validate(settings), only=only)


def row(agent, **fields):
    return {"agent_ref": {"name": agent}, **fields}


def test_an_agent_a_field_or_the_default_names_the_teacher():
    by_agent = {"math_agent": "math", "chat_agent": "chat"}
    chosen = choice(**TWO, teacher_model_by_agent_name=by_agent, teacher_field="teacher")
    assert chosen.of(row("math_agent"), "f:1") == "math"
    assert chosen.of(row("chat_agent", teacher=None), "f:1") == "chat"
    assert chosen.of(row("math_agent", teacher="chat"), "f:1") == "chat"
    assert choice(**TWO, default_teacher_alias="chat").of(row("other"), "f:1") == "chat"
    assert choice(**TWO, only="mcqa", teacher_model_by_agent_name={"mcqa": "math"}).of({}, "f:1") == "math"


def test_a_row_without_a_teacher_is_refused_with_what_gives_it_one():
    with pytest.raises(DataError, match="no teacher for rows of 'other'") as caught:
        choice(**TWO, teacher_model_by_agent_name={"math_agent": "math"}).of(row("other"), "rows.jsonl:7")
    assert caught.value.where == "rows.jsonl:7"
    assert caught.value.hints[0] == "+on_policy_distillation.teacher_model_by_agent_name.other=math"
