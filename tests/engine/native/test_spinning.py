"""OpenMP's threads spin for a bounded time in the processes that train, unless their user says otherwise."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks import bench_cpu
from nemotron_steps.engine.kernels.spinning import SPIN_COUNT, bound_spinning


@pytest.mark.parametrize("said", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}])
def test_what_the_user_says_stays(said):
    environment = dict(said)
    bound_spinning(environment)
    assert environment == said


def test_the_bound_is_set_before_torch_loads():
    code = "import sys, nemotron_steps.engine.kernels.spinning; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_the_cpu_benchmark_runs_both_engines_with_it(monkeypatch, tmp_path):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    seen = []

    def started(command, *, env, **options):
        seen.append(env["GOMP_SPINCOUNT"])
        return subprocess.CompletedProcess(command, 0, json.dumps({}))

    monkeypatch.setattr(subprocess, "run", started)
    bench_cpu._child("benchmarks.grpo_ours", str(tmp_path))
    assert seen == [str(SPIN_COUNT)]
