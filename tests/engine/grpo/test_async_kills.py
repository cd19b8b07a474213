"""Kill -9 in the middle of an asynchronous run, whose weights are updated in flight.

Twenty kills of longer runs are a program of their own: `python -m benchmarks.kill_async`.
"""

from __future__ import annotations

import pytest

from benchmarks.kill_async import PROMPTS, kill_until_done


@pytest.mark.parametrize(
    ("kills", "steps", "dynamic"),
    [
        pytest.param(2, 8, True, id="2-kills"),
        pytest.param(3, 16, False, id="3-kills", marks=pytest.mark.slow),
    ],
)
def test_a_killed_asynchronous_run_neither_loses_nor_repeats_a_prompt_nor_lacks_a_report(
    kills, steps, dynamic, tmp_path
):
    account = kill_until_done(tmp_path, kills=kills, steps=steps, dynamic=dynamic, seed=37)
    assert account.lost == account.repeated == []
    assert account.trained == steps * PROMPTS
    assert account.without_metrics == account.without_samples == []
    assert dynamic == ("no_signal" in account.outcomes)
