"""Placeholders of public blends are filled in from the data sets that they name, and every other field stays."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.errors import ConfigError, DataError
from nemotron_steps.steps.data_prep.blends.placeholders import PlaceholderFiller, unwrapped
from tests.steps.data_prep.blends.conftest import write_lines

DAPO = [
    {
        "prompt": [{"role": "user", "content": f"Solve this.\n\nWhat is {n}+1?\n\nIt is even.\n\nRemember."}],
        "reward_model": {"ground_truth": str(n + 1), "style": "rule"},
    }
    for n in range(5)
]
SKYWORK = [
    {
        "prompt": [{"role": "user", "content": f"Find {n}."}],
        "reward_model": {"ground_truth": json.dumps([rf"\frac{{{n}}}2"])},
    }
    for n in range(5)
]


def row(dataset: str, number: Any, template: Any, **fields: Any) -> dict[str, Any]:
    return {"_hf_placeholder": {"row": number, "question_template": template}, "dataset": dataset, **fields}


@pytest.fixture
def filler(tmp_path: Path) -> PlaceholderFiller:
    write_lines(tmp_path / "dapo" / "data" / "dapo-math-17k.jsonl", DAPO)
    write_lines(tmp_path / "skywork" / "data" / "math-00000-of-00001.jsonl", SKYWORK)
    write_lines(tmp_path / "skywork" / "data" / "code-00000-of-00001.jsonl", DAPO)
    sources = {"dapo": str(tmp_path / "dapo"), "skywork": str(tmp_path / "skywork")}
    return PlaceholderFiller(sources, None)


def test_a_dapo_question_has_the_templates_words_in_place_of_its_own(filler: PlaceholderFiller):
    template = {"prefix": "Do it: ", "suffix": " Box it."}
    agent = {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"}
    given = row("nano_v3_sft_profiled_dapo17k", 3, template, agent_ref=agent, pass_rate=0.5)
    question = "Do it: What is 3+1?\n\nIt is even. Box it."
    assert filler.fill(given, "f:1") == {
        "dataset": "nano_v3_sft_profiled_dapo17k",
        "agent_ref": agent,
        "pass_rate": 0.5,
        "question": question,
        "expected_answer": "4",
        "responses_create_params": {"input": [{"role": "user", "content": question}]},
    }


@pytest.mark.parametrize(
    ("text", "question"), [("a", "a"), ("a\n\nb", "a\n\nb"), ("a\n\nb\n\nc", "b"), ("a\n\nb\n\nc\n\nd", "b\n\nc")]
)
def test_a_dapo_prompt_too_short_for_instructions_is_all_question(text: str, question: str, tmp_path: Path):
    rows = [{"prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": "1"}}]
    source = str(write_lines(tmp_path / "dapo.jsonl", rows))
    filler = PlaceholderFiller({"dapo": source}, None)
    assert filler.fill(row("dapo", 0, None), "f:1")["question"] == question


def test_a_skywork_question_goes_into_its_template_and_its_answer_out_of_its_list(filler: PlaceholderFiller):
    given = row("x_skywork_no_omni", 2, "Q: {question} A:", responses_create_params={"temperature": 1, "input": []})
    filled = filler.fill(given, "f:1")
    assert filled["responses_create_params"] == {
        "temperature": 1,
        "input": [{"role": "user", "content": "Q: Find 2. A:"}],
    }
    assert filled["expected_answer"] == r"\frac{2}2"


@pytest.mark.parametrize(
    ("stored", "answer"),
    [
        ("34", "34"),
        ('["34"]', "34"),
        ("[0, 1)", "[0, 1)"),
        ("[7]", "7"),
        ("[]", None),
    ],
)
def test_answers_are_unwrapped(stored: Any, answer: str | None):
    assert unwrapped(json.dumps(stored)) == answer


@pytest.mark.parametrize(
    ("given", "reason", "field"),
    [
        (row("other", 1, None), "unknown data set", "dataset"),
        (row("dapo", 5, None), "names no row of dapo", "_hf_placeholder.row"),
        (row("dapo", 1, "text"), "template cannot be used", "_hf_placeholder.question_template"),
    ],
)
def test_a_placeholder_that_points_to_nothing_is_refused_by_reason(filler: PlaceholderFiller, given, reason, field):
    with pytest.raises(DataError, match=reason) as caught:
        filler.fill(given, "f:7")
    assert caught.value.where == f"f:7 field {field}"


def test_a_missing_source_is_an_error_of_the_config_and_not_of_the_row(tmp_path: Path):
    filler = PlaceholderFiller({"dapo": str(tmp_path / "no")}, None)
    with pytest.raises(ConfigError, match="the blend has placeholders, and their source cannot be used") as caught:
        filler.fill(row("dapo", 1, None), "f:1")
    assert caught.value.where == "placeholders.dapo"
    assert caught.value.hints[0] == "placeholders.dapo=FOLDER_OR_FILE"
