"""What a step reports, as records: their files, their listener, and that they are its own."""

from pathlib import Path

import pytest

from nemotron_steps.errors import StepFailedError
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


def test_a_port_that_there_is_not_is_told_with_those_there_are(tmp_path: Path) -> None:
    context = plain_context(None, tmp_path, outputs={"model": "checkpoint_hf"}, step_id="own/one")
    with pytest.raises(StepFailedError, match="step 'own/one' asks for its output 'modle'") as caught:
        context.outputs["modle"]
    assert caught.value.expected == "model" and context.inputs.get("rows") is None
