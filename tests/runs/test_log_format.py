"""Records as lines of the log."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.runs.log_format import (
    compared,
    render,
)


def line(kind: str, step: str = "toy", **fields: Any) -> str | None:
    return render({"kind": kind, "step": step, **fields})


NAN = float("nan")


@pytest.mark.parametrize(
    ("before", "after", "errors", "expected"),
    [
        (0.25, 0.5, None, ("+0.25", "good")),
        (0.5, 0.25, None, ("−0.25", "bad")),
        (1, 1, None, ("no change", "same")),
        (0.25, 0.5, (0.03, 0.04), ("+0.25 ± 0.05", "good")),
        (0.25, 0.27, (0.03, 0.04), ("+0.02 ± 0.05", "")),  # no more than chance
        (0.25, 0.5, ("nan", NAN), ("+0.25", "good")),  # of one prompt each
        ("nan", 0.5, None, ("", "")),
        (0.25, 0.5, "of 3 and 4 samples", ("+0.25, of 3 and 4 samples", "good")),
    ],
)
def test_a_change_says_its_error_and_is_good_or_bad_where_it_is_more_than_that(
    before: Any, after: Any, errors: Any, expected: tuple[str, str]
) -> None:
    value = {"before": before, "after": after}
    if isinstance(errors, str):
        value["samples"] = {"before": 3, "after": 4}
    elif errors is not None:
        value["standard_error"] = dict(zip(("before", "after"), errors, strict=True))
    assert compared("reward", value) == expected


def test_the_log_goes_on_after_a_library_configured_logging(tmp_path: Path) -> None:
    code = (
        "import logging, logging.config, pathlib, sys\n"
        "from nemotron_steps.runs.log_format import RunLog\n"
        "log = RunLog(pathlib.Path(sys.argv[1]), str)\n"
        "logging.getLogger().addHandler(log)\n"
        "logging.config.dictConfig({'version': 1, 'disable_existing_loggers': False})\n"
        "logging.getLogger('library').warning('imported')\n"
        "log.write_text('the run goes on')\n"
        "log.end()\n"
    )
    # A process of its own: what is configured cannot be undone.
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "log.txt")], check=True, timeout=60)
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["library WARNING: imported", "the run goes on"]
