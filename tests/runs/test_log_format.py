"""Records as lines of the log."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.runs.log_format import (
    better,
    compared,
    number,
    readable_size,
    render,
    seconds,
)


def line(kind: str, step: str = "toy", **fields: Any) -> str | None:
    return render({"kind": kind, "step": step, **fields})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (9.94, "9.9 s"),
        (9.95, "10 s"),
        (59.6, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 00 min"),
    ],
)
def test_a_duration_has_the_units_that_fit_it(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (999, "999 B"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (1e12, "1.0 TB"),
    ],
)
def test_a_size_has_the_unit_that_fits_it(size: float, text: str) -> None:
    assert readable_size(size) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (123456.0, "123456"),
        (1234567.0, "1.235e+06"),
        (1e-5, "0.00001"),
        (9e-6, "9e-06"),
        (float("-inf"), "-inf"),
        (12345678, "12345678"),
    ],
)
def test_a_number_has_an_exponent_only_where_there_is_no_other_way(value: Any, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("name", "way"),
    [("Loss", "lower"), ("REWARD", "higher"), ("reward_loss", "lower"), ("length", ""), ("truncated", "lower")],
)
def test_a_measures_name_says_which_way_is_better(name: str, way: str) -> None:
    assert better(name, {"before": 1, "after": 2}) == way


NAN = float("nan")


@pytest.mark.parametrize(
    ("before", "after", "errors", "expected"),
    [
        (0.25, 0.5, None, ("+0.25", "good")),
        (0.5, 0.25, None, ("−0.25", "bad")),
        (-0.5, 0.5, None, ("+1", "good")),
        (1, 1, None, ("no change", "same")),
        (0.25, 0.5, (0.03, 0.04), ("+0.25 ± 0.05", "good")),
        (0.25, 0.27, (0.03, 0.04), ("+0.02 ± 0.05", "")),  # no more than chance
        (0.25, 0.2, (0.03, 0.04), ("−0.05 ± 0.05", "")),
        (0.25, 0.5, ("nan", NAN), ("+0.25", "good")),  # of one prompt each
        (0.25, 0.5, (None, 0.04), ("+0.25", "good")),
        (0.25, 0.5, (0.0, 0.0), ("+0.25", "good")),
        ("nan", 0.5, None, ("", "")),
        (0.25, 0.5, "of 3 and 4 samples", ("+0.25, of 3 and 4 samples", "good")),
        (0.5, NAN, None, ("", "")),
        (0.5, float("inf"), None, ("", "")),
        (None, 0.5, None, ("", "")),
        ("no", "yes", None, ("", "")),
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


def test_exactly_as_many_metrics_as_fit_leave_none_out() -> None:
    assert line("metrics", index=1, values=dict.fromkeys("abcdef", 1)) == "[toy] step 1: a=1  b=1  c=1  d=1  e=1  f=1"
    assert line("event", name="phase", fields={"times": {"train": 0.123456}}) == "[toy] phase: times={train: 0.1235}"


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
