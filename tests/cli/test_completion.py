"""Completion: what the shell is answered where its cursor stands, in a process as the shell starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

ENV = '[big]\nexecutor = "slurm"\naccount = "a"\npartition = "p"\n'


def offered(line: str, folder: Path) -> list[str]:
    """What is offered at the end of a line."""
    (folder / "env.toml").write_text(ENV)
    answer = folder / "answer"
    asked = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line.encode())),
        "XDG_CACHE_HOME": str(folder),
        "STEPS_HOME": str(folder / "home"),
    }
    program = [sys.executable, "-c", "from nemotron_steps.cli.main import steps; steps()"]
    subprocess.run(program, env=asked, cwd=folder, timeout=60, check=False)
    return [each.strip() for each in answer.read_text().splitlines()]


@pytest.mark.parametrize(
    ("line", "one", "none"),
    [
        ("steps ru", "run", "plan"),
        ("steps run rl/nemo_rl/rl", "rl/nemo_rl/rlhf", "sft/automodel"),
        ("steps run nano", "nano3_rl", "super3_rl"),
        ("steps run rl/nemo_rl/rlvr -c on", "one_gpu", "tiny"),
        ("steps run super3_rl -c ti", "tiny", "one_gpu"),
        ("steps run rl/nemo_rl/rlvr grpo.num_g", "grpo.num_generations_per_prompt=", "grpo.seed="),
        ("steps run rl/nemo_rl/dpo cluster.backend=", "cluster.backend=ray", "cluster.num_nodes="),
        ("steps run rl/nemo_rl/rlhf --input re", "reward_model=", "policy="),
        ("steps run rl/nemo_rl/rlhf -b b", "big", "tiny"),
        ("steps explain E31", "E310", "E100"),
        ("steps logs la", "latest", "runs"),
        ("steps list --produces rl_", "rl_prompts", "checkpoint_hf"),
    ],
)
def test_what_may_stand_at_the_cursor_is_offered(line: str, one: str, none: str, tmp_path: Path) -> None:
    found = offered(line, tmp_path)
    assert one in found and none not in found, found


def test_the_shells_part_names_the_program(cli: Cli) -> None:
    assert "complete" in cli("completion", "bash").out and "steps" in cli("completion", "zsh").out
    assert cli("completion", "pwsh").code == 2
