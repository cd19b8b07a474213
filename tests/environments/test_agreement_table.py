"""The table of agreement in docs/environments.md, as `python -m tests.agreement` writes it, is whole."""

from pathlib import Path

import pytest

from nemotron_steps.environments.registry import BUILT_IN
from tests.agreement.compare import names
from tests.agreement.table import BEGIN, END, Line, read_table, write_table

PAGE = Path(__file__).parents[2] / "docs/environments.md"


def test_every_verifier_agrees_on_95_of_100_and_says_why_not_on_the_others() -> None:
    lines = read_table(PAGE.read_text())
    assert set(names()) <= {line.name for line in lines} <= set(BUILT_IN)
    short = {line.name: line.percent for line in lines if line.percent < 95 or line.answers < 1000}
    assert not short
    assert not [line.name for line in lines if len(line.deviations) > 3 or any(not d.why for d in line.deviations)]
    assert not [each.why for line in lines for each in line.deviations if each.why == "unexplained"]


@pytest.mark.parametrize("of", ["tests", "docs"])
def test_what_is_written_is_read_back_and_other_lines_stay(tmp_path: Path, of: str) -> None:
    lines = read_table(PAGE.read_text()) if of == "docs" else [Line("mcqa", 10, 10, ())]
    page = tmp_path / "page.md"
    page.write_text(f"# Before\n\n{BEGIN}\n{END}\nafter\n")
    write_table(page, lines[1:])
    write_table(page, lines[:1])
    assert read_table(page.read_text()) == lines
    assert page.read_text().startswith("# Before\n") and page.read_text().endswith(f"{END}\nafter\n")
