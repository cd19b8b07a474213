"""The tiny pipelines as a user runs them: whole at a few steps a stage, killed and continued, and at their own size."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = [pytest.mark.chain, pytest.mark.slow]

FEW = {
    "prep_sft": ["rows.train=400", "rows.validation=16"],
    "sft": ["sft.max_num_steps=12", "checkpointing.save_period=4"],
    "prep_rlvr": ["rows={train: 64, validation: 8, heldout: 8}"],
    "rlvr": ["grpo.max_num_steps=6", "grpo.num_prompts_per_step=4", "checkpointing.save_period=2"],
    "prep_genrm": ["rows={train: 64, validation: 8, heldout: 8}"],
    "rlvr_genrm": [
        "grpo.max_num_steps=2",
        "grpo.num_prompts_per_step=4",
        "inputs.reward_model.overrides=['sft.max_num_steps=4','agreement.minimum=0','agreement.max_pairs=8']",
    ],
    "prep_dpo": ["rows={train: 32, validation: 8}"],
    "dpo": ["dpo.max_num_steps=4", "dpo.val_batches=1", "checkpointing.save_period=1"],
    "eval": ["evaluation.max_prompts=4", "evaluation.samples_per_prompt=1"],
}
"""Stage → overrides: too little to learn anything, enough to go through everything."""
COMMAND = ["run", "nano3_rl", "-c", "tiny", *(f"{stage}.{text}" for stage, texts in FEW.items() for text in texts)]


def start(home, *arguments):
    environment = {**os.environ, "STEPS_HOME": str(home)}
    command = [sys.executable, "-m", "nemotron_steps.cli.main", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def finished(home, *arguments):
    process = start(home, *arguments)
    output, _ = process.communicate()
    assert process.returncode == 0, output[-3000:]
    return output


def records(home, name="events"):
    files = sorted((home / "runs").glob(f"*/{name}.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines() if line.endswith("}")]


def killed_during(home, stage, kind, name="events"):
    """Start the pipeline and SIGKILL it as soon as there is such a record of a stage."""
    process = start(home, *COMMAND)
    while not any(record.get("step") == stage and record["kind"] == kind for record in records(home, name)):
        assert process.poll() is None, process.stdout.read()[-3000:]
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


def report(home):
    shown = json.loads(finished(home, "artifacts", "show", "eval/stages/report:latest", "--json"))
    return json.loads((home / "artifacts" / "objects" / shown["digest"] / "report.json").read_text())


@pytest.mark.timeout(300)
def test_a_pipeline_killed_at_several_stages_ends_as_one_that_was_not(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finished(whole, *COMMAND)
    killed_during(broken, "sft", "metrics", "metrics")
    killed_during(broken, "rlvr", "step_started")
    killed_during(broken, "dpo", "metrics", "metrics")
    finished(broken, *COMMAND)
    states = [(record["step"], record["kind"]) for record in records(broken) if record["kind"] == "step_finished"]
    assert len(states) == len(set(states)), "a stage was done twice"
    assert report(broken) == report(whole)
    table = report(broken)
    assert list(table["figures"]) == ["sft", "rlvr", "rlvr_genrm", "dpo"]
    lineage = finished(broken, "artifacts", "lineage", "eval/stages/report:latest")
    for stage in (
        "data_prep/sft_prep",
        "sft/megatron_bridge",
        "rl/nemo_rl/rlvr",
        "reward_model/genrm",
        "rl/nemo_rl/dpo",
    ):
        assert stage in lineage
    again = finished(broken, *COMMAND)
    assert "nothing to do: all 15 steps are cached" in again and "heldout reward" in again
