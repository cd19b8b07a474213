"""A step that was cut off goes on from its checkpoint when only how it runs has changed, and starts anew otherwise."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from nemotron_steps.runs.cache_key import cache_key
from nemotron_steps.session.run_request import RunRequest
from nemotron_steps.session.session import Session


def steps(*arguments, home, code):
    done = subprocess.run(
        [sys.executable, "-m", "nemotron_steps.cli.main", "run", "sft/megatron_bridge", "-c", "tiny", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "STEPS_HOME": str(home)},
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(300)
def test_training_goes_on_with_smaller_micro_batches_and_is_cached_whatever_they_were(tmp_path):
    small = ("sft.max_num_steps=3", "checkpointing.save_period=1")
    cut = steps(*small, "checkpointing.checkpoint_must_save_by=00:00", home=tmp_path, code=3)
    assert "step 1: loss" in cut and "step 2: loss" not in cut
    rest = steps(*small, "policy.train_micro_batch_size=16", "cluster.gpus_per_node=0", home=tmp_path, code=0)
    assert "continues from its work folder" in rest
    assert "resumed: step=1" in rest and "step 3: loss" in rest and "step 1: loss" not in rest
    again = json.loads(steps(*small, "--json", "--dry-run", home=tmp_path, code=0))
    assert all(planned["cached"] for planned in again["steps"])


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("policy.train_micro_batch_size=1", True),
        ("policy.megatron_cfg.tensor_model_parallel_size=2", True),
        ("cluster.backend=ray", True),
        ("policy.generation.max_new_tokens=3", False),
        ("policy.megatron_cfg.optimizer.lr=0.5", False),
        ("grpo.seed=7", False),
    ],
)
def test_a_cache_key_depends_on_what_a_step_makes_and_not_on_how_it_runs(override, same, tmp_path):
    bench = Session(home=str(tmp_path))
    (planned,) = (s for s in bench.plan(RunRequest(targets=("rl/nemo_rl/rlvr",), config="tiny")) if "rlvr" in s.step_id)
    changed = replace(planned, config=bench.compose(planned.step_id, "tiny", (override,)).values)
    assert (cache_key(changed, {}) == cache_key(planned, {})) is same
