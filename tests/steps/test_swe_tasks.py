import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.config.schema.data_prep import MUTATION_KINDS, SftPrepConfig
from nemotron_steps.config.schema.swe_tasks import SweTasksConfig
from nemotron_steps.environments.base import Response
from nemotron_steps.environments.registry import create
from nemotron_steps.errors import DataError
from nemotron_steps.runs.context import plain_context
from nemotron_steps.steps.data_prep import sft_prep, swe_tasks
from nemotron_steps.steps.data_prep.blends.splits import PROMPT_FILES
from nemotron_steps.steps.data_prep.swe.demonstrations import solving_steps
from nemotron_steps.steps.data_prep.swe.packages import mutations_of

UNITTEST = "PYTHONPATH=src:. python -S -m unittest -v {tests}"


def rows_of(tmp_path: Path, **config: Any) -> dict[str, list[dict[str, Any]]]:
    context = plain_context(SweTasksConfig.model_validate(config), tmp_path, outputs={"prompts": "rl_prompts"})
    swe_tasks.run(context)
    folder = context.outputs["prompts"].path
    return {
        split: [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for split, name in PROMPT_FILES.items()
        if (folder / name).exists()
    }


def chats_of(tmp_path: Path, **config: Any) -> list[dict[str, Any]]:
    context = plain_context(SftPrepConfig.model_validate(config), tmp_path, outputs={"chats": "sft_chats"})
    sft_prep.run(context)
    return [json.loads(line) for line in (context.outputs["chats"].path / "train.jsonl").read_text().splitlines()]


@pytest.mark.sandbox
def test_made_up_tasks_are_broken_before_and_fixed_after_and_a_demonstration_is_what_the_harness_answers(
    tmp_path: Path,
) -> None:
    splits = rows_of(tmp_path, made_up={"functions": 2}, rows={"train": 3, "validation": 1, "heldout": 1})
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 3, "validation": 1, "heldout": 1}
    rows = [row for rows in splits.values() for row in rows]
    assert len({row["instance_id"] for row in rows}) == 5

    async def solve(row: dict[str, Any]) -> None:
        (path,) = row["files"]
        correct = patched(tmp_path / row["instance_id"], row)
        (fault,) = [m for m in mutations_of(path, correct, MUTATION_KINDS) if m.source == row["files"][path]]
        environment = create("swe_agent", {})
        environment.check_row(row, "row")
        session = await environment.seed(row)
        for name, arguments, answer in solving_steps(fault):
            assert await environment.call_tool(session, name, arguments) == answer
        assert (await environment.verify(row, Response.from_output([]), session)).reward == 1.0
        assert row["FAIL_TO_PASS"] and row["PASS_TO_PASS"] and "AssertionError" in row["problem_statement"]

    for row in rows[:2]:
        asyncio.run(solve(row))


def patched(folder: Path, row: dict[str, Any]) -> str:
    """The one file of a row after its patch."""
    (path,) = row["files"]
    folder.mkdir()
    (folder / path).write_text(row["files"][path])
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(["git", "apply", "-"], input=row["patch"], text=True, cwd=folder, check=True)
    return (folder / path).read_text()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    root = tmp_path / "mined" / "ranges"
    (root / "src/ranges").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "src/ranges/__init__.py").write_text("from ranges.clip import clip\n")
    (root / "src/ranges/clip.py").write_text(
        "UNUSED = 3 + 4\n\n\ndef clip(x, low, high):\n    if x < low:\n        return low\n"
        "    while x - high > 0:\n        x = x - 1\n    return x\n"
    )
    (root / "tests/__init__.py").write_text("")
    (root / "tests/test_clip.py").write_text(
        "import unittest\nfrom ranges import clip\n\n\nclass T(unittest.TestCase):\n    def test_low(self):\n"
        "        self.assertEqual(clip(1, 2, 5), 2)\n\n"
        "    def test_high(self):\n        self.assertEqual(clip(7, 2, 5), 5)\n\n"
        "    def test_broken_anyway(self):\n        self.assertEqual(1, 2)\n"
    )
    return root


@pytest.mark.sandbox
def test_tasks_are_mined_where_tests_notice_and_end(package: Path, tmp_path: Path) -> None:
    events = tmp_path / "out"
    rows = rows_of(
        events,
        packages={"path": str(package.parent), "test_command": UNITTEST, "mutations": ["operator", "return"]},
        rows={"validation": 1},
        tests_timeout_s=3,
    )
    mined = [*rows["train"], *rows["validation"]]
    assert {row["fault"] for row in mined} == {"operator", "return"}
    for row in mined:
        assert row["FAIL_TO_PASS"] and "tests.test_clip.T.test_broken_anyway" not in row["PASS_TO_PASS"]
        assert set(row["files"]) == {"src/ranges/__init__.py", "src/ranges/clip.py"}
        assert set(row["test_files"]) == {"tests/__init__.py", "tests/test_clip.py"}
    assert not any("UNUSED = 3 -" in row["files"]["src/ranges/clip.py"] for row in mined)
    values = [json.loads(line) for line in (events / "events.jsonl").read_text().splitlines()]
    counted = {k: v for record in values if record["kind"] == "summary" for k, v in record["values"].items()}
    assert counted["fault_unnoticed"] == 2 and counted["fault_without_end"] >= 1


def test_steps_of_solutions_are_graded_by_swe_pivot(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, made_up={}, kind="steps", rows={"train": 4, "validation": 0}, tell_error=False)["train"]
    assert [row["expected_action"]["name"] for row in rows] == ["view", "edit"] * 2
    environment = create("swe_pivot", {"similarity_full_credit": 1.0})

    async def grade(row: dict[str, Any], call: dict[str, Any]) -> float | None:
        environment.check_row(row, "row")
        session = await environment.seed(row)
        return (await environment.verify(row, Response.from_output([{**call, "call_id": "x"}]), session)).reward

    for row in rows:
        assert asyncio.run(grade(row, row["expected_action"])) == 1.0
    wrong = {
        **rows[1]["expected_action"],
        "arguments": rows[1]["expected_action"]["arguments"].replace('"new_str": "r', '"new_str": "x'),
    }
    assert asyncio.run(grade(rows[1], wrong)) == 0.0
    assert len(rows[1]["responses_create_params"]["input"]) == 3


def test_no_demonstration_shows_a_package_of_the_held_out_tasks_and_a_share_of_them_slips(tmp_path: Path) -> None:
    made_up = {"seed": 7}
    chats = chats_of(tmp_path / "a", swe={"made_up": made_up, "slip_rate": 0.5}, rows={"train": 200, "validation": 0})
    tasks = rows_of(
        tmp_path / "b",
        made_up=made_up,
        kind="steps",
        rows={"train": 2, "validation": 0, "heldout": 60},
        tell_error=False,
    )
    seen = {chat["messages"][2]["content"].splitlines()[0] for chat in chats}
    held = [row["responses_create_params"]["input"] for row in tasks["heldout"]]
    shown = {items[2]["output"].splitlines()[0] for items in held if len(items) > 1}
    assert len(shown) == 30 and len(seen) > 150 and not seen & shown
    solved = sum(len(chat["messages"]) == 6 and right(chat) for chat in chats)
    assert 70 <= solved <= 130


def right(chat: dict[str, Any]) -> bool:
    from nemotron_steps.steps.data_prep.swe.packages import FUNCTIONS

    name = chat["messages"][2]["content"].split("def ")[1].split("(")[0]
    new = chat["messages"][3]["tool_calls"][0]["function"]["arguments"]["new_str"]
    return bool(new.split()[2] == FUNCTIONS[name][0])


def test_rows_of_swe_bench_get_a_prompt_and_an_agent(tmp_path: Path) -> None:
    public = {
        "instance_id": "x__y-1",
        "repo": "x/y",
        "base_commit": "abc",
        "patch": "p",
        "test_patch": "+++ b/tests/test_a.py\n",
        "problem_statement": "It fails.",
        "FAIL_TO_PASS": '["tests/test_a.py::test_b"]',
        "PASS_TO_PASS": "[]",
        "image": "swebench/x:1",
    }
    nested = {"responses_create_params": {"input": [], "metadata": {"instance_dict": json.dumps(public)}}}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(public)}\n{json.dumps(nested)}\n")
    rows = rows_of(tmp_path / "out", jsonl={"path": str(tmp_path / "rows.jsonl")}, rows={"validation": 0})["train"]
    for row in rows:
        assert row["agent_ref"]["name"] == "swe_agent" and row["instance_id"] == "x__y-1"
        assert row["responses_create_params"]["input"][0]["content"].endswith("\n\nIt fails.")
    (tmp_path / "rows.jsonl").write_text(json.dumps({**public, "image": None}) + "\n")
    with pytest.raises(DataError, match="image"):
        rows_of(tmp_path / "out2", jsonl={"path": str(tmp_path / "rows.jsonl")}, rows={"validation": 0})
