"""What an interrupted run says that is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.runs.step_workdir import kept

DONE, AT_WORK, PENDING = {"state": "ran"}, {"state": "interrupted", "cache_key": "k"}, {"state": "pending"}


@pytest.mark.parametrize(
    ("steps", "checkpoints", "said"),
    [
        ({"a": DONE, "b": AT_WORK}, (3, 12), "kept: a, b up to its checkpoint of step 12"),
        (
            {"a": DONE, "b": DONE, "c": AT_WORK},
            (),
            "kept: 2 of 3 steps (a, b); c has no checkpoint yet and begins anew",
        ),
        ({"a": AT_WORK}, (5,), "kept: a up to its checkpoint of step 5"),
        ({"a": AT_WORK, "b": PENDING}, (), "nothing was finished yet; a has no checkpoint yet and begins anew"),
        ({"a": PENDING}, (), "nothing was finished yet"),
        *(
            ({"a": {"state": state, "cache_key": "k"}, "b": PENDING}, (3,), "kept: a")
            for state in ("ran", "cached", "reused")
        ),
    ],
)
def test_finished_steps_and_the_newest_checkpoint_are_kept(tmp_path: Path, steps, checkpoints, said) -> None:
    for step in checkpoints:
        (tmp_path / "k" / "work" / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    (tmp_path / "k" / "work" / "checkpoints" / ".tmp").mkdir(parents=True)
    assert kept(steps, tmp_path) == said
