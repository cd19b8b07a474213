"""The packages that the how-tos show are what they say: their code, as it stands there, passes the kit."""

import tomllib
from pathlib import Path

import pytest

from nemotron_steps.testing import artifact_type, environment, executor
from nemotron_steps.testing.environment_subject import EnvironmentSubject
from nemotron_steps.testing.suite import Examination
from tests.docs.pages import ROOT, blocks
from tests.testing.conftest import package  # noqa: F401, a fixture
from tests.testing.scaffolds import Package, failed, made


def shown(page: str, language: str) -> list[str]:
    return blocks((ROOT / "docs" / "howto" / page).read_text("utf-8"), language)


def test_the_environment_of_its_how_to_passes_the_kit(package: Package):  # noqa: F811
    (declared,), (code, test) = shown("own_environment.md", "toml"), shown("own_environment.md", "python")
    (point,) = tomllib.loads(declared)["project"]["entry-points"].items()
    ((name, value),) = point[1].items()
    package({"toykit_guess.py": code}, points={point[0]: f"{name} = {value.replace('acme_', 'toykit_')}"})
    named: dict = {}
    exec(test, named)  # the page's own rows
    subject = EnvironmentSubject("guess", named["ROWS"], lambda row: row["answer"])
    assert failed(Examination(environment.SUITE, subject)) == []


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


def test_the_executor_of_its_how_to_passes_the_kit_with_the_profile_shown(
    tmp_path: Path,
    package: Package,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
):
    (test,) = shown("own_executor.md", "python")
    point = "acme_queue = toykit_new.toykit_thing:ToykitThing"
    folder = made(tmp_path, package, "executor", (), {"nemotron_steps.executors": point})

    def subject(name: str, *, profile: dict) -> executor.ExecutorSubject:
        return executor.ExecutorSubject(name, folder, profile)

    monkeypatch.setattr("nemotron_steps.testing.executor_conformance", subject)
    named: dict = {}
    exec(test, named)  # the page's own profile
    assert failed(Examination(executor.SUITE, named["TestAcmeQueue"])) == []
