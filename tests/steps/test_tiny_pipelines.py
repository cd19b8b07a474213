"""The tiny pipelines as a user runs them: whole at a few steps a stage, killed and continued, and at their own size."""

import collections
import itertools
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
ROWS = "rows={train: 32, validation: 8, heldout: 8}"
RL = [
    "grpo.max_num_steps=2",
    "grpo.num_prompts_per_step=4",
    "heldout.max_prompts=2",
    "heldout.samples_per_prompt=1",
]
JUDGE = "env.nemo_gym.genrm_model.responses_api_models.vllm_model"
FEW_OF_SUPER3 = {
    # Enough to imitate the harness: a policy that calls no tools would leave SWE 2 without a sandbox.
    "prep_sft": ["rows={train: 1000, validation: 16}", "swe.share=0.5"],
    "sft": [
        "sft.max_num_steps=60",
        "policy.train_global_batch_size=16",
        "policy.train_micro_batch_size=16",
        "policy.megatron_cfg.scheduler.lr_warmup_iters=10",
    ],
    **{f"prep_{stage}": [ROWS] for stage in ("rlvr1", "rlvr2", "rlvr3", "swe1", "rlhf")},
    "prep_swe2": ["rows={train: 4, validation: 2, heldout: 2}"],
    **dict.fromkeys(("rlvr1", "rlvr2", "rlvr3", "swe1", "swe2"), RL),
    "rlhf": [
        *RL,
        "policy.generation.max_new_tokens=8",
        # What such a policy says are many tokens of the judge's.
        f"{JUDGE}.max_total_sequence_length=4096",
        "inputs.reward_model.overrides=['sft.max_num_steps=4','agreement.minimum=0','agreement.max_pairs=8']",
    ],
    "eval": ["evaluation.max_prompts=2", "evaluation.max_prompts_of={swe2: 2}", "evaluation.samples_per_prompt=1"],
}


def command(pipeline, few):
    return ["run", pipeline, "-c", "tiny", *(f"{stage}.{text}" for stage, texts in few.items() for text in texts)]


COMMAND = command("nano3_rl", FEW)


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


def artifact(home, ref):
    return json.loads(finished(home, "artifacts", "show", ref, "--json"))


def report(home):
    shown = artifact(home, "eval/stages/report:latest")
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


@pytest.mark.timeout(300)
def test_super3_goes_whole_and_each_stage_trains_on_the_checkpoint_before(tmp_path):
    whole = command("super3_rl", FEW_OF_SUPER3)
    finished(tmp_path, *whole)
    stages = ["sft", "rlvr1", "rlvr2", "rlvr3", "swe1", "swe2", "rlhf"]
    outputs = {record["step"]: record["outputs"] for record in records(tmp_path) if record["kind"] == "step_finished"}
    metrics = collections.defaultdict(list)
    for record in records(tmp_path, "metrics"):
        if "grad_norm" in record["values"]:
            metrics[record["step"]].append(record["values"])
    assert [len(metrics[stage]) for stage in stages] == [60, 2, 2, 2, 2, 2, 2]
    models = {stage: artifact(tmp_path, outputs[stage]["model"]) for stage in stages}
    for before, stage in itertools.pairwise(stages):
        inputs = {read["port"]: read for read in models[stage]["inputs"]}
        assert inputs["policy"]["ref"] == outputs[before]["model"]
        assert inputs["policy"]["digest"] == models[before]["digest"]
        assert inputs["prompts"]["ref"] == outputs[f"prep_{stage}"]["prompts"]
        learnt = any(values["grad_norm"] > 0 for values in metrics[stage])  # not where all answers are worth the same
        assert models[stage]["digest"] != models[before]["digest"]  # biases of experts move whatever answers are worth
        assert learnt or stage not in ("rlvr1", "rlhf")
    assert inputs["reward_model"]["ref"] == outputs["reward_model/genrm"]["reward_model"]
    assert all(values["reward/swe_agent/tool_calls"] > 0 for values in metrics["swe2"])
    figures = report(tmp_path)["figures"]
    assert {row: list(columns) for row, columns in figures.items()} == dict.fromkeys(stages, stages[1:])
    again = finished(tmp_path, *whole)
    assert "nothing to do: all 24 steps are cached" in again and "heldout reward" in again
