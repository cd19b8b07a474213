"""What the checks of an environment and of an artifact type find, of subjects that are told here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from nemotron_steps.environments import registry
from nemotron_steps.environments.base import Session, Verdict
from nemotron_steps.errors import ArtifactError, DataError, StepsError
from nemotron_steps.testing import artifact_type
from nemotron_steps.testing import environment as kit
from nemotron_steps.testing.environment_subject import EnvironmentSubject
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


@pytest.mark.parametrize("needed", ["a.b", "c"])
def test_a_required_field_that_a_row_may_lack_is_found_however_deep(needed: str) -> None:
    def check_row(row: dict[str, Any], where: str) -> None:
        lacks = {"a.b": "b" not in row.get("a", {}), "c": "c" not in row}
        if any(absent for field, absent in lacks.items() if field != overlooked):
            raise DataError("a field is missing")

    subject: Any = SimpleNamespace(
        rows=[{"responses_create_params": {}, "a": {"b": 1}, "c": 2}],
        found=SimpleNamespace(required_fields=("a.b", "c")),
        build=lambda: SimpleNamespace(check_row=check_row),
        verdict=lambda *_: Verdict(0.0),
        right=lambda row: "4",
    )
    overlooked = ""
    kit.a_missing_field_is_told(subject)
    overlooked = needed
    with pytest.raises(Unmet, match=f"without the required field `{needed}`"):
        kit.a_missing_field_is_told(subject)


@pytest.mark.parametrize("answer", ["4", "fine"])
def test_a_verdict_of_any_answer_that_is_no_json_is_found(answer: str) -> None:
    def judge(row: Any, given: str) -> list[Verdict]:
        return [Verdict(1.0, details={"found": {given} if given == broken else given})]

    subject: Any = SimpleNamespace(rows=[{}], right=lambda row: "4", judge=judge)
    broken = "none"
    kit.verdicts_can_be_written_down(subject)
    broken = answer
    with pytest.raises(Unmet, match="a verdict is not JSON"):
        kit.verdicts_can_be_written_down(subject)


TOOL = {
    "type": "function",
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
}


def with_tool(tool: dict[str, Any], says: Any = "error: what?") -> Any:
    """A subject whose environment offers a tool that says this of every call."""

    async def seed(row: Any) -> Session:
        return Session(tools=[tool])

    async def call_tool(session: Session, name: str, arguments: Any) -> Any:
        return says

    async def nothing(*_: Any) -> None:
        return None

    environment = SimpleNamespace(seed=seed, call_tool=call_tool, start=nothing, close=nothing, release=nothing)
    subject: Any = EnvironmentSubject("toy", [{}], str)
    subject.build = lambda: environment
    return subject


@pytest.mark.parametrize(
    "change",
    [
        {"type": "tool"},
        {"name": ""},
        {"description": ""},
        {"parameters": None},
        {"parameters": {"properties": {}}},
        {"parameters": {"type": "object"}},
    ],
)
def test_a_tool_that_lacks_any_part_of_its_description_is_found(change: dict[str, Any]) -> None:
    kit.tools_are_described(with_tool(TOOL))
    with pytest.raises(Unmet, match=r"a tool has no type|has no schema"):
        kit.tools_are_described(with_tool({**TOOL, **change}))


@pytest.mark.parametrize("says", [None, 3, {"sum": 3}])
def test_a_tool_that_answers_with_no_text_is_found(says: Any) -> None:
    kit.tool_mistakes_are_told_to_the_policy(with_tool(TOOL))
    with pytest.raises(Unmet, match="gives no text"):
        kit.tool_mistakes_are_told_to_the_policy(with_tool(TOOL, says))


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
        verdict=lambda row, answer, what: Verdict(earns),
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

    subject: Any = SimpleNamespace(folder=tmp_path, validated=validated)
    with pytest.raises(Unmet, match=found):
        artifact_type.other_folders_are_refused(subject)
