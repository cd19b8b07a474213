"""Chats with controlled reasoning, preference pairs and comparisons, out of the layouts that public data sets have."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.config.schema.data_prep import (
    ComparisonConfig,
    PreferencePrepConfig,
    SftPrepConfig,
    SplitRows,
)
from nemotron_steps.engine.supervised.chat_tokens import chat_sequences
from nemotron_steps.environments.judged.genrm_compare import parse_reply
from nemotron_steps.errors import DataError
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.runs.context import plain_context
from nemotron_steps.steps.data_prep import preference_prep, sft_prep
from nemotron_steps.steps.data_prep.comparisons import comparison_rows
from nemotron_steps.steps.data_prep.preference_prep import preference_rows
from tests.steps.data_prep.blends.conftest import write_lines

ALL = SplitRows(validation=0)


def prepared(step: Any, config: Any, port: str, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(rows, accounting)."""
    context = plain_context(config, folder / "run", outputs={port: "sft_chats"})
    step.run(context)
    out = context.outputs[port].path
    rows = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    return rows, json.loads((out / "accounting.json").read_text())


def chats(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> list[dict[str, Any]]:
    path = write_lines(folder / "in.jsonl", rows)
    return prepared(sft_prep, SftPrepConfig(input_path=str(path), rows=ALL, **settings), "chats", folder)[0]


def thinking(number: int, words: int = 20, *, field: bool = False) -> dict[str, Any]:
    thought = " ".join(f"w{i}" for i in range(words))
    answer = {"content": f"<think>{thought}</think>It is {number}."}
    if field:
        answer = {"content": f"It is {number}.", "reasoning_content": thought}
    return {"messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", **answer}], "id": number}


class TestReasoningControl:
    def test_a_tenth_is_stripped_and_three_in_a_hundred_are_cut(self, tmp_path: Path):
        given = [thinking(n, field=bool(n % 2)) for n in range(2000)]
        made = chats(tmp_path, given, reasoning={"strip_share": 0.1, "truncate_share": 0.03, "budgets": [4, 7]})
        stripped = [row for row in made if "chat_template_kwargs" in row]
        cut = [row for row in made if "reasoning_budget" in row]
        assert 160 < len(stripped) < 240 and 40 < len(cut) < 80
        for row in stripped:
            assert row["messages"][-1] == {"role": "assistant", "content": f"It is {row['id']}."}
            assert row["chat_template_kwargs"] == {"enable_thinking": False}
        assert {row["reasoning_budget"] for row in cut} == {4, 7}
        for row in cut:
            said, thought = row["messages"][-1], " ".join(f"w{i}" for i in range(row["reasoning_budget"]))
            inline = said["content"] == f"<think>{thought}</think>It is {row['id']}."
            assert inline or (said["reasoning_content"], said["content"]) == (thought, f"It is {row['id']}.")
        assert [r for r in made if r not in stripped and r not in cut] == [
            given[r["id"]] for r in made if r not in stripped and r not in cut
        ]

    def test_a_rows_template_kwargs_reach_the_template_in_training(self, chat: ChatFormat):
        row = {**thinking(1), "messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "It."}]}
        quiet = {**row, "chat_template_kwargs": {"enable_thinking": False}}
        texts = [
            chat.tokenizer.decode(chat_sequences(chat, r["messages"], "f:1", r)[-1].token_ids) for r in (row, quiet)
        ]
        assert "<think>" in texts[0].replace(" ", "") and "<think>" not in texts[1].replace(" ", "")
        with pytest.raises(DataError, match="`chat_template_kwargs` must be an object") as caught:
            chat_sequences(chat, row["messages"], "f:1", {**row, "chat_template_kwargs": "no"})
        assert caught.value.where == "f:1 field chat_template_kwargs"


@pytest.fixture
def chat(tmp_path: Path) -> ChatFormat:
    """A format whose template thinks unless it is told not to."""
    from nemotron_steps.config.schema.data_prep import TokenizerTrainingConfig

    sft_prep.write_tokenizer([thinking(n) for n in range(30)], TokenizerTrainingConfig(), tmp_path / "tokenizer")
    made = ChatFormat.from_folder(tmp_path / "tokenizer")
    think = "{% if enable_thinking is not defined or enable_thinking %}<think></think>{% endif %}"
    made.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + think + "{{ m.content }}{{ eos_token }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}" + think + "{% endif %}"
    )
    return made


ASKED = [{"role": "user", "content": "Why?"}]
HELPSTEER: Callable[[int], dict[str, Any]] = lambda preference: {  # noqa: E731
    "domain": "general",
    "context": ASKED,
    "response1": "one",
    "response2": "two",
    "overall_preference": preference,
    "individual_preference": [],
}
LAYOUTS = {
    "helpsteer": HELPSTEER(-2),
    "lmarena_140k": {
        "conversation_a": [*ASKED, {"role": "assistant", "content": [{"type": "text", "text": "one"}]}],
        "conversation_b": [*ASKED, {"role": "assistant", "content": "two"}],
        "winner": "model_a",
    },
    "lmarena_55k": {
        "prompt": '["Why?"]',
        "response_a": '["one"]',
        "response_b": '["two"]',
        "winner_model_a": 1,
        "winner_model_b": 0,
        "winner_tie": 0,
    },
}


def pairs(folder: Path, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    path = write_lines(folder / "in.jsonl", rows)
    return prepared(preference_prep, PreferencePrepConfig(input_path=str(path), rows=ALL), "preferences", folder)


class TestPreferences:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_every_layout_gives_the_same_pair(self, tmp_path: Path, layout: str):
        (pair,), _ = pairs(tmp_path, [LAYOUTS[layout]])
        assert pair == {"prompt": ASKED, "chosen": "one", "rejected": "two", "preference": 2}

    @pytest.mark.parametrize(
        ("row", "why"),
        [
            (
                {**HELPSTEER(1), "context": [*ASKED, {"role": "assistant", "content": "x"}]},
                "does not end with a message",
            ),
            ({"prompt": "a", "chosen": 1, "rejected": "c"}, "chosen"),
        ],
    )
    def test_what_is_no_pair_is_refused(self, row: dict[str, Any], why: str):
        with pytest.raises(DataError, match=why):
            preference_rows()("f:1", row)

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"overall_preference": 4}, "overall_preference"),
            ({"response2": None}, "response2"),
        ],
    )
    def test_a_row_that_lacks_something_names_the_field(self, tmp_path: Path, change: dict[str, Any], field: str):
        with pytest.raises(DataError) as caught:
            pairs(tmp_path, [{**HELPSTEER(1), **change}])
        assert caught.value.where == f"{tmp_path}/in.jsonl:1 field {field}"


class TestComparisons:
    def chats(self, folder: Path, rows: list[dict[str, Any]], **settings: Any) -> list[dict[str, Any]]:
        return chats(folder, rows, kind="comparisons", comparisons=settings)

    @pytest.mark.parametrize(
        ("preference", "verdict"),
        [(-3, (5, 1, 1)), (-2, (4, 2, 2)), (-1, (4, 3, 3)), (1, (3, 4, 4)), (2, (2, 4, 5)), (3, (1, 5, 6))],
    )
    def test_the_verdict_is_the_preference_on_the_judges_scale(self, tmp_path: Path, preference, verdict):
        (row,) = self.chats(tmp_path, [HELPSTEER(preference)], layout="roles")
        assert [m["role"] for m in row["messages"]] == ["user", "response_1", "response_2", "assistant"]
        assert parse_reply(row["messages"][-1]["content"], 3.0, 3.5) == verdict

    @pytest.mark.parametrize(
        ("given", "verdict"),
        [({}, (4, 2, 2)), ({"preference": 3}, (5, 1, 1)), ({"preference": 1}, (4, 3, 3)), ({"swap": True}, (4, 2, 2))],
    )
    def test_of_a_pair_the_chosen_answer_is_the_first_and_the_better_one(self, given: dict[str, Any], verdict):
        said = [*ASKED, {"role": "assistant", "content": "one"}]
        row = {"prompt": "Why?", "chosen": said if given.pop("swap", False) else "one", "rejected": "two", **given}
        (made,) = comparison_rows(ComparisonConfig(layout="roles"))("f:1", row) or ()
        assert [m["content"] for m in made["messages"][:3]] == ["Why?", "one", "two"]
        assert parse_reply(made["messages"][-1]["content"], 3.0, 3.5) == verdict
