"""What the checks of an environment and of an artifact type find, of subjects that are told here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from nemotron_steps.environments import registry
from nemotron_steps.environments.base import GradeResult
from nemotron_steps.errors import ArtifactError, DataError, StepsError
from nemotron_steps.testing import artifact_type
from nemotron_steps.testing import environment as kit
from nemotron_steps.testing.suite import Unmet
from tests.testing.config_models import Changing, Open, Strict

# -- environments ------------------------------------------------------------------------------------------------


def test_settings_that_are_open_or_change_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(model: type[BaseModel]) -> None:
        monkeypatch.setattr(registry, "environment_class", lambda name: SimpleNamespace(config_class=model))
        found = SimpleNamespace(config_class=model)
        kit.settings_are_strict(SimpleNamespace(name="toy", config={}, found=found))  # type: ignore[arg-type]

    look(Strict)
    for model in (Open, Changing):
        with pytest.raises(Unmet, match=f"{model.__name__} lets unknown keys"):
            look(model)


@pytest.mark.parametrize(
    ("earns", "allowed", "met"), [(-1.0, None, True), (-0.5, None, False), (-0.5, -0.5, True), (0.0, -0.5, False)]
)
def test_an_answer_without_content_may_earn_the_least_or_what_the_author_allows(
    earns: float, allowed: float | None, met: bool
) -> None:
    subject: Any = SimpleNamespace(
        rows=[{}],
        worthless=allowed,
        build=lambda: SimpleNamespace(reward_range=(-1.0, 1.0)),
        verdict=lambda row, answer, what: GradeResult(earns),
    )
    if met:
        kit.worthless_answers_earn_nothing(subject)
    else:
        with pytest.raises(Unmet, match=f"earns {earns}"):
            kit.worthless_answers_earn_nothing(subject)


# -- artifact types ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (ArtifactError("no file", where="here"), "does not say where"),
        (DataError("no rows"), "does not say where"),
        (StepsError("of another class", where="here"), "raises StepsError"),
        (KeyError("rows"), "raises KeyError"),
        (None, "accepts it"),
    ],
)
def test_a_refusal_is_of_the_right_class_and_says_where(error: Exception | None, found: str, tmp_path: Path) -> None:
    def validated(folder: Path) -> dict[str, Any]:
        if error is not None:
            raise error
        return {}

    subject = artifact_type.TypeSubject("sft_chats", tmp_path, lambda folder: (folder / "a.jsonl").touch())
    subject.validated = validated  # type: ignore[method-assign]
    with pytest.raises(Unmet, match=found):
        artifact_type.what_it_is_not_is_refused(subject)
