"""The built wheel, away from the checkout: manifests, configs and pipelines are in it, and the commands find them."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = Path("nemotron_steps", "engine", "kernels")
SOURCES = sorted(path.name for path in (ROOT / KERNELS).glob("*.[ch]"))


def test_the_commands_find_the_wheels_steps_and_configs_and_nothing_of_the_checkout(steps, commands: Path) -> None:
    listed, planned = steps("list", "--json"), steps("plan", "rl/nemo_rl/rlhf", "-c", "tiny", "--json")
    shown = steps("show", "rl/nemo_rl/rlhf", "--json")
    for done in (listed, planned, shown):
        assert done.returncode == 0 and str(ROOT) not in done.stdout, done.stderr
    found = {step["id"] for step in json.loads(listed.stdout)["steps"]}
    assert {"rl/nemo_rl/rlhf", "sft/megatron_bridge", "data_prep/rl_prep"} <= found
    assert len(json.loads(planned.stdout)["steps"]) == 6
    second = subprocess.run([str(commands / "nemotron"), "steps", "list"], capture_output=True, text=True, timeout=60)
    assert second.returncode == 0 and "rl/nemo_rl/rlhf" in second.stdout, second.stderr


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
