"""The built wheel, away from the checkout: manifests, configs and pipelines are in it, and the commands find them."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = Path("nemotron_steps", "engine", "kernels")
SOURCES = sorted(path.name for path in (ROOT / KERNELS).glob("*.[ch]"))


def test_list_shows_the_built_in_steps_from_the_wheel(steps) -> None:
    listed = steps("list", "--json")
    assert listed.returncode == 0, listed.stderr
    found = {step["id"] for step in json.loads(listed.stdout)["steps"]}
    assert {"rl/nemo_rl/rlhf", "sft/megatron_bridge", "data_prep/rl_prep"} <= found


def test_plan_composes_the_wheels_configs(steps) -> None:
    planned = steps("plan", "rl/nemo_rl/rlhf", "-c", "tiny", "--json")
    assert planned.returncode == 0, planned.stderr
    assert len(json.loads(planned.stdout)["steps"]) == 6


def test_nothing_comes_from_the_checkout(steps) -> None:
    shown = steps("show", "rl/nemo_rl/rlhf", "--json")
    assert shown.returncode == 0, shown.stderr
    assert str(ROOT) not in shown.stdout


def test_the_second_command_works_too(commands: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(commands / "nemotron"), "steps", "list"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "rl/nemo_rl/rlhf" in done.stdout


def test_every_module_is_in_the_wheel(commands: Path) -> None:
    """Folders that tools leave out by their names, as `build`, are no exception."""
    (installed,) = (commands.parent / "lib").glob("python*/site-packages/nemotron_steps")
    packed = {path.relative_to(installed) for path in installed.rglob("*.py")}
    assert {path.relative_to(ROOT / "nemotron_steps") for path in (ROOT / "nemotron_steps").rglob("*.py")} <= packed


def test_the_sources_of_the_kernels_are_in_the_wheel(commands: Path) -> None:
    (installed,) = (commands.parent / "lib").glob(f"python*/site-packages/{KERNELS}")
    assert sorted(path.name for path in installed.glob("*.[ch]")) == SOURCES != []


def test_the_sources_of_the_kernels_are_in_the_sdist(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--sdist", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        inside = [Path(*Path(name).parts[1:]) for name in packed.getnames()]
    assert sorted(path.name for path in inside if path.parent == KERNELS and path.suffix in (".c", ".h")) == SOURCES
