"""What the checks of a kit ask is told as it is, whatever an earlier check left."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.environments.base import GradeResult
from nemotron_steps.rows.lines import Row
from nemotron_steps.testing import environment as kit
from nemotron_steps.testing.artifact_type import TypeSubject
from nemotron_steps.testing.suite import Unmet


def test_an_example_is_written_anew_where_a_check_changed_it(tmp_path: Path) -> None:
    subject = TypeSubject("t", tmp_path, lambda folder: (folder / "table.json").write_text("{}"))
    folder = subject.written("example")
    (folder / "left").touch()
    (folder / "table.json").write_text("broken")
    assert subject.written("example") == folder
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("table.json", "{}")]


@pytest.mark.parametrize("place", range(4))
def test_each_rollout_of_a_group_is_compared_with_its_verdict_alone(place: int) -> None:
    def subject(wrong: int | None, *, judges_groups: bool = False) -> Any:
        def judge(row: Row, *answers: str) -> list[GradeResult]:
            found = [GradeResult(float(answer == "4")) for answer in answers]
            if len(answers) > 1 and wrong is not None:
                found[wrong] = GradeResult(0.5)
            return found

        found = SimpleNamespace(judges_groups=judges_groups)
        return SimpleNamespace(rows=[{}], right=lambda row: "4", judge=judge, found=found)

    kit.groups_are_judged_whole(subject(None))
    kit.groups_are_judged_whole(subject(place, judges_groups=True))
    with pytest.raises(Unmet, match="other verdicts than alone"):
        kit.groups_are_judged_whole(subject(place))
