"""Two specialists become one policy: the tiny distillation as a user runs it."""

from __future__ import annotations

import json

import pytest

from tests.steps.test_tiny_chain import steps, summaries

pytestmark = [pytest.mark.chain, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_distilled_policy_keeps_what_each_of_its_teachers_has_learnt(tmp_path):
    steps("run", "opd", "-c", "tiny", home=tmp_path)
    reward = summaries(tmp_path)["eval"]["heldout_reward"]
    own = {"reasoning", "instructions"}
    for skill in own:
        (other,) = own - {skill}
        assert reward[skill][skill] > reward["sft"][skill] + 0.3  # the teachers have something to teach
        assert reward["opd"][skill] > reward[skill][skill] - 0.06
        assert reward["opd"][skill] > reward[other][skill] + 0.1
    plan = json.loads(steps("plan", "rl/nemo_rl/opd", "-c", "tiny", "--json", home=tmp_path))
    assert all(step["cached"] for step in plan["steps"])  # the step by itself plans the same teachers
