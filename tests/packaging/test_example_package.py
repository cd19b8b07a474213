"""The example package, installed beside the wheel: its step and its environment are found, and work together."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "palindromes"


@pytest.fixture(scope="module", autouse=True)
def installed(commands: Path, tmp_path_factory: pytest.TempPathFactory):
    copy = tmp_path_factory.mktemp("example") / "palindromes"  # building writes into the folder
    shutil.copytree(EXAMPLE, copy)
    pip = [str(commands / "python"), "-m", "pip"]
    subprocess.run([*pip, "install", "-q", "--no-deps", str(copy)], check=True, capture_output=True)
    yield
    subprocess.run([*pip, "uninstall", "-q", "-y", "palindromes"], check=True, capture_output=True)


def test_its_step_is_listed_and_chains_with_the_built_in_ones(steps) -> None:
    listed = steps("list", "--tag", "example", "--json")
    assert [step["id"] for step in json.loads(listed.stdout)["steps"]] == ["data_prep/palindrome_prompts"]
    planned = steps("plan", "data_prep/palindrome_prompts", "rl/nemo_rl/rlvr", "-c", "tiny", "--json")
    assert planned.returncode == 0, planned.stderr
    assert [step["step"] for step in json.loads(planned.stdout)["steps"]][-1] == "rl/nemo_rl/rlvr"


def test_its_environment_grades_the_rows_its_step_writes(steps, commands: Path, tmp_path: Path) -> None:
    ran = steps("run", "data_prep/palindrome_prompts", "train=5", "validation=1", "heldout=1")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (rows,) = tmp_path.glob(".steps/artifacts/objects/*/train-split.jsonl")
    script = """
import asyncio, json, sys
from nemotron_steps.environments.base import Session
from nemotron_steps.environments.agents import route
from nemotron_steps.environments.registry import environment_class
from nemotron_steps.environments.responses import Response
rows = [json.loads(line) for line in open(sys.argv[1])]
found = environment_class(route(rows[0], "rows"))
environment = found(found.config_class(), {})
for row in rows:
    environment.check_row(row, "rows")
answers = ["levels", "level", "ab"]
message = lambda text: {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
verdicts = [asyncio.run(environment.verify(rows[0], Response.from_output([message(a)]), Session())) for a in answers]
print(json.dumps([len(rows), *(verdict.reward for verdict in verdicts)]))
"""
    done = subprocess.run(
        [str(commands / "python"), "-c", script, str(rows)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [5, 0.0, 1.0, 0.0]
