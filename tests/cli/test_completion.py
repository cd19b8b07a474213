"""Completion: what the shell is answered where its cursor stands, in a process as the shell starts it."""

import os
import subprocess
import sys

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.runs.run_folder import RunFolder
from tests.cli.conftest import Cli

RUN = "20260101-000000-toy-0001"
ENV = '[big]\nexecutor = "slurm"\naccount = "a"\npartition = "p"\n'


PROGRAM = """
import os, pathlib, sys
import nemotron_steps.cli.completion
from nemotron_steps.cli.main import steps
for number, line in enumerate(sys.argv[1:]):
    if not (child := os.fork()):
        os.environ["_ARGCOMPLETE_STDOUT_FILENAME"] = f"answer-{number}"
        os.environ["COMP_LINE"], os.environ["COMP_POINT"] = line, str(len(line.encode()))
        steps()
    os.waitpid(child, 0)
"""
"""Answers every line in a process of its own, as the shell starts one, but imports things once."""
CASES = (
    ("steps ru", "run", "plan"),
    ("steps run super3_rl -c ti", "tiny", "one_gpu"),
    ("steps run rl/nemo_rl/rlvr grpo.num_g", "grpo.num_generations_per_prompt=", "grpo.seed="),
    ("steps run rl/nemo_rl/rlhf -b b", "big", "tiny"),
    ("steps run -c tiny -r big rl/nemo_rl/rl", "rl/nemo_rl/rlhf", "sft/automodel"),
    ("steps run rl/nemo_rl/rlvr --over grpo.se", "grpo.seed=", "grpo.max_num_steps="),
    ("steps run rl/nemo_rl/rlvr --input p", "policy=", "model="),
    ("steps artifacts lineage rows:", "rows:v1", "rows"),
    ("steps status 2026", RUN, "latest"),
)


@pytest.fixture(scope="module")
def offered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Line → what is offered at its end."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "env.toml").write_text(ENV)
    (folder / "own.yaml").write_text("defaults: [tiny]\n")
    (folder / "rows.jsonl").write_text('{"prompt": "1 + 1?"}\n')
    ArtifactStore(folder / "home").add(folder / "rows.jsonl", type_name="prompt_data", name="rows")
    RunFolder(ArtifactStore(folder / "home"), RUN).create("toy", {})
    asked = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "XDG_CACHE_HOME": str(folder),
        "STEPS_HOME": str(folder / "home"),
    }
    lines = [line for line, _, _ in CASES]
    subprocess.run([sys.executable, "-c", PROGRAM, *lines], env=asked, cwd=folder, timeout=120, check=True)
    return {
        line: [each.strip() for each in (folder / f"answer-{number}").read_text().splitlines()]
        for number, line in enumerate(lines)
    }


@pytest.mark.parametrize(("line", "one", "none"), CASES)
def test_what_may_stand_at_the_cursor_is_offered(line: str, one: str, none: str, offered: dict[str, list[str]]) -> None:
    assert one in offered[line] and none not in offered[line], offered[line]


def test_the_shells_part_names_the_program(cli: Cli) -> None:
    assert "complete" in cli("completion", "bash").out and "steps" in cli("completion", "zsh").out
    assert cli("completion", "pwsh").code == 2
