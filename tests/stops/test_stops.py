"""A sample of the campaign of stops, and what a request to stop that was swallowed comes to."""

import random
import subprocess
import sys
from pathlib import Path

from tests.stops.campaign import Case, campaign, killed

RUN = ("run", "data_prep/rl_prep", "-c", "tiny")


def test_stops_at_random_moments_end_the_command_as_interrupted(tmp_path: Path) -> None:
    cases = [Case(RUN, 1.5), Case(("plan", *RUN[1:]), 0.8), Case(("doctor",), 3.0)]
    stops = campaign(cases, tmp_path / "none", tmp_path, 6, random.Random(7))
    assert [stop for stop in stops if not stop.right] == []


def test_a_killed_run_goes_on_to_the_same_artifacts(tmp_path: Path) -> None:
    account = killed(Case(RUN, 1.5), tmp_path, 2, random.Random(3))
    assert account["kills"] == 2 and account["identical"] == account["artifacts"] != 0


SWALLOWS = """
import os, signal, time
from nemotron_steps import stopping

stopping.AGAIN_S = 0.2
with stopping.interruptible():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    except BaseException:
        pass  # as a library does
    try:
        raise ValueError
    except ValueError:
        time.sleep(30)  # nothing unwinds for the interrupt, though an exception is handled
"""


def test_an_interrupt_that_was_swallowed_is_raised_again() -> None:
    done = subprocess.run([sys.executable, "-c", SWALLOWS], capture_output=True, text=True, timeout=20)
    assert done.returncode != 0 and done.stderr.rstrip().endswith("KeyboardInterrupt")


def test_what_unwinds_for_an_interrupt_is_not_interrupted_again() -> None:
    code = SWALLOWS.replace("        pass", "        time.sleep(0.7); print('unwound'); raise")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert done.stdout == "unwound\n" and done.stderr.rstrip().endswith("KeyboardInterrupt")
