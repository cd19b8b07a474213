"""The work folder of a step: what an earlier attempt left in it, and what goes when."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.errors import ArtifactError
from nemotron_steps.runs.locks import hold
from nemotron_steps.runs.step_workdir import WorkFolder

PRODUCES = {"model": "toy_model", "report": "eval_report"}


@pytest.fixture
def work(tmp_path: Path) -> WorkFolder:
    return WorkFolder(tmp_path / "work", "0" * 32)


def fill(work: WorkFolder) -> None:
    slots = work.prepare(PRODUCES)
    for slot in slots.values():
        (slot.path / "file").write_text("x")
    slots["model"].attributes["rows"] = 3
    work.mark_filled(slots, {"steps": 10}, 1.5)


def test_what_a_step_filled_is_there_for_the_next_attempt(work: WorkFolder) -> None:
    assert work.filled(PRODUCES) is None and not work.has_progress()
    fill(work)
    filled = work.filled(PRODUCES)
    assert filled is not None and filled[1:] == ({"steps": 10}, 1.5)
    assert {port: (slot.type, slot.attributes) for port, slot in filled[0].items()} == {
        "model": ("toy_model", {"rows": 3}),
        "report": ("eval_report", {}),
    }
    assert work.has_progress(), "only committing is left"
    with pytest.raises(ArtifactError) as caught:
        work.filled({"model": "toy_model"})
    assert caught.value.hints[0].startswith("rm ")


def test_progress_is_a_checkpoint_and_not_an_empty_folder(work: WorkFolder) -> None:
    work.prepare(PRODUCES)
    assert not work.has_progress()
    (work.work / "checkpoint").write_text("x")
    assert work.has_progress()


@pytest.mark.parametrize("committed", ["model", "report"])
def test_outputs_one_of_which_was_moved_into_the_home_are_filled_anew(work: WorkFolder, committed: str) -> None:
    fill(work)
    moved = work.path / "outputs" / committed
    moved.rename(work.path / "moved")
    assert work.filled(PRODUCES) is None


def test_an_attempt_begins_with_empty_outputs_and_its_own_folder_as_it_was(work: WorkFolder) -> None:
    fill(work)
    (work.work / "checkpoint").write_text("x")
    slots = work.prepare(PRODUCES)
    assert [list(slot.path.iterdir()) for slot in slots.values()] == [[], []]
    assert work.filled(PRODUCES) is None and (work.work / "checkpoint").is_file()
    fill(work)
    work.reject()
    assert work.filled(PRODUCES) is None and (work.work / "checkpoint").is_file()
    work.prepare(PRODUCES)
    assert work.filled(PRODUCES) is None, "what was refused is not filled because its folders are there again"


def test_what_a_kill_left_is_removed_unless_somebody_works_in_it(work: WorkFolder) -> None:
    fill(work)
    with hold(work.lock, {}, lambda holder: None):
        work.remove_if_abandoned()
        assert work.path.is_dir()
    work.remove_if_abandoned()
    assert not work.path.exists() and work.lock.is_file()
