"""Single checks of instructions, beside those that the published rows reach."""

from __future__ import annotations

import pytest

from nemotron_steps.environments.text.instruction_checks import square_brackets


@pytest.mark.parametrize(("text", "follows"), [("[a] [b]", True), ("[a] [b", False), ("[a] b]", False), ("a", False)])
def test_square_brackets_are_on_both_sides_of_every_word(text: str, follows: bool) -> None:
    assert square_brackets(text) is follows
