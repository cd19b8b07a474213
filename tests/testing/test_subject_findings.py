"""What the checks of an environment, an executor and an artifact type find, of subjects that are told here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.environments.base import Session, Verdict
from nemotron_steps.errors import ArtifactError, DataError, StepsError
from nemotron_steps.runs.executors.base import JobState
from nemotron_steps.testing import (
    artifact_type,
    environment_answers,
    environment_rollouts,
    environment_rows,
    executor,
    executor_launch,
    type_declared,
    type_refusals,
)
from nemotron_steps.testing.executor_subject import SECRET
from nemotron_steps.testing.suite import Unmet
from tests.testing.config_models import Changing, Open, Strict

# -- environments ------------------------------------------------------------------------------------------------


def test_settings_that_are_open_or_change_are_found() -> None:
    def look(model: type[BaseModel]) -> None:
        environment_rows.settings_are_strict(SimpleNamespace(found=SimpleNamespace(config_class=model)))  # type: ignore[arg-type]

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
        judge=lambda *_: [Verdict(0.0)],
        with_company=lambda answer: [answer],
        right=lambda row: "4",
    )
    overlooked = ""
    environment_rows.a_missing_field_is_told(subject)
    overlooked = needed
    with pytest.raises(Unmet, match=f"without the required field `{needed}`"):
        environment_rows.a_missing_field_is_told(subject)


@pytest.mark.parametrize("answer", ["4", "fine"])
def test_a_verdict_of_any_answer_that_is_no_json_is_found(answer: str) -> None:
    def judge(row: Any, given: str) -> list[Verdict]:
        return [Verdict(1.0, details={"found": {given} if given == broken else given})]

    subject: Any = SimpleNamespace(rows=[{}], right=lambda row: "4", with_company=lambda answer: [answer], judge=judge)
    broken = "none"
    environment_rollouts.verdicts_can_be_written_down(subject)
    broken = answer
    with pytest.raises(Unmet, match="a verdict is not JSON"):
        environment_rollouts.verdicts_can_be_written_down(subject)


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
    return SimpleNamespace(rows=[{}], build=lambda: environment)


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
    environment_rollouts.tools_are_described(with_tool(TOOL))
    with pytest.raises(Unmet, match=r"a tool has no type|has no schema"):
        environment_rollouts.tools_are_described(with_tool({**TOOL, **change}))


@pytest.mark.parametrize("says", [None, 3, {"sum": 3}])
def test_a_tool_that_answers_with_no_text_is_found(says: Any) -> None:
    environment_rollouts.tool_mistakes_are_told_to_the_policy(with_tool(TOOL))
    with pytest.raises(Unmet, match="gives no text"):
        environment_rollouts.tool_mistakes_are_told_to_the_policy(with_tool(TOOL, says))


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
        environment_answers.worthless_answers_earn_nothing(subject)
    else:
        with pytest.raises(Unmet, match=f"earns {earns}"):
            environment_answers.worthless_answers_earn_nothing(subject)


# -- executors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", list(JobState))
def test_how_a_job_that_was_killed_may_be_told(state: JobState) -> None:
    subject: Any = SimpleNamespace(
        launch=lambda kind: kind, submitted=lambda launch: "job", over=lambda job: SimpleNamespace(state=state)
    )
    if state in (JobState.FAILED, JobState.OUT_OF_MEMORY, JobState.LOST):
        executor.a_killed_job_is_not_done(subject)
    else:
        with pytest.raises(Unmet, match="told as something else"):
            executor.a_killed_job_is_not_done(subject)


@pytest.mark.parametrize("attached", [None, False, True])
def test_a_submission_that_waits_is_found_attached_and_detached(attached: bool | None, tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Launch:
        folder: Path
        attached: bool = False

    tried: list[bool] = []
    in_time = iter([attached is not False, attached is not True])

    def submitted(launch: Launch) -> str:
        tried.append(launch.attached)
        return "job"

    subject: Any = SimpleNamespace(
        launch=lambda kind: Launch(tmp_path),
        submitted=submitted,
        wait=lambda done: next(in_time),
        over=lambda job: None,
    )
    if attached is None:
        executor_launch.submitting_does_not_wait(subject)
        assert tried == [False, True]
    else:
        with pytest.raises(Unmet, match=f"attached={attached}"):
            executor_launch.submitting_does_not_wait(subject)


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("nowhere", None),
        ("file", "written down"),
        ("name", "in the job's name"),
        ("command line", "in a command line"),
        ("lost", "neither arrives nor is refused"),
    ],
)
def test_a_secret_is_found_wherever_it_is_left(
    place: str, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "told.json").touch()
    (tmp_path / "job.sh").write_text(f"export KIT_TOKEN={SECRET}" if place == "file" else "steps run")
    environment = {"KIT_TOKEN": SECRET, "KIT_API_KEY": "" if place == "lost" else SECRET}
    line = f"sbatch --export=KIT_TOKEN={SECRET}" if place == "command line" else "sbatch"
    monkeypatch.setattr(executor_launch, "bytes_of", lambda path: line.encode())
    ended: list[str] = []
    job = f"job-{SECRET}" if place == "name" else "job"
    subject: Any = SimpleNamespace(
        launch=lambda *_, **__: SimpleNamespace(folder=tmp_path),
        executor=SimpleNamespace(submit=lambda launch: job),
        told=lambda launch: {"environment": environment},
        end=ended.append,
    )
    if found is None:
        executor_launch.secrets_are_not_written_down(subject)
    else:
        with pytest.raises(Unmet, match=found):
            executor_launch.secrets_are_not_written_down(subject)
    assert ended == [job]


COUNT = iter(range(10))

# -- artifact types ----------------------------------------------------------------------------------------------


def a_type(tmp_path: Path, validated: Any) -> Any:
    """A type whose example is two files, and whose validator says this of a folder."""

    def written(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "large.bin").write_bytes(b"0123456789")
        (folder / "small.bin").write_bytes(b"ab")
        return folder

    return SimpleNamespace(name="toy_type", ancestors=(), folder=tmp_path, written=written, validated=validated)


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (ArtifactError("no file", where="here"), None),
        (DataError("no rows", where="here"), None),
        (DataError("no rows"), "does not say where"),
        (StepsError("of another class", where="here"), "raises StepsError"),
        (KeyError("rows"), "raises KeyError"),
        (None, "accepts it"),
    ],
)
def test_a_refusal_is_of_the_right_class_and_says_where(
    error: Exception | None, found: str | None, tmp_path: Path
) -> None:
    def validated(folder: Path) -> dict[str, Any]:
        if error is not None:
            raise error
        return {}

    if found is None:
        type_refusals.an_empty_folder_is_refused(a_type(tmp_path, validated))
    else:
        with pytest.raises(Unmet, match=found):
            type_refusals.an_empty_folder_is_refused(a_type(tmp_path, validated))


@pytest.mark.parametrize("begins", [b"kit", b'"kit', b'{"kit"', b'{"kit '])
def test_a_long_error_is_found_whatever_the_file_holds(begins: bytes, tmp_path: Path) -> None:
    def validated(folder: Path) -> dict[str, Any]:
        data = (folder / "large.bin").read_bytes()
        raise DataError("no table", where=str(folder), found=data.decode() if data.startswith(begins) else "")

    with pytest.raises(Unmet, match="an error of 8"):
        type_refusals.errors_are_short(a_type(tmp_path, validated))


@pytest.mark.parametrize(
    ("attributes", "found"),
    [
        (lambda: {"rows": 3}, None),
        (lambda: {"rows": math.nan}, "not JSON"),
        (lambda: {"rows": {3}}, "not JSON"),
        (lambda: {"rows": next(COUNT)}, "two equal folders differ"),
        (lambda: {"other": 3}, "other are not declared"),
    ],
)
def test_attributes_are_json_the_same_twice_and_declared(attributes: Any, found: str | None, tmp_path: Path) -> None:
    subject = a_type(tmp_path, lambda folder: attributes())
    subject.declared = SimpleNamespace(validator="toy:validate", where="types.toml:1")
    types = {"toy_type": SimpleNamespace(attributes={"rows": "number of rows"})}
    subject.registry = SimpleNamespace(types=SimpleNamespace(types=types))
    if found is None:
        type_declared.attributes_are_plain(subject)
    else:
        with pytest.raises(Unmet, match=found):
            type_declared.attributes_are_plain(subject)


@pytest.mark.parametrize("blind_to", ["changed", "removed", "added"])
def test_a_store_that_misses_one_kind_of_damage_is_found(
    blind_to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = ArtifactStore.verify

    def blind(self: ArtifactStore, artifact: Any) -> Any:
        return [] if f"home-{blind_to}" in str(artifact.path) else verify(self, artifact)

    monkeypatch.setattr(ArtifactStore, "verify", blind)
    with pytest.raises(Unmet, match=f"a file that was {blind_to} is not found"):
        artifact_type.damage_is_found(a_type(tmp_path, lambda folder: {}))
