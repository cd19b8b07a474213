"""Whole groups of rows dealt out to splits."""

import pytest

from nemotron_steps.config.schema.data_prep import SplitRows
from nemotron_steps.errors import DataError
from nemotron_steps.steps.data_prep.blends.splits import split_groups


def test_groups_stay_whole_and_training_has_no_more_than_asked_for() -> None:
    groups = ["ab", "cde", "f", "ghi", "j"]
    splits = split_groups(groups, SplitRows(validation=1, heldout=2), of="rows")
    assert {name: "".join(rows) for name, rows in splits.items()} == {
        "train": "fghij",
        "validation": "ab",
        "heldout": "cde",
    }
    fewer = split_groups(groups, SplitRows(train=3, validation=1, heldout=2), of="rows")
    assert "".join(fewer["train"]) == "fgh" and fewer["heldout"] == splits["heldout"]
    with pytest.raises(DataError, match="10 rows are too few") as caught:
        split_groups(groups, SplitRows(train=6, validation=1, heldout=2), of="rows")
    assert caught.value.found == "5 left for training"
