"""docs/install.md says what can be installed."""

from __future__ import annotations

import re
import tomllib

from tests.docs.pages import ROOT


def test_every_extra_is_in_the_table() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = (ROOT / "docs/install.md").read_text().partition("| extra | for |")[2]
    assert set(re.findall(r"^\| `([a-z0-9]+)` \|", table, re.MULTILINE)) == set(extras)


def test_a_set_up_checkout_reads_the_tables_that_the_readme_shows() -> None:
    assert "data.parquet" in (ROOT / "README.md").read_text()
    installed = re.findall(r"-e '\.\[([a-z0-9,]+)\]'", (ROOT / "Makefile").read_text())
    assert len(installed) == 2 and all("data" in extras.split(",") for extras in installed)
