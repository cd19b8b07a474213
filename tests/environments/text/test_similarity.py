from __future__ import annotations

from difflib import SequenceMatcher

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemotron_steps.environments.judged.terminus_judge import matching_ratio

TEXT = st.text(alphabet="abc", max_size=12)


@given(first=TEXT, second=TEXT, floor=st.floats(0.05, 1.0))
def test_the_ratio_is_exact_from_the_floor_on_and_some_bound_below_it(first: str, second: str, floor: float) -> None:
    exact = SequenceMatcher(None, first, second).ratio()
    got = matching_ratio(first, second, floor)
    assert got == pytest.approx(exact) if exact >= floor else exact <= got
    if got < floor:
        assert exact < floor


def test_texts_that_cannot_reach_the_floor_are_not_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: object) -> float:
        raise AssertionError("the costly measure was taken")

    monkeypatch.setattr(SequenceMatcher, "ratio", never)
    assert matching_ratio("abc", "x" * 97, 0.5) == pytest.approx(0.06)  # too different in length
    assert matching_ratio("aaab", "bccc", 0.5) == pytest.approx(0.25)  # too few letters in common
