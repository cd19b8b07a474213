"""rl_prep over the user's own rows: published layouts, placeholders, prompts that are too long, what is cached."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts.validators import validate
from nemotron_steps.config.schema.data_prep import RlPrepConfig, SplitRows, TokenizerTrainingConfig
from nemotron_steps.runs.context import StepContext, plain_context
from nemotron_steps.steps.data_prep import rl_prep
from nemotron_steps.steps.data_prep.sft_prep import write_tokenizer
from tests.steps.data_prep.blends.conftest import write_lines

MATH = {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"}


def math_row(number: int, question: str | None = None) -> dict[str, Any]:
    question = question or f"What is {number} + 1?"
    return {
        "responses_create_params": {"input": [{"role": "user", "content": question}]},
        "question": question,
        "expected_answer": str(number + 1),
        "agent_ref": MATH,
    }


def prepare(folder: Path, path: Path, **settings: Any) -> StepContext[RlPrepConfig]:
    context = plain_context(
        RlPrepConfig(input_path=str(path), **settings), folder / "run", outputs={"prompts": "rl_prompts"}
    )
    rl_prep.run(context)
    return context


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_tree_of_nano3_has_three_splits_and_a_manifest(tmp_path: Path):
    rows = [math_row(n) for n in range(9)]
    sizes = SplitRows(validation=2, heldout=3)
    context = prepare(tmp_path, write_lines(tmp_path / "in.jsonl", rows), rows=sizes, layout="tree")
    folder = context.outputs["prompts"].path
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest == {
        "train": "train/data.jsonl",
        "val": "val/data.jsonl",
        "test": "test/data.jsonl",
        "mode": "resolve",
    }
    assert [len(read(folder / manifest[split])) for split in ("train", "val", "test")] == [4, 2, 3]
    assert validate("rl_prompts", folder)["rows"] == {"test/data": 3, "train/data": 4, "val/data": 2}


def test_placeholders_are_filled_and_then_graded_like_any_row(tmp_path: Path):
    dapo = [
        {"prompt": [{"content": f"Solve.\n\n{n} + 1?\n\nEnd.", "role": "user"}], "reward_model": {"ground_truth": "7"}}
        for n in range(3)
    ]
    pointer = {"_hf_placeholder": {"row": 2, "question_template": {"prefix": "<", "suffix": ">"}}}
    rows = [math_row(0), {**pointer, "dataset": "dapo17k", "agent_ref": MATH, "id": 5}]
    context = prepare(
        tmp_path,
        write_lines(tmp_path / "in.jsonl", rows),
        rows=SplitRows(validation=0),
        placeholders={"dapo": str(write_lines(tmp_path / "dapo.jsonl", dapo))},
    )
    plain, filled = read(context.outputs["prompts"].path / "train-split.jsonl")
    assert plain == rows[0]
    assert filled == {**math_row(6, "<2 + 1?>"), "dataset": "dapo17k", "id": 5}


def test_prompts_with_more_tokens_than_the_policy_reads_are_left_out(tmp_path: Path):
    chats = [{"messages": [{"role": "user", "content": math_row(n)["question"]}]} for n in range(50)]
    write_tokenizer(chats, TokenizerTrainingConfig(min_share=0.5), tmp_path / "tokenizer")
    rows = [math_row(n, None if n % 2 else "Say this: " + "word " * 200) for n in range(8)]
    context = prepare(
        tmp_path,
        write_lines(tmp_path / "in.jsonl", rows),
        rows=SplitRows(validation=0),
        prompt_length={"tokenizer": str(tmp_path / "tokenizer"), "max_tokens": 100},
    )
    folder = context.outputs["prompts"].path
    assert read(folder / "train-split.jsonl") == rows[1::2]
    told = json.loads((folder / "accounting.json").read_text())
    assert told["left_out_by_reason"] == {"the prompt has more than 100 tokens": 4} and told["refused"] == 0


LOW = "{reasoning effort: low}"
MATH_CODE = ["math_with_judge", "mcqa", "code_gen"]


@pytest.mark.parametrize(
    ("had", "share", "environments", "converted"),
    [
        (0, 0.02, MATH_CODE, 6),  # of all 300, not of those that may be converted
        (0, 0.01, ["math_with_judge", "mcqa"], 3),
        (4, 0.02, MATH_CODE, 2),  # what asks already counts, whatever its environment
        (9, 0.02, MATH_CODE, 0),
        (0, 0.5, ["math_with_judge"], 100),  # there are no more
    ],
)
def test_a_share_of_all_prompts_is_converted_to_low_effort_once(
    had: int, share: float, environments: list[str], converted: int, tmp_path: Path
):
    agents = ("math_with_judge_simple_agent", "code_gen_simple_agent", "instruction_following_simple_agent")
    given = [
        {**math_row(n, f"{n}?{f' {LOW}' if n >= 300 - had else ''}"), "agent_ref": {"name": agents[n % 3]}}
        for n in range(310)  # the last ten validate
    ]
    settings: dict[str, Any] = {"low_effort": {"share": share, "environments": environments}}
    settings |= {"rows": SplitRows(validation=10), "check_environments": False}
    folder = prepare(tmp_path / "a", write_lines(tmp_path / "a.jsonl", given), **settings).outputs["prompts"].path
    rows = read(folder / "train-split.jsonl")
    text = [row["responses_create_params"]["input"][0]["content"] for row in rows]
    chosen = [n for n in range(300 - had) if LOW in text[n]]
    assert len(chosen) == converted and all(each.count(LOW) <= 1 for each in text)
    assert {agents[n % 3].removesuffix("_simple_agent") for n in chosen} <= set(environments)
    assert all(rows[n] == given[n] for n in range(300) if n not in chosen)
    assert read(folder / "val-split.jsonl") == given[300:]
    told = json.loads((folder / "accounting.json").read_text())["low_effort"]
    assert told == {"wanted": round(share * 300), "found": had, "converted": converted, "too_long": 0}
    # In another order the same prompts are converted; of what was prepared none.
    again = prepare(tmp_path / "b", write_lines(tmp_path / "b.jsonl", given[299::-1] + given[300:]), **settings)
    assert read(again.outputs["prompts"].path / "train-split.jsonl") == rows[::-1]
    settings["rows"] = SplitRows(validation=0)
    twice = prepare(tmp_path / "c", folder / "train-split.jsonl", **settings).outputs["prompts"].path
    assert share == 0.5 or read(twice / "train-split.jsonl") == rows
