from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.config.schema.data_prep import SftPrepConfig
from nemotron_steps.config.schema.swe_packages import MUTATION_KINDS
from nemotron_steps.config.schema.swe_tasks import SweTasksConfig
from nemotron_steps.environments.base import Response
from nemotron_steps.environments.registry import create
from nemotron_steps.errors import DataError
from nemotron_steps.runs.context import plain_context
from nemotron_steps.steps.data_prep import sft_prep, swe_tasks
from nemotron_steps.steps.data_prep.blends.splits import PROMPT_FILES
from nemotron_steps.steps.data_prep.swe.demonstrations import solving_steps
from nemotron_steps.steps.data_prep.swe.mutations import mutations_of
from nemotron_steps.steps.data_prep.swe.packages import failing_test, made_up_packages, packages_in

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


@pytest.mark.parametrize(
    ("source", "kind", "broken"),
    [
        ("x = a + b", "operator", {"x = a - b", "x = a * b"}),
        ("x = (a)  **  b", "operator", {"x = (a)  *  b"}),
        ("x = 'é' + 'ü'", "operator", {"x = 'é' - 'ü'", "x = 'é' * 'ü'"}),
        ("x = a < b <= c", "comparison", {"x = a <= b <= c", "x = a > b <= c", "x = a < b < c", "x = a < b >= c"}),
        ("x = a not in b", "comparison", {"x = a in b"}),
        ("x = a and b and c", "boolean", {"x = a or b and c", "x = a and b or c"}),
        ("x = not a", "boolean", {"x = a"}),
        ("x = [3, True]", "constant", {"x = [4, True]", "x = [3, False]"}),
        ("if a:\n    pass", "condition", {"if not (a):"}),
        ("f(a,  b + 1)", "arguments", {"f(b + 1,  a)"}),
        ("def f():\n    return [1]", "return", {"    return None"}),
        ("x = a % b", "operator", {"x = a // b", "x = a + b"}),
        ("x = a is not b", "comparison", {"x = a is b"}),
        ("x = a is b", "comparison", {"x = a is not b"}),
        ("while a:\n    pass", "condition", {"while not (a):"}),
        ("x = a if b else c", "condition", {"x = a if not (b) else c"}),
        ("f(*a, b)", "arguments", set()),
        ("f(a, b, c)", "arguments", set()),
        ("f(a, a)", "arguments", set()),
        ("def f():\n    return None", "return", set()),
        ("x = (a\n+ b)", "operator", set()),
        ("def f(:", "operator", set()),
        ("x = 'a + b'  # 1 < 2", "operator", set()),
    ],
)
def test_a_fault_changes_one_place_of_one_line(source: str, kind: Any, broken: set[str]) -> None:
    found = mutations_of("a.py", source, [kind])
    assert {m.broken for m in found} == broken
    for mutation in found:
        lines = mutation.source.split("\n")
        assert lines.pop(mutation.line - 1) == mutation.broken
        kept = source.split("\n")
        assert kept.pop(mutation.line - 1) == mutation.correct and lines == kept


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


def test_a_package_of_more_than_the_most_bytes_is_left_out_and_counted(package: Path) -> None:
    sizes = sum(len(file.read_bytes()) for file in package.rglob("*.py"))
    assert [found.name for found in packages_in(str(package.parent), UNITTEST, sizes)[0]] == ["ranges"]
    other = package.parent / "small"
    (other / "tests").mkdir(parents=True)
    (other / "small_one.py").write_text("x = 1\n")
    (other / "tests/test_small.py").write_text("")
    packages, refused = packages_in(str(package.parent), UNITTEST, sizes - 1)
    assert [found.name for found in packages] == ["small"]
    assert refused == {"ranges": f"{sizes} bytes, over packages.max_bytes={sizes - 1}"}


def test_the_failing_test_is_that_of_the_function_with_the_fault() -> None:
    made = next(made_up_packages(0, 3))
    ((path, source),) = made.files.items()
    names = [line.split("(")[0].removeprefix("def ") for line in source.split("\n") if line.startswith("def ")]
    faults = mutations_of(path, source, ["return"])
    assert [failing_test(made, fault).rpartition(".test_")[2] for fault in faults] == names and len(names) == 3


def test_a_package_that_is_installed_is_no_source_of_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "calc"
    package.mkdir()
    (package / "calc.py").write_text("x = 1 + 1\n")
    (package / "test_calc.py").write_text("")
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "calc.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed)])
    with pytest.raises(DataError, match="no package") as refused:
        rows_of(tmp_path / "out", packages={"path": str(package)})
    assert "which an agent can read" in str(refused.value.found)


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


def test_demonstrations_mix_with_questions_and_a_tokenizer_reads_tools_as_few_tokens(tmp_path: Path) -> None:
    chats = chats_of(
        tmp_path,
        swe={"share": 0.25},
        reasoning_gym={"tasks": [{"dataset": "spell_backward", "options": {"min_word_len": 3, "max_word_len": 4}}]},
        rows={"train": 200, "validation": 8},
        tokenizer={"min_share": 0.02},
    )
    with_tools = [chat for chat in chats if "tools" in chat]
    assert len(chats) == 200 and len(with_tools) == 50
    from nemotron_steps.engine.supervised.chat_tokens import encode_chat
    from nemotron_steps.models.chat import ChatFormat

    chat = ChatFormat.from_folder(tmp_path / "outputs/chats/tokenizer")
    assert len(encode_chat(chat, with_tools[0]["messages"], "row", with_tools[0]).token_ids) < 192


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


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"instance_dict": "{not json"}, "instance_dict"),
        ({"responses_create_params": {"metadata": {"instance_dict": "[1]"}}}, "instance_dict"),
        ({"responses_create_params": ["hello"]}, "responses_create_params"),
    ],
)
def test_rows_of_another_shape_are_refused_by_line_and_field(row: dict[str, Any], field: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"instance_id": "x__y-1", **row}) + "\n")
    with pytest.raises(DataError, match=f"`{field}` is not an object") as caught:
        rows_of(tmp_path / "out", jsonl={"path": str(file)}, rows={"validation": 0})
    assert caught.value.where == f"{file}:1 field {field}"


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"made_up": {}, "packages": {"path": "x"}, "rows": {"train": 1}},
        {"made_up": {}},
        {"made_up": {}, "rows": {"train": 1}, "sample": 3},
        {"jsonl": {"path": "x"}, "kind": "steps"},
    ],
)
def test_sources_that_make_no_sense_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        SweTasksConfig.model_validate(config)


@pytest.mark.parametrize(
    "config",
    [
        {"swe": {}},
        {"swe": {"share": 0.5}, "rows": {"train": 9}},
        {"swe": {}, "rows": {"train": 9}, "reasoning_gym": {"tasks": [{"dataset": "x"}]}},
        {"swe": {}, "rows": {"train": 9}, "kind": "comparisons"},
        {"swe": {}, "rows": {"train": 9}, "jsonl": {"path": "x"}},
    ],
)
def test_demonstrations_that_make_no_sense_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        SftPrepConfig.model_validate(config)


def test_faults_come_in_the_order_of_the_file() -> None:
    found = mutations_of("a.py", "x = a + 1\ny = a < 2\nz = a - b\n", MUTATION_KINDS)
    places = [(fault.line, fault.kind, fault.broken) for fault in found]
    assert places == sorted(places) and {line for line, _, _ in places} == {1, 2, 3}


@pytest.mark.parametrize(
    ("wanted", "made"), [(0, []), (3, [0, 2, 4]), (5, [0, 2, 4, 6, 8]), (99, list(range(0, 40, 2)))]
)
def test_the_first_results_in_the_order_of_what_was_tried_are_taken(
    wanted: int, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def attempt(number: int) -> int | None:
        await asyncio.sleep(0.0001 * (40 - number))
        return None if number % 2 else number

    monkeypatch.setattr(swe_tasks.os, "cpu_count", lambda: 3)
    assert asyncio.run(swe_tasks._first(range(40), attempt, wanted)) == made
