"""The built-in executors keep to what executors of other packages are held to.

`local` does so with jobs. Those that need a cluster, a daemon or an account have tests of their own for jobs; here
their profiles are looked at.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.testing import executor_conformance
from nemotron_steps.testing.executor import PROFILE_SUITE, ExecutorSubject
from nemotron_steps.testing.suite import Examination, State

TestLocal = executor_conformance("local")

PROFILES: dict[str, dict[str, Any]] = {
    "dgxcloud": {"container_image": "steps:cpu", "project_name": "research"},
    "docker": {"container_image": "steps:cpu", "mounts": ["/data:/data"]},
    "lepton": {"container_image": "steps:cpu", "resource_shape": "cpu.small"},
    "ray": {"ray_address": "http://127.0.0.1:8265"},
    "skypilot": {"cloud": "aws", "file_mounts": {"/home/steps": "s3://bucket"}},
    "slurm": {"account": "research", "partition": "batch", "time": "00:10:00"},
}


@pytest.mark.parametrize("name", PROFILES)
def test_the_profile_of_a_built_in_executor_keeps_to_the_rules(tmp_path: Path, name: str):
    outcomes = Examination(PROFILE_SUITE, ExecutorSubject(name, tmp_path, PROFILES[name])).outcomes()
    left = {check: outcome.text for check, outcome in outcomes.items() if outcome.state is not State.PASSED}
    assert left == {}
