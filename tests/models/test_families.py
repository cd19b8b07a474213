"""One table of families: its modules have what conversion needs, and the page says what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from nemotron_steps.config.families import FAMILIES
from nemotron_steps.errors import UnsupportedError
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.families import module_of

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_has_the_table():
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| `(\w+)\.py` \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [(family.name, family.kind, family.module) for family in FAMILIES.values()]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_module_reads_configs_and_knows_parameters(family):
    module = module_of(family)
    assert callable(module.read) and callable(module.parameters) and isinstance(module.CARRIED, str)


def test_another_family_is_refused_with_those_that_there_are():
    with pytest.raises(UnsupportedError) as caught:
        Architecture.from_config({"model_type": "gpt2"})
    assert caught.value.expected == " | ".join(FAMILIES)


def test_the_table_needs_no_torch():
    code = (
        "import sys, nemotron_steps.config.families; print(*(set(sys.modules) & {'torch', 'pydantic', 'transformers'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
