"""The batch script of a run: what is said where a profile says nothing, and values of any kind."""

import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.errors import RequestError
from nemotron_steps.runs.executors.slurm import SlurmProfile, batch_script
from tests.runs.executors.test_slurm import a_launch


@pytest.mark.parametrize(
    ("image", "ready"),
    [
        ("/i/nemo.sqsh", True),
        ("nemo.sqsh", True),
        ("./nemo.img", True),
        ("docker://nemo", False),
    ],
)
def test_an_image_is_a_file_by_its_ending_or_its_path(tmp_path: Path, image: str, ready: bool) -> None:
    assert SlurmProfile(executor="slurm", container_image=image).ready_image is ready
    assert ("enroot import" in batch_script(a_launch(tmp_path, container_image=image))) is not ready


@pytest.mark.parametrize(
    ("image", "enroot", "apptainer"),
    [
        ("nvcr.io/nvidia/nemo:25.09", "docker://nvcr.io#nvidia/nemo:25.09", "docker://nvcr.io/nvidia/nemo:25.09"),
        ("docker://nvcr.io/nvidia/nemo:25.09", "docker://nvcr.io#nvidia/nemo:25.09", ""),
        ("nvcr.io#nvidia/nemo:25.09", "docker://nvcr.io#nvidia/nemo:25.09", None),
        ("me@nvcr.io/org/team/nemo:25.09", "docker://me@nvcr.io#org/team/nemo:25.09", None),
        ("registry:5000/nemo:1", "docker://registry:5000#nemo:1", None),
        ("anyscale/ray:2.49.2-py312", "docker://anyscale/ray:2.49.2-py312", None),
        ("docker.io/library/alpine:3", "docker://library/alpine:3", None),
        ("nvcr.io/nvidia/nemo:25.09@sha256:ab12", "docker://nvcr.io#nvidia/nemo@sha256:ab12", None),
        ("dockerd://nvcr.io/nemo:1", "dockerd://nvcr.io/nemo:1", None),
    ],
)
def test_an_image_is_named_as_its_importer_reads_it(
    tmp_path: Path, image: str, enroot: str, apptainer: str | None
) -> None:
    for runtime, source in (("pyxis", enroot), ("apptainer", apptainer)):
        script = batch_script(a_launch(tmp_path, container_image=image, container_runtime=runtime))
        (line,) = re.findall(r"^    (?:enroot|apptainer) .* \|\| exit 1$", script, re.MULTILINE)
        assert source is None or shlex.split(line)[-4] == (source or image)


def test_what_a_run_reads_is_mounted_where_no_mount_holds_it(tmp_path: Path) -> None:
    """What links lead to as well, and of the hub's cache the whole model, whose files are links into its own folder."""
    shared, own = tmp_path / "shared", tmp_path / "own"
    model = own / "models--a--b" / "snapshots" / "1"
    for folder in (shared, model, tmp_path / "work"):
        folder.mkdir(parents=True)
    (own / "rows.jsonl").touch()
    (shared / "linked.jsonl").symlink_to(own / "rows.jsonl")
    paths = (shared / "linked.jsonl", shared, model, tmp_path / "work" / "x")
    keys = {"container_image": "/i/nemo.sqsh", "mounts": [f"{shared}:{shared}", f"{own}:/data"]}
    launch = replace(a_launch(tmp_path / "home", **keys), paths=paths, working_dir=tmp_path / "work")
    mounts = re.search(r"--container-mounts=(\S+)", batch_script(launch))
    added = [own / "rows.jsonl", own / "models--a--b"]
    assert mounts is not None and mounts[1].split(",")[4:] == [f"{path}:{path}" for path in added]
    with pytest.raises(RequestError, match="':' or ','"):
        batch_script(replace(launch, paths=(tmp_path / "a,b",)))


def test_an_image_is_imported_from_where_it_says_once_and_whole(tmp_path: Path) -> None:
    """Run with an importer that writes what it is asked for, and one that fails half-way."""
    launch = a_launch(tmp_path, container_image="dockerd://nemo:1")
    script = batch_script(launch)
    lines = script[script.index("image=") : script.index("run= stop=")]
    file = tmp_path / "containers" / "dockerd+nemo+1.sqsh"

    def imported(importer: str) -> int:
        words = ["bash", "-c", f"enroot() {{ {importer}; }}\nsrun() {{ :; }}\nSLURM_JOB_ID=7\n{lines}"]
        return subprocess.run(words).returncode

    assert imported('echo half > "$3"; return 1') == 1 and not file.exists()
    assert imported('echo "$4" >> "$3"') == 0
    assert imported("exit 9") == 0, "it is there already"
    assert file.read_text() == "half\ndockerd://nemo:1\n"


def test_a_job_behind_ssh_runs_what_is_installed_there(tmp_path: Path) -> None:
    keys = {"tunnel": "ssh", "host": "login", "remote_job_dir": "/far"}
    script = batch_script(a_launch(tmp_path, **keys))
    assert "\nsteps run --resume r1" in script and "srun" not in script
    several = batch_script(a_launch(tmp_path, nodes=2, **keys))
    assert "srun --overlap --nodes=1 --ntasks=1 steps run" in several and " ray start" in several


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"container_image": "x", "mounts": ["/data"]}, "mount '/data' is not HOST:CONTAINER"),
        ({"tunnel": "ssh", "remote_job_dir": "/far"}, "tunnel needs host"),
        ({"tunnel": "ssh", "host": "a"}, "tunnel needs remote_job_dir"),
        ({"host": "a", "user": "b"}, "host, user: for tunnel"),
        ({"identity": "~/.ssh/id"}, "identity: for tunnel"),
    ],
)
def test_keys_that_do_not_fit_each_other_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SlurmProfile.model_validate({"executor": "slurm", **keys})
