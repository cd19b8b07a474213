"""Whole runs on a real Ray cluster of CPU actors, beside the same runs in one process."""

from __future__ import annotations

import pytest

from nemotron_steps.engine.grpo import train
from tests.placement.conftest import config_of, metrics_of, start

pytestmark = pytest.mark.ray


def figures(config, work):
    records = []
    run, _ = start(config, work, records)
    try:
        train(run)
        weights = {name: tensor.clone() for name, tensor in run.policy.weights()}
    finally:
        run.close()
    return metrics_of(records), weights


def test_a_synchronous_run_is_the_same_in_one_process_and_on_ray(cluster, checkpoint, tmp_path):
    here, expected = figures(config_of(checkpoint, 3), tmp_path / "process")
    there, weights = figures(config_of(checkpoint, 3, cluster__backend="ray"), tmp_path / "ray")
    for name in ("loss", "reward/mean", "grad_norm"):
        assert [m[name] for m in there] == pytest.approx([m[name] for m in here], rel=1e-5), name
    assert weights.keys() == expected.keys()
    assert all(weights[name].allclose(expected[name], atol=1e-6) for name in expected)
    assert all(m["weight_sync/bytes"] > 1e6 for m in there)
