"""What was made with 0.1 as it was at first goes on working: a home, a run that was killed, env.toml, packages.

`home.tar.xz` holds four finished runs and one that was killed at step 8 of 40. `packages.tar.xz` holds the wheels of a
step with its environment, a type, executors, an environment with a tool and a pipeline, each with its own tests.
Nothing here is ever made anew.
"""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.runs.executors import sdks

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGES = ("cloud_executors", "palindromes", "steps_pack", "unit_converter", "word_counts")
PROFILES = {
    "cluster": ["executor: slurm", "nodes: 2", "gpus_per_node: 8", "- ulimit -c 0", "time: 04:00:00", "- /data:/data"],
    "cluster-large": ["nodes: 16", "account: research", "NCCL_DEBUG: WARN", "NCCL_IB_HCA: mlx5"],
    "container": ["executor: docker", "container_image: research/steps:1"],
    "ray": ["executor: ray", "ray_address: http://head:8265"],
}


def steps(folder: Path, *arguments: str) -> str:
    """What a command prints to stdout, run in a folder with an installation of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "STEPS"))}
    done = subprocess.run(
        [sys.executable, "-m", "nemotron_steps.cli.main", *arguments],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def unpack(name: str, folder: Path) -> None:
    with tarfile.open(HERE / name) as archive:
        archive.extractall(folder, filter="data")


@pytest.mark.slow
def test_a_home_opens_its_killed_run_resumes_and_its_model_is_exported(tmp_path: Path) -> None:
    unpack("home.tar.xz", tmp_path)
    runs = json.loads(steps(tmp_path, "runs", "--json"))
    assert [run["status"] for run in runs] == ["done"] * 4 + ["killed"]
    before = json.loads(steps(tmp_path, "artifacts", "list", "--json"))
    assert len(before) == 5
    steps(tmp_path, "artifacts", "verify")
    for run in runs:
        steps(tmp_path, "report", run["id"])
    resumed = steps(tmp_path, "run", "--resume", runs[-1]["id"])
    assert "resumed: step=8" in resumed and "step 40: reward" in resumed
    steps(tmp_path, "run", "convert/megatron_to_hf", "--input", "checkpoint_megatron=rl/nemo_rl/rlvr/model:v1")
    after = json.loads(steps(tmp_path, "artifacts", "list", "--json"))
    assert len(after) == len(before) + 2


def test_runs_of_a_home_predict_the_hours_of_a_job(tmp_path: Path) -> None:
    unpack("home.tar.xz", tmp_path)
    (tmp_path / "env.toml").write_text('[there]\nexecutor = "slurm"\ngpus_per_node = 8\n')
    hours = {
        count: json.loads(steps(tmp_path, "plan", "rl/nemo_rl/rlvr", "-c", "tiny", "-r", "there", "--json", *count))
        for count in ((), ("grpo.max_num_steps=100000",))
    }
    few, many = (found["job"] for found in hours.values())
    assert 0 < few["hours"] < 0.1 < 1 < many["hours"] < 10 and many["gpu_hours"] == 8 * many["hours"]


@pytest.mark.parametrize("profile", PROFILES)
def test_profiles_mean_the_same(tmp_path: Path, profile: str) -> None:
    (tmp_path / "env.toml").write_text((HERE / "env.toml").read_text())
    printed = steps(tmp_path, "run", "rl/nemo_rl/rlvr", "-c", "tiny", "-b", profile, "-d").splitlines()
    lines = [line.strip() for line in printed[printed.index(f"# profile {profile}") :]]
    assert [line for line in PROFILES[profile] if line not in lines] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_passes_its_own_tests(tmp_path: Path, name: str) -> None:
    unpack("packages.tar.xz", tmp_path)
    (wheel,) = (tmp_path / name).glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "STEPS"))}
    if sdks.WANTED:
        kept["CLOUD_SDKS"] = str(sdks.PYTHON)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / name / "tests")],
        cwd=tmp_path,
        env={**kept, "PYTHONPATH": f"{site}:{ROOT}", "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
