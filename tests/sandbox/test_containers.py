from __future__ import annotations

import asyncio
import os
import resource
import stat
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from nemotron_steps.errors import ConfigError, SandboxError, UnsupportedError
from nemotron_steps.sandbox import Limits, Outcome, SandboxResult, create_sandbox
from nemotron_steps.sandbox.bubblewrap import BubblewrapSandbox
from nemotron_steps.sandbox.command_server import COMMAND_SERVER
from nemotron_steps.sandbox.container_session import _END_ALL, ApptainerSession, ContainerSession
from nemotron_steps.sandbox.containers import (
    ContainerSandbox,
    _lay_files,
    call_engine,
    check_engine,
    podman_ulimits,
    remove,
)
from nemotron_steps.sandbox.session import SessionOverError

PID_MAX = int(Path("/proc/sys/kernel/pid_max").read_text())


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
    assert command[image + 1 : image + 5] == ["timeout", "-s", "KILL", "10.0"], "it ends without anybody outside"
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


LIMITED = Limits(
    wall_s=2.0, cpu_s=7, memory_bytes=11, processes=13, file_bytes=17, scratch_bytes=19, output_bytes=23, open_files=29
)


@pytest.mark.parametrize("engine", ["docker", "apptainer"])
def test_each_limit_is_the_engines_of_that_name(engine: str) -> None:
    command = ContainerSandbox(engine, "image").command("n", ["true"], "/in", "/p.json", LIMITED)
    text = " ".join(command)
    parts = ("--memory 11", "--pids-limit 13", "timeout -s KILL 2.0")
    if engine == "docker":
        parts += ("--memory-swap 11", "--ulimit cpu=7:8", "--ulimit fsize=17", "--ulimit nofile=29", "--name n")
        parts += ("--tmpfs /scratch:rw,exec,mode=1777,uid=65534,gid=65534,size=19", "--tmpfs /tmp:rw,mode=1777,uid=")
        parts += ("--ipc private", "--cgroupns private", "--workdir /scratch", "--env HOME=/scratch")
    else:
        parts += ("--scratch /scratch --pwd /scratch", "--cleanenv")
    assert [part for part in parts if part not in text] == []


def test_a_session_is_isolated_too() -> None:
    text = " ".join(ContainerSession("docker", "repo:1").start_arguments("/p.json"))
    for part in (
        "--network none",
        "--cap-drop ALL",
        "--security-opt seccomp=/p.json",
        "--rm --interactive",
        "--user 65533:65533 --workdir / --entrypoint /bin/sh repo:1 -c echo ready && cat",
    ):
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


# What an engine says of a container is not the program's to say. The engine here is a script in its place.

NEVER_STARTED = "0001-01-01T00:00:00Z"


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a `docker` on PATH whose `run` and `inspect` do what a test says."""

    def make(run: str, state: str = "{}") -> Path:
        program = tmp_path / "docker"
        program.write_text(f"#!/bin/sh\ncase $1 in run) {run};; inspect) echo '{state}';; esac\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return program

    return make


def run_in_container(code: str = "") -> SandboxResult:
    sandbox = ContainerSandbox("docker", "image")
    return asyncio.run(sandbox.execute(["python3"], code.encode(), {}, Limits()))


@pytest.mark.parametrize("code", [125, 126, 127, 137, 113])
def test_no_exit_code_of_a_program_that_was_started_is_a_failure_of_the_engine(engine, code: int) -> None:
    engine(f"echo docker: Error response from daemon >&2; exit {code}", '{"StartedAt": "2026-01-01T00:00:00Z"}')
    result = run_in_container()
    assert not result.ok and result.outcome in (Outcome.EXITED, Outcome.MEMORY_LIMIT)


@pytest.mark.parametrize("state", [f'{{"StartedAt": "{NEVER_STARTED}"}}', "{}", "null"])
def test_a_container_that_was_not_started_is_a_failure_of_the_engine(engine, state: str) -> None:
    engine("echo no such image >&2; exit 125", state)
    with pytest.raises(SandboxError, match="could not start") as caught:
        run_in_container()
    assert caught.value.found == "no such image\n"


def test_a_container_that_the_kernel_killed_for_memory(engine) -> None:
    engine("exit 137", '{"StartedAt": "2026-01-01T00:00:00Z", "OOMKilled": true}')
    assert run_in_container().outcome is Outcome.MEMORY_LIMIT


def test_a_killed_container_of_an_engine_that_records_nothing_was_killed_for_memory(engine) -> None:
    engine("exit 137", '{"StartedAt": "2026-01-01T00:00:00Z", "OOMKilled": false}')
    assert run_in_container().outcome is Outcome.MEMORY_LIMIT
    engine("exit 126", '{"StartedAt": "2026-01-01T00:00:00Z", "OOMKilled": false}')
    result = run_in_container()
    assert (result.outcome, result.exit_code) == (Outcome.EXITED, 126)


def test_a_program_has_its_input_and_its_files_and_is_removed_afterwards(engine, tmp_path: Path) -> None:
    script = engine(
        'for a; do case $a in type=bind*) cat $(echo $a | sed "s/.*src=//; s/,dst.*//")/a/b;; esac; done; cat; exit 3',
        "{}",
    )
    noting = script.read_text().replace("case $1", f"echo $1 $2 >> {tmp_path}/asked; case $1")
    script.write_text(noting)
    sandbox = ContainerSandbox("docker", "image")
    result = asyncio.run(sandbox.execute(["x"], b"said", {"a/b": b"laid "}, Limits()))
    assert (result.outcome, result.exit_code, result.stdout) == (Outcome.EXITED, 3, "laid said")
    assert (tmp_path / "asked").read_text().split("\n")[-2] == "rm --force"


@pytest.mark.parametrize(
    ("code", "seconds", "outcome"),
    [(0, 0, Outcome.EXITED), (137, 0, Outcome.EXITED), (124, 0.3, Outcome.TIMEOUT), (137, 0.3, Outcome.TIMEOUT)],
)
def test_a_sessions_command_is_out_of_time_when_the_clock_inside_says_so(
    engine, tmp_path: Path, code: int, seconds: float, outcome: Outcome
) -> None:
    program = engine("true")
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nsleep {seconds}\ncat\nexit {code}\n')
    session = ContainerSession("docker", "image")
    result = asyncio.run(session.run(["ls", "-l"], cwd="/repo", stdin="said", wall_s=0.2))
    assert (result.outcome, result.stdout) == (outcome, "said")
    assert result.exit_code == (code if outcome is Outcome.EXITED else None)
    first, _, others = (tmp_path / "asked").read_text().partition("\n")
    assert first == f"exec --interactive --workdir /repo {session.name} timeout -s KILL 0.2 ls -l"
    # What it started may have left its process group.
    assert others == (f"exec {session.name} /bin/sh -c {_END_ALL}\n" if outcome is Outcome.TIMEOUT else "")


def test_a_session_that_cannot_write_says_so(engine) -> None:
    program = engine("true")
    program.write_text("#!/bin/sh\necho full >&2\nexit 1\n")
    with pytest.raises(SandboxError, match="could not write /a") as caught:
        asyncio.run(ContainerSession("docker", "image").write({"/a": "x"}))
    assert caught.value.found == "full\n"


def test_a_container_that_spent_its_processor_time(engine) -> None:
    engine("exit 152")
    assert run_in_container().outcome is Outcome.TIMEOUT


def test_a_session_that_does_not_start_says_why(engine) -> None:
    advice = "echo; echo \"Run 'docker run --help' for more information\""
    engine(f"{{ echo Trying to pull; echo no such image; {advice}; }} >&2; exit 125")

    async def enter() -> None:
        async with ContainerSession("docker", "image"):
            raise AssertionError("entered")

    with pytest.raises(SandboxError, match="could not start") as caught:
        asyncio.run(enter())
    assert (caught.value.found, caught.value.hints) == ("no such image", ("docker pull image",))


@pytest.mark.parametrize(
    ("hard", "told"),
    [
        ((1000, 2000), ["--ulimit", "nofile=256:256", "--ulimit", "nproc=2000:2000"]),
        ((100, 10**9), ["--ulimit", "nofile=100:100", "--ulimit", f"nproc={PID_MAX}:{PID_MAX}"]),
        ((resource.RLIM_INFINITY,) * 2, ["--ulimit", "nofile=256:256", "--ulimit", f"nproc={PID_MAX}:{PID_MAX}"]),
    ],
)
def test_podman_is_told_limits_that_this_process_may_grant(
    monkeypatch: pytest.MonkeyPatch, hard: tuple[int, int], told: list[str]
) -> None:
    limits = dict(zip((resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC), hard, strict=True))
    monkeypatch.setattr(resource, "getrlimit", lambda number: (1, limits[number]))
    assert podman_ulimits(nofile=256) == told
    command = ContainerSandbox("podman", "image").command("n", ["true"], "/in", "/p.json", Limits(open_files=256))
    assert " ".join(told) in " ".join(command)
    assert f"--tmpfs /tmp:rw,mode=1777,U,notmpcopyup,size={256 << 20}" in " ".join(command)


def noting(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, does: str) -> Path:
    """An engine that does something, and notes what it was asked in the file that is returned."""
    program = folder / name
    program.write_text(f'#!/bin/sh\necho "$*" >> {folder}/asked\n{does}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    (folder / "asked").write_text("")
    return folder / "asked"


def test_files_can_be_read_by_any_user_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        _lay_files(tmp_path / "inputs", {"a": b"x", "deep/er/b": b"y"})
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "inputs", *tmp_path.rglob("*"))}
    assert modes == {"inputs": 0o755, "deep": 0o755, "er": 0o755, "a": 0o644, "b": 0o644}


@pytest.mark.parametrize("engine_name", ["docker", "podman"])
def test_a_container_is_taken_away_without_waiting_for_it(
    engine_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = noting(tmp_path, monkeypatch, engine_name, "exit 1")
    asyncio.run(remove(engine_name, "n"))
    assert asked.read_text().splitlines() == [*["kill n"] * (engine_name == "podman"), "rm --force n"]


def test_an_engine_is_asked_whether_it_works_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, word in (("apptainer", "version"), ("docker", "info")):
        asked = noting(tmp_path, monkeypatch, name, "exit 0")
        asyncio.run(check_engine(name))
        assert asked.read_text() == f"{word}\n"
    noting(tmp_path, monkeypatch, "docker", "echo said on standard output; exit 1")
    with pytest.raises(UnsupportedError) as caught:
        asyncio.run(check_engine("docker"))
    assert caught.value.found == "said on standard output\n"


def test_an_engine_that_fails_is_an_error_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noting(tmp_path, monkeypatch, "docker", "echo no; exit 4")
    assert asyncio.run(call_engine("docker", "rm", check=False)).exit_code == 4
    with pytest.raises(SandboxError, match=r"`docker rm` failed \(exited, exit code 4\)") as caught:
        asyncio.run(call_engine("docker", "rm", "x"))
    assert caught.value.found == "no\n"


def test_an_exit_code_of_the_clock_before_its_time_is_the_programs_own(engine) -> None:
    engine("exit 124")
    result = run_in_container()
    assert (result.outcome, result.exit_code) == (Outcome.EXITED, 124)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"User": "1000:1000", "WorkingDir": "/repo"}', ["--user", "1000:1000", "--workdir", "/repo"]),
        ('{"User": "", "WorkingDir": ""}', ["--user", "0", "--workdir", "/"]),
        ("null", ["--user", "0", "--workdir", "/"]),
    ],
)
def test_commands_of_a_session_are_the_images_own_user_in_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, words: list[str]
) -> None:
    noting(tmp_path, monkeypatch, "docker", f"echo '{config}'")
    assert asyncio.run(ContainerSession("docker", "image")._image_user()) == words


def test_a_session_takes_no_command_once_its_time_is_over_and_none_may_take_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = noting(tmp_path, monkeypatch, "docker", "exit 0")
    session = ContainerSession("docker", "image")
    session._ends_at = time.monotonic() + 5
    asyncio.run(session.run(["true"], wall_s=600.0))
    *_, wall, command = asked.read_text().split()
    assert 0 < float(wall) <= 5 and command == "true"
    session._ends_at = time.monotonic()
    with pytest.raises(SessionOverError) as over:
        asyncio.run(session.run(["true"]))
    assert over.value.outcome is Outcome.TIMEOUT and len(asked.read_text().splitlines()) == 1


def test_a_command_that_is_stopped_at_the_sessions_own_end_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noting(tmp_path, monkeypatch, "docker", "sleep 0.3; exit 137")
    session = ContainerSession("docker", "image")
    session._ends_at = time.monotonic() + 0.2
    with pytest.raises(SessionOverError) as over:
        asyncio.run(session.run(["sleep", "600"]))
    assert over.value.outcome is Outcome.TIMEOUT


def test_a_session_whose_engine_has_ended_is_over_and_an_engine_may_take_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noting(tmp_path, monkeypatch, "docker", "sleep 0.3; exit 0")
    session = ContainerSession("docker", "image")
    assert asyncio.run(session.run(["true"], wall_s=0.1)).ok
    client: Any = SimpleNamespace(returncode=None)
    session._client = client
    assert asyncio.run(session.run(["true"], wall_s=0.1)).ok
    client.returncode = 137
    with pytest.raises(SessionOverError) as over:
        asyncio.run(session.run(["true"], wall_s=0.1))
    assert over.value.outcome is Outcome.EXITED


def test_every_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noting(tmp_path, monkeypatch, "docker", f'for path; do :; done; cat > "{tmp_path}/$path"')
    asyncio.run(ContainerSession("docker", "image").write({"a": "one", "b": "two"}))
    assert [(tmp_path / name).read_text() for name in "ab"] == ["one", "two"]


def test_an_engine_that_takes_its_time_takes_none_of_a_programs(engine) -> None:
    engine("sleep 0.4; exit 0")
    sandbox = ContainerSandbox("docker", "image")
    assert asyncio.run(sandbox.execute(["x"], b"", {}, Limits(wall_s=0.1))).ok


def test_a_command_that_floods_goes_with_all_that_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = noting(tmp_path, monkeypatch, "docker", "printf 12345678901")
    session = ContainerSession("docker", "image", limits=Limits(output_bytes=10))
    assert asyncio.run(session.run(["yes"])).outcome is Outcome.OUTPUT_LIMIT
    assert asked.read_text().partition("\n")[2] == f"exec {session.name} /bin/sh -c {_END_ALL}\n"


def test_a_command_that_is_given_up_goes_with_all_that_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killing the engine's program does not end what it had begun in the container."""
    asked = noting(tmp_path, monkeypatch, "docker", f"case $* in *interactive*) : > {tmp_path}/on; sleep 30;; esac")

    async def body() -> str:
        session = ContainerSession("docker", "image")
        running = asyncio.ensure_future(session.run(["sleep", "600"]))
        while not (tmp_path / "on").exists():
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
        return session.name

    name = asyncio.run(body())
    assert asked.read_text().partition("\n")[2] == f"exec {name} /bin/sh -c {_END_ALL}\n"


@pytest.mark.sandbox
def test_what_commands_have_started_is_gone_once_it_was_ended() -> None:
    left = "trap 'echo /proc/[0-9]*' EXIT; for n in 1 2 3 4 5 6 7 8; do setsid sleep 300 & done"
    sandbox = BubblewrapSandbox()
    result = asyncio.run(sandbox.execute(["sh", "-c", f"{left}\n{_END_ALL}"], b"", {}, Limits()))
    assert result.stdout == "/proc/1 /proc/2\n", result


@pytest.mark.parametrize("does", ["echo ready; read end", "echo no such image >&2; exit 125"])
def test_what_the_engine_leaves_behind_holds_no_session_up(engine, monkeypatch: pytest.MonkeyPatch, does: str) -> None:
    """With the engine's own pipes open."""
    engine(f"setsid sleep 30 & {does}")
    begun = time.monotonic()

    async def enter() -> None:
        before = len(os.listdir("/proc/self/fd"))
        async with ContainerSession("docker", "image"):
            pass
        while len(os.listdir("/proc/self/fd")) > before:  # until the other ends close, were they not let go of
            await asyncio.sleep(0.01)

    if "ready" in does:
        monkeypatch.setattr(ContainerSession, "_image_user", AsyncMock(return_value=[]))
        asyncio.run(enter())
    else:
        with pytest.raises(SandboxError, match="could not start") as caught:
            asyncio.run(enter())
        assert caught.value.found == "no such image"
    assert time.monotonic() - begun < 20


RUNS = 'while [ "$1" != repo.sif ]; do shift; done; shift; exec "$@"'


@pytest.fixture
def apptainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def make(does: str) -> None:
        (tmp_path / "apptainer").write_text(f'#!/bin/sh\n[ "$1" != version ] || exit 0\n{does}\n')
        (tmp_path / "apptainer").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return make


def over(script: str, **limits: float) -> Outcome:
    """How a session ends in which a command does something."""

    async def body() -> Outcome:
        bounds = Limits(**{"wall_s": 30.0, **limits})
        session = ApptainerSession("repo.sif", asyncio.Semaphore(1), limits=bounds, command_s=30.0)
        async with session:
            assert (await session.run(["echo", "on"])).stdout == "on\n"
            with pytest.raises(SessionOverError) as caught:
                await session.run(["sh", "-c", script])
            return caught.value.outcome

    return asyncio.run(body())


def test_an_image_is_closed_off_bounded_and_ends_without_anybody_outside() -> None:
    limits = Limits(wall_s=2.0, memory_bytes=11, processes=13)
    words = ApptainerSession("repo.sif", asyncio.Semaphore(1), limits=limits).arguments("/p.json")
    assert words == [
        *("apptainer", "--quiet", "exec", "--containall", "--cleanenv", "--no-home", "--no-privs"),
        *("--security", "seccomp:/p.json", "--net", "--network", "none", "--writable-tmpfs"),
        *("--memory", "11", "--pids-limit", "13", "repo.sif", "timeout", "-s", "KILL", "122.0"),
        *("python3", "-I", "-c", COMMAND_SERVER, "0", "1", "together"),
    ]


def test_a_session_that_is_killed_was_killed_for_memory(apptainer: Callable[[str], None]) -> None:
    apptainer(RUNS)
    assert over("kill -9 $PPID") is Outcome.MEMORY_LIMIT
    assert over("read _ _ _ clock _ < /proc/$PPID/stat; kill -9 $clock $PPID") is Outcome.MEMORY_LIMIT
    assert over("kill -TERM $PPID; sleep 3") is Outcome.EXITED


def test_a_session_ends_when_its_time_is_over(apptainer: Callable[[str], None]) -> None:
    apptainer(RUNS)
    assert over("sleep 60", wall_s=2.0) is Outcome.TIMEOUT


def test_the_time_of_a_session_begins_when_its_image_is_there(apptainer: Callable[[str], None]) -> None:
    apptainer(f"sleep 3; {RUNS}")
    assert over("sleep 60", wall_s=2.0) is Outcome.TIMEOUT


def test_what_apptainer_leaves_behind_holds_no_session_up(apptainer: Callable[[str], None]) -> None:
    """With the pipes of the server open, out of its group."""
    apptainer(f"setsid sleep 30 & {RUNS}")
    begun = time.monotonic()
    assert over("kill -9 $PPID") is Outcome.MEMORY_LIMIT
    assert time.monotonic() - begun < 25


def test_an_image_that_does_not_start_is_told_by_the_end_of_what_was_said(apptainer: Callable[[str], None]) -> None:
    apptainer("head -c 9000 /dev/zero | tr '\\0' x >&2; echo ' no such image' >&2; exit 255")

    async def enter() -> None:
        async with ApptainerSession("repo.sif", asyncio.Semaphore(1)):
            raise AssertionError("entered")

    with pytest.raises(SandboxError, match="ended before its first command") as caught:
        asyncio.run(enter())
    assert (caught.value.found or "").endswith("xxx no such image\n")
