"""docs/install.md says what can be installed."""

from __future__ import annotations

import re
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata

from packaging.specifiers import SpecifierSet

from tests.docs.pages import ROOT


def test_every_extra_is_in_the_table() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = (ROOT / "docs/install.md").read_text().partition("| extra | for |")[2]
    assert set(re.findall(r"^\| `([a-z0-9]+)` \|", table, re.MULTILINE)) == set(extras)


def test_a_set_up_checkout_reads_the_tables_that_the_readme_shows() -> None:
    assert "data.parquet" in (ROOT / "README.md").read_text()
    installed = re.findall(r"-e '\.\[([a-z0-9,]+)\]'", (ROOT / "Makefile").read_text())
    assert len(installed) == 2 and all("data" in extras.split(",") for extras in installed)


def test_make_test_installs_what_tests_would_be_skipped_without() -> None:
    """All but Triton, which needs a GPU."""
    skipped_without = {
        name.partition(".")[0].lower()
        for file in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r'importorskip\("([\w.]+)"', file.read_text())
    } - {"triton", "nemotron_steps"}
    brought_along = {"pandas": "datasets", "nbformat": "nbclient", "mlflow": "mlflow_skinny"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    of_tests = re.findall(r"-e '\.\[([a-z0-9,]+)\]'", (ROOT / "Makefile").read_text())[-1].split(",")
    listed = [*core, *(line for extra in of_tests for line in extras[extra])]
    installed = {re.split(r"[^\w-]", line)[0].lower().replace("-", "_") for line in listed}
    assert {"nbclient", "ipykernel"} <= skipped_without
    assert {brought_along.get(name, name) for name in skipped_without} <= installed


def test_every_pin_installs_on_the_oldest_python_that_is_promised() -> None:
    """3.11.2 is Debian's; a patch release of Python is no reason to be refused."""
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "requirements/constraints.txt").read_text(), re.MULTILINE)
    wanted = {}
    for name in pins:
        with suppress(PackageNotFoundError):
            wanted[name] = metadata(name)["Requires-Python"] or ""
    assert len(wanted) > 100
    assert {name: text for name, text in wanted.items() if not SpecifierSet(text).contains("3.11.2")} == {}
