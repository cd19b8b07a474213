"""Preference pairs against tool hallucination: right by the environment's own rule, disjoint, and worth training on."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from nemotron_steps.artifacts.validators import validate
from nemotron_steps.config.schema.tool_preferences import Hallucination, ToolPreferencePrepConfig, ToolTasksSource
from nemotron_steps.environments.base import Response, Session, ToolCall
from nemotron_steps.environments.tools.single_step_tool_use import SingleStepToolUse, SingleStepToolUseConfig
from nemotron_steps.errors import DataError
from nemotron_steps.runs.context import plain_context
from nemotron_steps.steps.data_prep import tool_preference_prep
from nemotron_steps.steps.data_prep.tool_preference_prep import calls_of, properties_of, tool_rows, tools_of

TASKS = {"tool_tasks": {"offered": 2, "unanswerable_share": 0.25}}


def prepare(folder: Path, **settings: Any) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any], Path]:
    """(pairs by split, summary, output folder)."""
    records: list[dict[str, Any]] = []
    config = ToolPreferencePrepConfig.model_validate(settings)
    context = plain_context(config, folder, outputs={"preferences": "preference_pairs"}, listener=records.append)
    tool_preference_prep.run(context)
    output = context.outputs["preferences"].path
    found = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in output.iterdir()}
    summary: dict[str, Any] = {}
    for record in records:
        if record["kind"] == "summary":
            summary.update(record["values"])
    return found, summary, output


def reward(row: dict[str, Any], message: dict[str, Any]) -> float | None:
    calls = [
        ToolCall(call["function"]["name"], json.dumps(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]
    grader = SingleStepToolUse(SingleStepToolUseConfig(), {})
    response = Response(message["content"], tool_calls=calls)
    return asyncio.run(grader.verify(row, response, Session())).reward


def test_every_pair_is_what_its_label_says(tmp_path):
    rows = {
        row["responses_create_params"]["input"][0]["content"]: row
        for row in tool_rows(ToolTasksSource(**TASKS["tool_tasks"]), 240, 42)
    }
    found, summary, output = prepare(tmp_path, rows={"train": 200, "validation": 40}, pairs_per_row=4, **TASKS)
    assert validate("preference_pairs", output)["rows"] == {k: len(v) for k, v in found.items()}
    kinds: Counter[str] = Counter()
    for pair in [*found["train"], *found["validation"]]:
        kind: Hallucination = pair["hallucination"]
        kinds[kind] += 1
        row = rows[pair["prompt"][-1]["content"]]
        assert (reward(row, pair["chosen"]), reward(row, pair["rejected"])) == (1.0, 0.0)
        offered = {tool["name"]: tool for tool in tools_of(row)}
        assert pair["tools"] == list(offered.values())
        (call,) = pair["rejected"]["tool_calls"]
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if kind == "needless_call":
            assert pair["chosen"]["content"] == "I have no tool for that." and name in offered
            continue
        ((right, expected),) = calls_of(row)
        assert (name not in offered) == (kind == "unknown_tool") and (name == right) == (kind != "unknown_tool")
        if kind == "unknown_argument":
            assert set(arguments) - set(properties_of(offered[name])) and expected.items() <= arguments.items()
        if kind == "missing_argument":
            (missing,) = set(expected) - set(arguments)
            assert missing in offered[name]["parameters"]["required"]
        if kind == "made_up_value":
            (changed,) = [key for key in expected if arguments[key] != expected[key]]
            assert type(arguments[changed]) is type(expected[changed])
            if isinstance(expected[changed], str):
                assert arguments[changed].lower() not in json.dumps(row["responses_create_params"]["input"]).lower()
    assert set(kinds) == {"unknown_tool", "unknown_argument", "missing_argument", "made_up_value", "needless_call"}
    assert {kind: summary[f"pairs_{kind}"] for kind in kinds} == kinds
    assert summary["chosen_messages"] == kinds["needless_call"]
    assert summary["train_pairs"] == len(found["train"]) and summary["validation_rows"] == 40


TOOL = {
    "type": "function",
    "name": "find",
    "parameters": {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]},
}


def recorded_row(conversation: int, step: int) -> dict[str, Any]:
    """A row of a longer conversation, with reasoning and an earlier call, as published rows have them."""
    order = f"A{conversation}{conversation}"
    items = [
        {"type": "message", "role": "system", "content": "Be of help."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": f"Where is order {order}?"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "name": "find", "call_id": "c", "arguments": json.dumps({"order": order})},
        {"type": "function_call_output", "call_id": "c", "output": "on its way"},
    ]
    expected: dict[str, Any] = {"type": "message", "content": "\n\nIt is on its way."}
    if step == 0:
        items, expected = items[:2], {k: v for k, v in items[3].items() if k != "call_id"}
    return {"responses_create_params": {"input": items, "tools": [TOOL]}, "expected_action": expected}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_no_value_of_a_validation_row_is_borrowed_for_training(tmp_path):
    """Each row has a city of its own, so that a borrowed one says where it is from."""
    tool = {"type": "function", "name": "visit", "parameters": {"properties": {"city": {"type": "string"}}}}
    cities = [f"{letter}ville" for letter in "bcdfghjklmnpqrstvwxz"]
    rows = [
        {
            "responses_create_params": {"input": [{"role": "user", "content": f"Go to {city}."}], "tools": [tool]},
            "expected_action": {"type": "function_call", "name": "visit", "arguments": json.dumps({"city": city})},
        }
        for city in cities
    ]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, _, _ = prepare(
        tmp_path, jsonl={"path": str(source)}, rows={"validation": 15}, hallucinations=["made_up_value"]
    )

    def named(side: str, split: str) -> set[str]:
        return {pair[side]["tool_calls"][0]["function"]["arguments"]["city"] for pair in found[split]}

    assert len(named("chosen", "train")) == 5 and len(named("chosen", "validation")) == 15
    assert not named("rejected", "train") & named("chosen", "validation")
    assert named("rejected", "validation") & named("chosen", "train")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"expected_action": {"type": "function_call", "name": "lookup", "arguments": "{}"}}, "expected_action.name"),
        ({"expected_action": {"type": "message", "content": " "}}, "expected_action.content"),
        ({"expected_action": {"type": "guess"}}, "expected_action.type"),
        ({"expected_action": {}}, "expected_action.type"),
    ],
)
def test_unusable_rows_are_refused_by_line_and_field_or_counted(change, field, tmp_path):
    rows = [recorded_row(i, 0) for i in range(4)]
    file = write_rows(tmp_path / "rows.jsonl", [*rows, {**rows[0], **change}])
    settings = {"jsonl": {"path": str(file)}, "rows": {"validation": 1}}
    with pytest.raises(DataError) as caught:
        prepare(tmp_path / "strict", **settings)
    assert caught.value.where == f"{file}:5 field {field}"
    _, summary, _ = prepare(tmp_path / "lenient", max_refused_share=0.5, **settings)
    assert (summary["rows_refused"], summary["train_rows"]) == (1, 3)


def test_too_few_rows_and_two_sources_are_refused(tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", [recorded_row(i, 0) for i in range(3)])
    with pytest.raises(DataError, match="too few for the splits"):
        prepare(tmp_path / "out", jsonl={"path": str(file)}, rows={"validation": 3})
    with pytest.raises(ValidationError, match="exactly one"):
        ToolPreferencePrepConfig.model_validate({"jsonl": {"path": "x"}, **TASKS})
    with pytest.raises(DataError, match="no row gives a training pair"):
        only_calls = {"jsonl": {"path": str(file)}, "rows": {"validation": 0}}
        prepare(tmp_path / "none", hallucinations=["needless_call"], **only_calls)
