"""RowCounts of sources whose rows are wrong in very many ways."""

from __future__ import annotations

from nemotron_steps.steps.data_prep.blends.shards import RowCounts


def test_reasons_beyond_a_hundred_are_counted_in_one_and_none_is_lost() -> None:
    parts = [RowCounts(read=150), RowCounts(read=150)]
    for number, part in enumerate(parts):
        for place in range(150):
            part.refuse(f"reason {number}.{place}")
        part.refuse("reason 0.0")
        part.read += 1
    whole = RowCounts()
    for part in parts:
        whole.add(part)
    assert whole.num_refused == whole.read == 302 and whole.balance() == 0
    assert len(whole.refused) <= 101 and whole.refused["reason 0.0"] == 2
    assert RowCounts.from_dict(whole.to_dict()) == whole
