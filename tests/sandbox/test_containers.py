from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest

from nemotron_steps.errors import ConfigError, UnsupportedError
from nemotron_steps.sandbox import Limits, create_sandbox
from nemotron_steps.sandbox.containers import ContainerSandbox, ContainerSession, check_engine


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_a_container_has_no_network_no_privileges_and_limits(engine: str) -> None:
    sandbox = create_sandbox(engine, image="python:3.11-slim")
    assert isinstance(sandbox, ContainerSandbox)
    command = sandbox.command("name", ["python3", "x.py"], "/in", "/p.json", Limits(memory_bytes=2**30, processes=9))
    text = " ".join(command)
    assert command[:2] == [engine, "run"]
    for part in (
        "--network none",
        "--cap-drop ALL",
        "--security-opt no-new-privileges",
        "--read-only",
        "--user 65534:65534",
        "--memory 1073741824 --memory-swap 1073741824",
        "--pids-limit 9",
        "--security-opt seccomp=/p.json",
        "--ulimit core=1:1",
        "--ulimit cpu=60:61",
        "--log-driver none",
        "src=/in,dst=/inputs,readonly",
    ):
        assert part in text
    image = command.index("python:3.11-slim")
    assert command[image + 1 : image + 5] == ["timeout", "-s", "KILL", "130.0"], "it ends without anybody outside"
    assert command[image + 5] == "/bin/sh" and command[-2:] == ["python3", "x.py"]


def test_apptainer_contains_everything_and_has_no_network() -> None:
    command = ContainerSandbox("apptainer", "image.sif").command("n", ["true"], "/in", "/p.json", Limits())
    text = " ".join(command)
    for part in (
        "--containall",
        "--no-home",
        "--net --network none",
        "--no-privs",
        "--security seccomp:/p.json",
        "--bind /in:/inputs:ro",
    ):
        assert part in text


def test_a_session_is_isolated_too() -> None:
    text = " ".join(ContainerSession("docker", "repo:1").start_arguments("/p.json"))
    for part in ("--network none", "--cap-drop ALL", "--security-opt seccomp=/p.json", "--rm --interactive", "repo:1"):
        assert part in text


def test_an_absent_engine_is_refused_with_a_hint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError) as caught:
        asyncio.run(create_sandbox("podman", image="x").run(argv=["true"]))
    assert caught.value.hints == ("apt-get install -y podman",)


def test_an_engine_that_does_not_answer_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\necho 'Cannot connect to the daemon' >&2\nexit 1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(UnsupportedError) as caught:
        asyncio.run(check_engine("docker"))
    assert caught.value.found is not None and "Cannot connect" in caught.value.found


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="no sandbox backend"):
        create_sandbox("subprocess")
