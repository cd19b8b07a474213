"""The built wheel, away from the checkout: manifests, configs and pipelines are in it, and the commands find them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a clean environment's scripts. Only dependencies come from the environment that runs the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)], check=True, capture_output=True
    )
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", str(wheel)], check=True, capture_output=True)
    paths = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
    site = Path(sysconfig.get_path("purelib", vars=paths))
    # A path line brings the libraries in, but not the editable install of this checkout: its own .pth is not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "venv" / "bin"


def steps(commands: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "STEPS"))}
    return subprocess.run(
        [str(commands / "steps"), *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60
    )


def test_list_shows_the_built_in_steps_from_the_wheel(commands: Path, tmp_path: Path) -> None:
    listed = steps(commands, "list", "--json", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert {"rl/nemo_rl/rlhf", "sft/megatron_bridge", "data_prep/rl_prep"} <= {
        s["id"] for s in json.loads(listed.stdout)["steps"]
    }


def test_plan_composes_the_wheels_configs(commands: Path, tmp_path: Path) -> None:
    planned = steps(commands, "plan", "rl/nemo_rl/rlhf", "-c", "tiny", "--json", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert len(json.loads(planned.stdout)["steps"]) == 6


def test_nothing_comes_from_the_checkout(commands: Path, tmp_path: Path) -> None:
    shown = steps(commands, "show", "rl/nemo_rl/rlhf", "--json", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert str(ROOT) not in shown.stdout


def test_the_second_command_works_too(commands: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(commands / "nemotron"), "steps", "list"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "rl/nemo_rl/rlhf" in done.stdout
