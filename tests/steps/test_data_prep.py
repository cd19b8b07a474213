"""rl_prep and sft_prep: disjoint splits, rows that survive whole, labels that follow the rule, errors with a line."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts.validators import validate
from nemotron_steps.config.schema.data_prep import (
    ComparisonConfig,
    JsonlSource,
    ReasoningGymSource,
    ReasoningGymTask,
    RlPrepConfig,
    SftPrepConfig,
    SplitRows,
    TokenizerTrainingConfig,
)
from nemotron_steps.environments.base import EnvironmentConfig
from nemotron_steps.environments.judged.genrm_compare import parse_reply
from nemotron_steps.environments.responses import split_reasoning
from nemotron_steps.environments.text.reasoning_gym import ReasoningGym
from nemotron_steps.errors import DataError
from nemotron_steps.runs.context import StepContext, plain_context
from nemotron_steps.steps.data_prep import rl_prep, sft_prep
from nemotron_steps.steps.data_prep.comparisons import ComparisonMaker
from nemotron_steps.steps.data_prep.gym_tasks import Question

SPELL = ReasoningGymTask(dataset="spell_backward", weight=2, options={"min_word_len": 3, "max_word_len": 6})
SPIRAL = ReasoningGymTask(dataset="spiral_matrix", options={"min_n": 2, "max_n": 2})
SOURCE = ReasoningGymSource(tasks=(SPELL, SPIRAL), seed=7)
ROWS = SplitRows(train=60, validation=12, heldout=15)


def rl_context(folder: Path, **settings: Any) -> StepContext[RlPrepConfig]:
    return plain_context(RlPrepConfig(**settings), folder, outputs={"prompts": "rl_prompts"})


def sft_context(folder: Path, **settings: Any) -> StepContext[SftPrepConfig]:
    return plain_context(SftPrepConfig(**settings), folder, outputs={"chats": "sft_chats"})


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def gym_row(number: int, **extra: Any) -> dict[str, Any]:
    word = f"{'abcdefghij'[number % 10]}no"
    return {
        "responses_create_params": {"input": [{"role": "user", "content": f"Spell {word}"}], "temperature": 0.5},
        "question": f"Spell {word}",
        "answer": word[::-1],
        "metadata": {"source_dataset": "spell_backward", "nested": {"kept": [1, None, "é"]}},
        "agent_ref": {"type": "responses_api_agents", "name": "reasoning_gym_simple_agent"},
        "number": number,
        **extra,
    }


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    context = rl_context(tmp_path_factory.mktemp("rl"), reasoning_gym=SOURCE, rows=ROWS)
    rl_prep.run(context)
    return context.outputs["prompts"].path


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    context = sft_context(
        tmp_path_factory.mktemp("sft"),
        reasoning_gym=SOURCE,
        rows=ROWS,
        tokenizer=TokenizerTrainingConfig(min_share=0.05),
    )
    sft_prep.run(context)
    assert context.outputs["chats"].attributes["tokenizer"]
    return context.outputs["chats"].path


class TestQuestions:
    def test_no_question_is_in_two_splits_or_twice_in_one(self, prompts: Path):
        questions = [row["question"] for file in sorted(prompts.glob("*.jsonl")) for row in read(file)]
        assert len(set(questions)) == len(questions) == 87


class TestRlRows:
    def test_rows_have_the_public_shape_and_their_environment_scores_them(self, prompts: Path):
        assert validate("rl_prompts", prompts)["rows"] == {"heldout": 15, "train-split": 60, "val-split": 12}
        environment = ReasoningGym(EnvironmentConfig(), {})
        for number, row in enumerate(read(prompts / "train-split.jsonl"), start=1):
            environment.check_row(row, f"train-split.jsonl:{number}")
            assert row["responses_create_params"]["input"] == [{"role": "user", "content": row["question"]}]
            assert row["agent_ref"] == {"type": "responses_api_agents", "name": "reasoning_gym_simple_agent"}
            assert environment.grade(row, f"<answer>{row['answer']}</answer>").reward == 1.0

    def test_every_field_of_a_users_row_survives_and_the_last_rows_are_held_out(self, tmp_path: Path):
        rows = [gym_row(i) for i in range(9)]
        source = JsonlSource(path=str(write(tmp_path / "mine.jsonl", rows)))
        context = rl_context(tmp_path / "run", jsonl=source, rows=SplitRows(validation=2, heldout=3))
        rl_prep.run(context)
        folder = context.outputs["prompts"].path
        assert read(folder / "train-split.jsonl") == rows[:4]
        assert read(folder / "val-split.jsonl") == rows[4:6]
        assert read(folder / "heldout.jsonl") == rows[6:]


class TestBadRows:
    def run(self, tmp_path: Path, text: str, **extra: Any) -> StepContext[RlPrepConfig]:
        (tmp_path / "mine.jsonl").write_text(text)
        settings = {"jsonl": JsonlSource(path=str(tmp_path / "mine.jsonl")), "rows": SplitRows(validation=0), **extra}
        context = rl_context(tmp_path / "run", **settings)
        rl_prep.run(context)
        return context

    def lines(self, *rows: dict[str, Any]) -> str:
        return "".join(json.dumps(row) + "\n" for row in rows)

    @pytest.mark.parametrize(
        ("field", "change"),
        [
            ("question", {"question": None}),
            ("metadata.source_dataset", {"metadata": {"source_dataset": "no_such_task"}}),
            ("agent_ref.name", {"agent_ref": {"name": "no_such_agent"}}),
        ],
    )
    def test_a_row_its_environment_cannot_score_names_file_line_and_field(self, tmp_path: Path, field, change):
        with pytest.raises(DataError) as caught:
            self.run(tmp_path, self.lines(gym_row(0), gym_row(1, **change)))
        assert caught.value.where == f"{tmp_path}/mine.jsonl:2 field {field}"

    def test_a_row_without_a_prompt_is_refused(self, tmp_path: Path):
        with pytest.raises(DataError, match="responses_create_params") as caught:
            self.run(tmp_path, self.lines({"question": "x"}))
        assert caught.value.where == f"{tmp_path}/mine.jsonl:1 field responses_create_params"
        imported = f"steps run data_prep/import_prompts --input dataset={tmp_path}/mine.jsonl"
        assert caught.value.hints[0] == imported
        with pytest.raises(DataError) as caught:
            self.run(tmp_path, self.lines({"text": "x"}))
        assert imported not in caught.value.hints


class TestDemonstrations:
    def test_chats_share_no_question_and_use_the_training_questions_of_rl(self, chats: Path, prompts: Path):
        assert validate("sft_chats", chats)["rows"] == {"heldout": 15, "train": 60, "validation": 12}
        asked = {file.stem: {row["messages"][0]["content"] for row in read(file)} for file in chats.glob("*.jsonl")}
        assert not asked["train"] & asked["heldout"]
        assert asked["heldout"] == {row["question"] for row in read(prompts / "heldout.jsonl")}

    def test_answers_follow_styles_and_slip_rate(self, tmp_path: Path):
        context = sft_context(
            tmp_path,
            reasoning_gym=ReasoningGymSource(tasks=(SPELL,)),
            rows=SplitRows(train=600, validation=0),
            demonstrations={
                "slip_rate": 0.3,
                "styles": [{"template": "<answer>{answer}</answer>", "weight": 3}, {"template": "It is {answer}."}],
            },
        )
        sft_prep.run(context)
        rows = [(r["messages"][0]["content"][-6:], r["messages"][1]["content"]) for r in read(_train(context))]
        tagged = [answer for _, answer in rows if answer.startswith("<answer>")]
        assert 0.68 < len(tagged) / 600 < 0.82
        assert all(a.startswith(("<answer>", "It is ")) for _, a in rows)
        right = sum(q.split(" ")[-1][::-1] in a for q, a in rows)
        assert 0.68 < right / 600 < 0.82  # some slips leave the word as it is


def _train(context: StepContext[SftPrepConfig]) -> Path:
    return context.outputs["chats"].path / "train.jsonl"


class TestComparisons:
    QUESTION = Question(
        "Spell this word backward (example: sun -> nus): neon",
        "noen",
        {"source_dataset": "spell_backward", "word": "neon", "word_len": 4},
    )

    def maker(self, **settings: Any) -> ComparisonMaker:
        return ComparisonMaker(ComparisonConfig(**settings), [self.QUESTION])

    def reply(self, answer_1: str, answer_2: str) -> str:
        return self.maker().row(self.QUESTION, answer_1, answer_2)["messages"][-1]["content"]

    @pytest.mark.parametrize(
        ("answers", "verdict"),
        [
            (("<answer>noen</answer>", "<answer>neno</answer>"), (5, 1, 1)),
            (("The answer is noen.", "noen"), (1, 5, 6)),  # the grader wants the answer alone
            (("noen", "<answer>noen</answer>"), (5, 5, 3)),  # both right: the shorter one
            (("<answer>noen</answer>", "noen"), (5, 5, 4)),
            (("noe", "nexx"), (1, 1, 3)),  # both wrong: the one that is right for longer, however long it is
            ((":", "x"), (1, 1, 3)),
        ],
    )
    def test_the_verdict_follows_the_tasks_own_score(self, answers, verdict):
        assert parse_reply(split_reasoning(self.reply(*answers))[1], 3.0, 3.5) == verdict
