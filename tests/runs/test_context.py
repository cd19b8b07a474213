"""What a step reports, as records: their files, their listener, and that they are its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemotron_steps.runs.context import JsonLines, plain_context


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, '{"a":1}\n'),
        ("", '{"a":1}\n'),
        ('{"b":2}\n', '{"b":2}\n{"a":1}\n'),
        ('{"b":2}\n{"c', '{"b":2}\n{"c\n{"a":1}\n'),
    ],
)
def test_a_record_is_a_line_of_its_own_behind_whatever_was_there(
    tmp_path: Path, before: str | None, after: str
) -> None:
    file = tmp_path / "deep" / "events.jsonl"
    if before is not None:
        file.parent.mkdir()
        file.write_text(before)
    lines = JsonLines(file)
    lines.write({"a": 1})
    lines.close()
    assert file.read_text() == after


def test_plain_context_runs_a_step_without_a_store(tmp_path: Path) -> None:
    from tests.runs import runner_toy_steps

    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text('{"value": 2}\n')
    config = runner_toy_steps.TrainConfig(data_path=str(tmp_path / "rows" / "train.jsonl"), steps=3)
    outputs = {"model": "toy_model", "report": "eval_report"}
    heard: list[str] = []
    context = plain_context(
        config,
        tmp_path / "out",
        inputs={"rows": tmp_path / "rows"},
        outputs=outputs,
        listener=lambda record: heard.append(record["kind"]),
        step_id="toy/train",
    )
    assert context.inputs["rows"].type == "training_jsonl" and context.inputs["rows"].attributes["rows"] == {"train": 1}
    runner_toy_steps.train(context)
    assert json.loads((context.outputs["report"].path / "report.json").read_text())["metrics"]["sum"] == 6
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == heard.count("metrics") == 3
    assert (context.step_id, context.tracker.step) == ("toy/train", "toy/train")
    given = plain_context(config, tmp_path / "more", inputs=context.inputs)
    assert given.inputs == context.inputs and given.outputs == {}
