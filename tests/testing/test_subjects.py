"""What the checks of a kit ask is told as it is, whatever an earlier check left."""

from __future__ import annotations

import signal
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.environments.base import Verdict
from nemotron_steps.rows.lines import Row
from nemotron_steps.testing import environment_rollouts, executor, pipeline_file, step_runs
from nemotron_steps.testing.suite import Unmet
from nemotron_steps.testing.type_subject import TypeSubject


def test_an_example_is_written_anew_where_a_check_changed_it(tmp_path: Path) -> None:
    subject = TypeSubject("t", tmp_path, lambda folder: (folder / "table.json").write_text("{}"))
    folder = subject.written("example")
    (folder / "left").touch()
    (folder / "table.json").write_text("broken")
    assert subject.written("example") == folder
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("table.json", "{}")]


@pytest.mark.parametrize(
    ("low", "high", "met"), [(1, 1, True), (0, 1, True), (None, 1, True), (1, None, True), (2, 1, False)]
)
def test_bounds_that_leave_one_number_can_be_met(low: float | None, high: float | None, met: bool) -> None:
    check = SimpleNamespace(metric="loss", at_least=low, at_most=high, expected="both")
    manifest = SimpleNamespace(stages=[SimpleNamespace(checks=[check])], where=lambda *place: "here")
    with nullcontext() if met else pytest.raises(Unmet, match="no number passes the check of 'loss'"):
        pipeline_file.bounds_can_be_met(SimpleNamespace(manifest=manifest))


@pytest.mark.parametrize("place", range(4))
def test_each_rollout_of_a_group_is_compared_with_its_verdict_alone(place: int) -> None:
    def subject(wrong: int | None, *, judges_groups: bool = False) -> Any:
        def judge(row: Row, *answers: str) -> list[Verdict]:
            found = [Verdict(float(answer == "4")) for answer in answers]
            if len(answers) > 1 and wrong is not None:
                found[wrong] = Verdict(0.5)
            return found

        found = SimpleNamespace(judges_groups=judges_groups)
        return SimpleNamespace(rows=[{}], right=lambda row: "4", judge=judge, found=found)

    environment_rollouts.groups_are_judged_whole(subject(None))
    environment_rollouts.groups_are_judged_whole(subject(place, judges_groups=True))
    with pytest.raises(Unmet, match="other verdicts than alone"):
        environment_rollouts.groups_are_judged_whole(subject(place))


@pytest.mark.parametrize(("over", "stopped"), [(True, False), (False, True), (True, True)])
def test_a_job_that_ends_with_another_is_told_by_its_state_or_by_what_it_wrote(
    over: bool, stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def working(subject: Any) -> Any:
        yield "job", SimpleNamespace(folder=tmp_path)

    def subject(over: bool) -> Any:
        status = SimpleNamespace(state=SimpleNamespace(over=over))
        return SimpleNamespace(executor=SimpleNamespace(status=lambda job: status))

    monkeypatch.setattr(executor, "_working", working)
    executor.jobs_do_not_mix(subject(False))
    if stopped:
        (tmp_path / "stopped").touch()
    with pytest.raises(Unmet, match="ends another"):
        executor.jobs_do_not_mix(subject(over))


@pytest.mark.parametrize("inside", ["part.bin", ""])
@pytest.mark.parametrize("survives", ["at_write", "at_return"])
def test_a_step_is_killed_at_its_last_file_and_when_it_has_returned(inside: str, survives: str, tmp_path: Path) -> None:
    points: list[str] = []

    def process(name: str, words: Any, *, home: Path, **point: Any) -> Any:
        points.extend(point or ["none"])
        killed = point and (survives not in point or unkilled is False)
        return SimpleNamespace(code=-signal.SIGKILL if killed else 0, commands=[1], error=lambda: None)

    first = SimpleNamespace(seen={"writes_inside": inside})
    step: Any = SimpleNamespace(
        folder=tmp_path, words=lambda home: [], first=first, process=process, digests=lambda ran: 1
    )
    unkilled = False
    step_runs.resumes_after_a_kill(step)
    assert points == [*(["at_write"] if inside else []), "at_return", "none"]
    unkilled = True
    if inside or survives == "at_return":
        with pytest.raises(Unmet, match="did not reach the point"):
            step_runs.resumes_after_a_kill(step)
