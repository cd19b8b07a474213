"""A few steps of the tiny chain against figures written down: what moves code around must not move them.

The prepared data is the same byte for byte. Losses agree to the rounding of another processor's or the plain torch
operators' products; on one machine they are equal bit for bit (so are the digests of the trained models).
"""

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.chain, pytest.mark.slow]

PROMPTS = "1da7b58f143ab8167407d4e180a2a7855aaf6c8965c6beffc2f00cdeccb4d4f5"
CHATS = "5dd701d114ad3cca50ba339ad48dcdf015c2c0c41fada8b6d1c0234bfa51a9f6"
SFT_LOSS = [5.627222061, 5.612430096, 5.549743176, 5.471071720, 5.397403717]
SFT_GRAD_NORM = [3.375885882, 3.187240889, 2.956951105, 2.621947103, 2.210932108]
RL_LOSS, RL_GRAD_NORM, RL_REWARD = 0.017265918, 0.046856887, 0.012760417
"""Of the first step: its rollouts are sampled by the policy of five SFT steps."""


def test_the_tiny_chains_data_and_first_losses_are_the_golden_ones(tmp_path):
    home = tmp_path / "home"
    command = [
        *(sys.executable, "-m", "nemotron_steps.cli.main", "run", "rl/nemo_rl/rlvr", "-c", "tiny"),
        *("inputs.policy.overrides=['sft.max_num_steps=5']", "grpo.max_num_steps=2", "--home", str(home)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    objects = [json.loads(file.read_text()) for file in home.glob("artifacts/objects/*/artifact.json")]
    digests = {record["name"]: record["digest"] for record in objects}
    assert digests["data_prep/rl_prep/prompts"] == PROMPTS
    assert digests["data_prep/sft_prep/chats"] == CHATS

    (file,) = home.glob("runs/*/metrics.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    trained = [record for record in records if "loss" in record["values"]]  # step 0 is validation alone
    sft = [record["values"] for record in trained if record["step"] == "sft/megatron_bridge"]
    rl = [record["values"] for record in trained if record["step"] == "rl/nemo_rl/rlvr"]
    assert [values["loss"] for values in sft] == pytest.approx(SFT_LOSS, rel=1e-5)
    assert [values["grad_norm"] for values in sft] == pytest.approx(SFT_GRAD_NORM, rel=1e-4)
    first = rl[0]
    assert first["reward/mean"] == pytest.approx(RL_REWARD, abs=2e-3)
    assert first["loss"] == pytest.approx(RL_LOSS, rel=0.02)
    assert first["grad_norm"] == pytest.approx(RL_GRAD_NORM, rel=0.02)
