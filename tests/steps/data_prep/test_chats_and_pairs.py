"""Chats with controlled reasoning, preference pairs and comparisons, out of the layouts that public data sets have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.config.schema.data_prep import (
    ComparisonConfig,
    PreferencePrepConfig,
    ReasoningControlConfig,
    SftPrepConfig,
    SplitRows,
)
from nemotron_steps.engine.supervised.chat_tokens import encode_chat
from nemotron_steps.environments.judged.genrm_scores import parse_reply
from nemotron_steps.errors import DataError
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.runs.context import plain_context
from nemotron_steps.steps.data_prep import preference_prep, sft_prep
from nemotron_steps.steps.data_prep.blends.shards import RowLeftOut
from nemotron_steps.steps.data_prep.comparisons import ComparisonWork
from nemotron_steps.steps.data_prep.preference_prep import PreferenceWork
from nemotron_steps.steps.data_prep.sft_prep import ReasoningControl
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

    def test_shares_that_add_up_to_one_leave_no_chat_as_it_is(self, tmp_path: Path):
        made = chats(
            tmp_path,
            [thinking(n) for n in range(40)],
            reasoning={"strip_share": 0.5, "truncate_share": 0.5, "budgets": [4]},
        )
        assert all(("chat_template_kwargs" in row) != ("reasoning_budget" in row) for row in made)

    def test_chats_without_reasoning_and_short_ones_stay(self, tmp_path: Path):
        plain = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
        assert chats(tmp_path, [plain] * 9, reasoning={"strip_share": 1.0}) == [plain] * 9
        short = [thinking(n, words=3) for n in range(9)]
        assert chats(tmp_path, short, reasoning={"truncate_share": 1.0, "budgets": [3]}) == short

    def test_reasoning_is_cut_at_the_tokenizers_tokens_where_there_is_one(self, monkeypatch: pytest.MonkeyPatch):
        def letters(text: str, **_: Any) -> dict[str, Any]:
            return {"offset_mapping": [(place, place + 1) for place in range(len(text))]}

        monkeypatch.setattr(ChatFormat, "from_folder", lambda folder: SimpleNamespace(tokenizer=letters))
        settings = {"truncate_share": 1.0, "budgets": [3], "tokenizer": "folder"}
        control = ReasoningControl(ReasoningControlConfig.model_validate(settings))

        def cut(thought: str) -> Any:
            said = {"role": "assistant", "content": f"<think>{thought}</think>So."}
            found = control({"messages": [*ASKED, said]})
            return found and (found["messages"][-1]["content"], found["reasoning_budget"])

        assert (cut("abcd"), cut("abc")) == (("<think>abc</think>So.", 3), None)

    def test_thinking_that_never_ends_is_no_reasoning_and_other_kwargs_stay(self):
        control = ReasoningControl(ReasoningControlConfig(strip_share=1.0))
        said = {"role": "assistant", "content": "<think>so"}
        assert control({"messages": [*ASKED, said]}) is None
        row = {**thinking(1), "chat_template_kwargs": {"mine": 1, "enable_thinking": True}}
        assert (control(row) or {})["chat_template_kwargs"] == {"mine": 1, "enable_thinking": False}

    def test_another_seed_strips_other_chats(self):
        def stripped(seed: int) -> set[int]:
            control = ReasoningControl(ReasoningControlConfig(strip_share=0.5, seed=seed))
            return {n for n in range(40) if control(thinking(n)) is not None}

        assert stripped(1) == stripped(1) != stripped(2)

    def test_of_several_answers_the_last_one_is_cut(self, tmp_path: Path):
        turns = [message for number in (1, 2) for message in thinking(number)["messages"]]
        (row,) = chats(tmp_path, [{"messages": turns}], reasoning={"truncate_share": 1.0, "budgets": [2]})
        assert row["messages"][:3] == turns[:3]
        assert row["messages"][3]["content"] == "<think>w0 w1</think>It is 2."

    def test_low_effort_is_asked_for_in_the_last_user_message(self, tmp_path: Path):
        (row,) = chats(tmp_path, [{**thinking(1), "reasoning_effort": "low"}])
        assert row["messages"][0]["content"] == "1?\n\n{reasoning effort: low}"
        (plain,) = chats(tmp_path, [{**thinking(1), "reasoning_effort": "high"}])
        assert plain["messages"] == thinking(1)["messages"]

    def test_reasoning_is_controlled_where_low_effort_is_asked_for_as_well(self, tmp_path: Path):
        low = {**thinking(1), "reasoning_effort": "low"}
        (row,) = chats(tmp_path, [low], reasoning={"strip_share": 1.0})
        assert row["messages"] == [
            {"role": "user", "content": "1?\n\n{reasoning effort: low}"},
            {"role": "assistant", "content": "It is 1."},
        ]
        assert row["chat_template_kwargs"] == {"enable_thinking": False}

    def test_a_rows_template_kwargs_reach_the_template_in_training(self, chat: ChatFormat):
        row = {**thinking(1), "messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "It."}]}
        quiet = {**row, "chat_template_kwargs": {"enable_thinking": False}}
        texts = [chat.tokenizer.decode(encode_chat(chat, r["messages"], "f:1", r).token_ids) for r in (row, quiet)]
        assert "<think>" in texts[0].replace(" ", "") and "<think>" not in texts[1].replace(" ", "")
        with pytest.raises(DataError, match="`chat_template_kwargs` must be an object") as caught:
            encode_chat(chat, row["messages"], "f:1", {**row, "chat_template_kwargs": "no"})
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

    def test_the_sign_says_which_answer_is_chosen_and_ties_are_left_out(self, tmp_path: Path):
        made, told = pairs(tmp_path, [HELPSTEER(preference) for preference in (-3, 0, 1)])
        assert [(row["chosen"], row["preference"]) for row in made] == [("one", 3), ("two", 1)]
        assert told["left_out_by_reason"] == {"neither answer is preferred": 1}

    def test_rows_that_give_no_pair_are_left_out_by_reason(self, tmp_path: Path):
        def battle(*sides: list[str], winner: str = "model_a", system: str = "a") -> dict[str, Any]:
            """Two conversations, each told by its turns."""
            told = [
                [{"role": "user" if i % 2 == 0 else "assistant", "content": t} for i, t in enumerate(s)] for s in sides
            ]
            first = [[{"role": "system", "content": text}] for text in ("a", system)]
            return {
                "conversation_a": [*first[0], *told[0]],
                "conversation_b": [*first[1], *told[1]],
                "winner": winner,
            }

        short, long = ["Why?", "one"], ["Why?", "one", "And?", "three"]
        made, told = pairs(
            tmp_path,
            [
                battle(short, ["Why?", "two"]),
                battle(short, short),
                battle(short, ["Why?", "two"], winner="tie (bothbad)"),
                battle(short, ["Why?", "two"], system="b"),
                battle(long, ["Why?", "two", "And?", "four"]),
                battle(long, ["Why?", "one", "And?", "four"], winner="model_b"),
                {**LAYOUTS["lmarena_55k"], "prompt": '["Why?", "And?"]'},
            ],
        )
        assert [(row["chosen"], len(row["prompt"])) for row in made] == [("one", 2), ("four", 4)]
        assert told["left_out_by_reason"] == {
            "both answers are the same": 1,
            "neither answer is preferred": 1,
            "the conversations differ before their last turns": 3,
        }

    def test_conversations_that_are_no_battle_are_refused(self, tmp_path: Path):
        row = LAYOUTS["lmarena_140k"]
        other = [{"role": "user", "content": "How?"}, row["conversation_b"][1]]
        for change, why in (
            ({"conversation_b": other}, "do not ask the same"),
            ({"conversation_a": [*ASKED, *ASKED], "conversation_b": [*ASKED, *ASKED]}, "does not end with an answer"),
            ({"winner": None}, "does not say which answer won"),
            ({"conversation_b": [*ASKED, *ASKED]}, "does not end with an answer"),
        ):
            with pytest.raises(DataError, match=why):
                pairs(tmp_path, [{**row, **change}])

    @pytest.mark.parametrize(("a", "b", "chosen"), [(1, 0, "one"), (0, 1, "two"), (0, 0, None), (1, 1, None)])
    def test_the_winner_is_the_one_that_the_row_says(self, a: int, b: int, chosen: str | None):
        become = PreferenceWork().function()
        row = {**LAYOUTS["lmarena_55k"], "winner_model_a": a, "winner_model_b": b}
        if chosen is None:
            with pytest.raises(RowLeftOut, match="neither"):
                become("f:1", row)
        else:
            (pair,) = become("f:1", row) or ()
            assert (pair["chosen"], pair["preference"]) == (chosen, 2)

    def test_an_answer_of_null_is_an_empty_one_and_only_the_first_question_counts(self):
        row = {**LAYOUTS["lmarena_55k"], "response_a": '[null, "later"]', "response_b": "[]"}
        with pytest.raises(RowLeftOut, match="both answers are the same"):
            PreferenceWork().function()("f:1", row)

    @pytest.mark.parametrize(
        ("row", "why"),
        [
            (
                {**HELPSTEER(1), "context": [*ASKED, {"role": "assistant", "content": "x"}]},
                "does not end with a message",
            ),
            ({"prompt": "a", "chosen": "b"}, "rejected"),
            ({"prompt": "a", "chosen": 1, "rejected": "c"}, "chosen"),
        ],
    )
    def test_what_is_no_pair_is_refused(self, row: dict[str, Any], why: str):
        with pytest.raises(DataError, match=why):
            PreferenceWork().function()("f:1", row)

    def test_pairs_stay_as_they_are(self, tmp_path: Path):
        row = {"prompt": "a", "chosen": "b", "rejected": "c", "tools": [], "mine": 1}
        assert pairs(tmp_path, [row])[0] == [row]

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"overall_preference": 4}, "overall_preference"),
            ({"overall_preference": -4}, "overall_preference"),
            ({"overall_preference": True}, "overall_preference"),
            ({"response2": None}, "response2"),
            ({"context": "Why?"}, "context"),
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

    def test_a_rows_own_principle_goes_before_the_configs(self, tmp_path: Path):
        own = {**HELPSTEER(1), "principle": "be brief", "helpfulness_1": 2, "helpfulness_2": 3}
        first, second = self.chats(tmp_path, [own, HELPSTEER(1)], layout="roles", principle="be kind")
        assert [row["messages"][3] for row in (first, second)] == [
            {"role": "principle", "content": "be brief"},
            {"role": "principle", "content": "be kind"},
        ]
        assert parse_reply(first["messages"][-1]["content"], 3.0, 3.5) == (2, 3, 4)

    @pytest.mark.parametrize(
        ("given", "verdict"),
        [({}, (4, 2, 2)), ({"preference": 3}, (5, 1, 1)), ({"preference": 1}, (4, 3, 3)), ({"swap": True}, (4, 2, 2))],
    )
    def test_of_a_pair_the_chosen_answer_is_the_first_and_the_better_one(self, given: dict[str, Any], verdict):
        said = [*ASKED, {"role": "assistant", "content": "one"}]
        row = {"prompt": "Why?", "chosen": said if given.pop("swap", False) else "one", "rejected": "two", **given}
        (made,) = ComparisonWork(ComparisonConfig(layout="roles")).function()("f:1", row) or ()
        assert [m["content"] for m in made["messages"][:3]] == ["Why?", "one", "two"]
        assert parse_reply(made["messages"][-1]["content"], 3.0, 3.5) == verdict

    @pytest.mark.parametrize(
        ("scores", "field"),
        [((2, None), 2), ((None, 2), 1), ((0, 2), 1), ((2, 6), 2), ((2, True), 2), ((1, 5), None), ((5, 1), None)],
    )
    def test_scores_of_the_row_are_whole_numbers_from_1_to_5_and_both_there(self, scores: Any, field: int | None):
        row = {**HELPSTEER(1), "helpfulness_1": scores[0], "helpfulness_2": scores[1]}
        become = ComparisonWork(ComparisonConfig()).function()
        if field is None:
            (made,) = become("f:1", row) or ()
            assert parse_reply(made["messages"][-1]["content"], 3.0, 3.5) == (*scores, 4)
        else:
            with pytest.raises(DataError) as caught:
                become("f:1", row)
            assert caught.value.where == f"f:1 field helpfulness_{field}"

    def test_reasoning_and_empty_phrases_are_not_shown_to_the_judge(self, tmp_path: Path):
        row = {**HELPSTEER(1), "response1": "<think>hm</think>one", "response2": ":"}
        (made,) = self.chats(tmp_path, [row], layout="roles")
        assert [m["content"] for m in made["messages"][1:3]] == ["one", "None"]
