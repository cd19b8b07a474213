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
