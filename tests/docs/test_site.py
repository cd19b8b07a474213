"""The documentation as a site: it builds without a warning, and its generated pages have what they are about."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nemotron_steps.cli.catalog import explanations
from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.manifest.registry import load_registry
from tests.docs.pages import ROOT, cells


def make_docs(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """What `make docs` runs, on the site whose mkdocs.yml is in `source`."""
    recipe = re.search(r"^\t\$\(BIN\)/mkdocs (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    command = [sys.executable, "-m", "mkdocs", *shlex.split(recipe[1]), "--site-dir", str(site)]
    return subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.mkdocs
def test_the_site_builds_without_a_warning_and_has_a_page_a_step_and_a_place_an_error(tmp_path: Path) -> None:
    built = make_docs(ROOT, tmp_path)
    assert built.returncode == 0, built.stderr
    for step, manifest in load_registry().steps.items():
        if manifest.step.entry:
            page = (tmp_path / f"reference/steps/{step}.html").read_text()
            assert all(f"<code>-c {name}</code>" in page for name in manifest.config_names)
    errors = (tmp_path / "reference/errors.html").read_text()
    assert all(re.search(rf'id="{code.lower()}\b', errors) for code in explanations())
    rlvr = (tmp_path / "reference/steps/rl/nemo_rl/rlvr.html").read_text()
    assert "grpo.async_grpo.max_trajectory_age_steps" in rlvr and "the generator" in rlvr
    assert not list(tmp_path.rglob("*.py"))


@pytest.mark.parametrize("page", ["trl", "verl"])
def test_every_key_that_a_page_of_another_trainer_names_exists_here(page: str) -> None:
    keys = cells(ROOT / f"docs/coming_from/{page}.md", 1)
    assert len(keys) > 20
    for key in keys:
        at: object = RlConfig
        for name in key.split("."):
            assert name in at.model_fields, key
            at = at.model_fields[name].annotation
