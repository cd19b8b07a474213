from __future__ import annotations

import json
from pathlib import Path

from word_counts.step import WordCountsConfig, run

from nemotron_steps.runs.context import plain_context
from nemotron_steps.testing import step_conformance, type_conformance


def write_counts(folder: Path) -> None:
    (folder / "counts.json").write_text(json.dumps({"a": 2, "word": 1}))


TestStep = step_conformance("data_prep/word_counts")
TestType = type_conformance("word_counts", example=write_counts)


def test_words_are_counted_at_any_depth(tmp_path: Path):
    (tmp_path / "train.jsonl").write_text('{"note": ["A word, a WORD", {"more": "and 3"}]}\n')
    config = WordCountsConfig(at_least=2)
    context = plain_context(config, tmp_path / "run", inputs={"rows": tmp_path}, outputs={"counts": "word_counts"})
    run(context)
    assert json.loads((context.outputs["counts"].path / "counts.json").read_text()) == {"a": 2, "word": 2}
