"""The packages that the how-tos show are what they say: their code, as it stands there, passes the kit."""

from __future__ import annotations

from pathlib import Path

from nemotron_steps.testing import artifact_type, environment_rollouts
from nemotron_steps.testing.environment_subject import EnvironmentSubject
from nemotron_steps.testing.suite import Examination
from tests.docs.pages import ROOT, blocks
from tests.testing.conftest import package  # noqa: F401, a fixture
from tests.testing.scaffolds import Package, failed


def shown(page: str, language: str) -> list[str]:
    return blocks((ROOT / "docs" / "howto" / page).read_text("utf-8"), language)


def test_the_environment_of_its_how_to_passes_the_kit(package: Package):  # noqa: F811
    code, test = shown("own_environment.md", "python")
    package({"toykit_guess.py": code}, points={"nemotron_steps.environments": "guess = toykit_guess:Guess"})
    named: dict = {}
    exec(test, named)  # the page's own rows
    subject = EnvironmentSubject("guess", named["ROWS"], lambda row: row["answer"])
    assert failed(Examination(environment_rollouts.SUITE, subject)) == []


def test_the_type_of_its_how_to_passes_the_kit(tmp_path: Path, package: Package):  # noqa: F811
    (declared,), (code, test) = shown("own_type.md", "toml"), shown("own_type.md", "python")
    files = {
        "toykit_scores/__init__.py": code,
        "toykit_scores/pack/manifests/types.toml": declared.replace("acme_scores:validate", "toykit_scores:validate"),
    }
    package(files)
    named: dict = {}
    exec(test, named)  # the page's own example
    (tmp_path / "kit").mkdir()
    subject = artifact_type.TypeSubject("acme_scores", tmp_path / "kit", named["write_example"])
    assert failed(Examination(artifact_type.SUITE, subject)) == []
