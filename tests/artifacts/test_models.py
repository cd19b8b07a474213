"""Which file of an artifact's folder is which split."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.errors import DataError


def test_the_only_file_of_rows_is_the_training_split_and_one_of_several_is_not(tmp_path: Path) -> None:
    artifact = Artifact("training_jsonl", "0" * 64, tmp_path)
    (tmp_path / "mine.jsonl").write_text("{}\n")
    assert artifact.jsonl() == tmp_path / "mine.jsonl" and artifact.jsonl("validation") is None
    (tmp_path / "other.jsonl").write_text("{}\n")
    assert artifact.jsonl() is None
    with pytest.raises(DataError) as caught:
        artifact.require_jsonl()
    assert caught.value.found == "mine.jsonl, other.jsonl"
    (tmp_path / "train.jsonl").write_text("{}\n")
    assert artifact.require_jsonl() == tmp_path / "train.jsonl"
