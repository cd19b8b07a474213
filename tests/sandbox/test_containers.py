import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nemotron_steps.errors import SandboxError, UnsupportedError
from nemotron_steps.sandbox import Limits, Outcome, SandboxResult, create_sandbox
from nemotron_steps.sandbox.containers import ContainerSandbox, call_engine
from nemotron_steps.sandbox.session import ContainerSession, SessionOverError

LIMITED = Limits(
    wall_s=2.0, cpu_s=7, memory_bytes=11, processes=13, file_bytes=17, scratch_bytes=19, output_bytes=23, open_files=29
)


CLOSED = "--network none --ipc private --cgroupns private --cap-drop ALL --security-opt no-new-privileges"
SLOTS = asyncio.Semaphore(1)
COMMANDS = {
    "docker": ContainerSandbox("docker", "image").command("n", ["x", "y"], "/in", "/p.json", LIMITED),
    "apptainer": ContainerSandbox("apptainer", "image").command("n", ["x", "y"], "/in", "/p.json", LIMITED),
    "docker session": ContainerSession("docker", "repo:1", SLOTS).arguments("/p.json"),
    "apptainer session": ContainerSession("apptainer", "repo.sif", SLOTS, limits=LIMITED).arguments("/p.json"),
}
PARTS = {
    "docker": f"""docker run --interactive --name n {CLOSED}
--security-opt seccomp=/p.json --memory 11 --memory-swap 11 --pids-limit 13
--read-only --user 65534:65534 --workdir /scratch
--ulimit core=1:1 --ulimit cpu=7:8
--ulimit fsize=17
--ulimit nofile=29
--log-driver none
src=/in,dst=/inputs,readonly
--env HOME=/scratch
--tmpfs /scratch:rw,exec,mode=1777,uid=65534,gid=65534,size=19 --tmpfs /tmp:rw,mode=1777,uid=
image timeout -s KILL 2.0 /bin/sh""",  # it ends without anybody outside
    "apptainer": """--containall --cleanenv --no-home --no-privs --security seccomp:/p.json --net --network none
--bind /in:/inputs:ro --scratch /scratch --pwd /scratch --memory 11 --pids-limit 13
image timeout -s KILL 2.0 /bin/sh""",
    "docker session": f"""run --rm --interactive
{CLOSED} --security-opt seccomp=/p.json
--entrypoint python3 repo:1 -I -c
 0 1 alone""",
    "apptainer session": """exec --containall --cleanenv --no-home --no-privs --security seccomp:/p.json
--net --network none --writable-tmpfs --memory 11 --pids-limit 13 repo.sif timeout -s KILL 122.0 python3 -I -c
 0 1 together""",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_container_has_no_network_no_privileges_and_the_limits_of_its_run(name: str) -> None:
    assert [part for part in PARTS[name].split("\n") if part not in " ".join(COMMANDS[name])] == []


def test_an_absent_engine_is_refused_with_a_hint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError) as caught:
        asyncio.run(create_sandbox("podman", image="x").run(argv=["true"]))
    assert caught.value.hints == ("apt-get install -y podman",)


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


@pytest.mark.parametrize("state", [f'{{"StartedAt": "{NEVER_STARTED}"}}', "{}", "null"])
def test_a_container_that_was_not_started_is_a_failure_of_the_engine(engine, state: str) -> None:
    engine("echo no such image >&2; exit 125", state)
    with pytest.raises(SandboxError, match="could not start") as caught:
        run_in_container()
    assert caught.value.found == "no such image\n"


STARTED = '{"StartedAt": "2026-01-01T00:00:00Z", "OOMKilled": %s}'


@pytest.mark.parametrize(
    ("code", "state", "outcome"),
    [
        *((code, STARTED % "false", Outcome.EXITED) for code in (113, 125, 126, 127)),
        (137, STARTED % "true", Outcome.MEMORY_LIMIT),
        (137, STARTED % "false", Outcome.MEMORY_LIMIT),  # not every engine records it
        (152, STARTED % "false", Outcome.TIMEOUT),  # it spent its processor time
        (124, STARTED % "false", Outcome.EXITED),  # the clock's code before its time is the program's own
    ],
)
def test_how_a_program_that_was_started_ended(engine, code: int, state: str, outcome: Outcome) -> None:
    engine(f"echo docker: Error response from daemon >&2; exit {code}", state)
    result = run_in_container()
    assert (result.outcome, result.exit_code) == (outcome, code if outcome is Outcome.EXITED else None)


def test_a_program_has_its_input_and_its_files_and_is_removed_afterwards(engine, tmp_path: Path) -> None:
    inputs = 'for a; do case $a in type=bind*) cd $(echo $a | sed "s/.*src=//; s/,dst.*//");; esac; done'
    script = engine(f"{inputs}; cat a/b; stat -c %a . a a/b; cat; exit 3", "{}")
    script.write_text(script.read_text().replace("case $1", f"echo $1 $2 >> {tmp_path}/asked; case $1"))
    before = os.umask(0o077)
    try:
        execution = ContainerSandbox("docker", "image").execute(["x"], b"said", {"a/b": b"laid "}, Limits())
        result = asyncio.run(execution)
    finally:
        os.umask(before)
    assert (result.outcome, result.exit_code) == (Outcome.EXITED, 3)
    assert result.stdout == "laid 755\n755\n644\nsaid", "any user may read them"
    assert (tmp_path / "asked").read_text().split("\n")[-2] == "rm --force"


def test_an_engine_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docker").write_text("#!/bin/sh\necho full >&2\nexit 1\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(SandboxError, match=r"`docker rm` failed \(exited, exit code 1\)"):
        asyncio.run(call_engine("docker", "rm", "x"))


def test_an_image_that_cannot_be_started_is_told(engine) -> None:
    engine("echo no such image >&2; exit 125")
    session = ContainerSession("docker", "image", asyncio.Semaphore(0))
    with pytest.raises(SandboxError, match="ended before its first command") as caught:
        asyncio.run(session.__aenter__())
    assert caught.value.found == "no such image\n"
    assert (caught.value.where, caught.value.hints) == ("image", ("docker pull image",))


def test_an_image_that_takes_too_long_to_come_is_told(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemotron_steps.sandbox.session.ENGINE_TIMEOUT_S", 0.5)
    engine("echo Pulling >&2; sleep 60")
    with pytest.raises(SandboxError, match="ended before its first command") as caught:
        asyncio.run(ContainerSession("docker", "image", asyncio.Semaphore(1)).__aenter__())
    assert (caught.value.where, caught.value.found) == ("image", "Pulling\n")


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
        session = ContainerSession("apptainer", "repo.sif", asyncio.Semaphore(1), limits=bounds, command_s=30.0)
        async with session:
            assert (await session.run(["echo", "on"])).stdout == "on\n"
            with pytest.raises(SessionOverError) as caught:
                await session.run(["sh", "-c", script])
            return caught.value.outcome

    return asyncio.run(body())


@pytest.mark.parametrize(("does", "outcome"), [("sleep 60", Outcome.TIMEOUT), ("kill -9 $PPID", Outcome.MEMORY_LIMIT)])
def test_a_session_out_of_time_or_memory_says_so_and_its_container_is_removed_though_that_takes_long(
    engine, tmp_path: Path, does: str, outcome: Outcome
) -> None:
    # Never `alone` here: the server would kill what is not the session's.
    script = engine('while [ "$1" != repo:1 ]; do shift; done; exec python3 "$2" "$3" "$4" 0 1 together')
    script.write_text(script.read_text().replace("esac", f"rm) sleep 2; echo gone >> {tmp_path}/removed;; esac"))

    async def body() -> Outcome:
        session = ContainerSession("docker", "repo:1", asyncio.Semaphore(1), limits=Limits(wall_s=1.0), command_s=30.0)
        async with session:
            with pytest.raises(SessionOverError) as caught:
                await session.run(["sh", "-c", does])
        return caught.value.outcome

    assert asyncio.run(body()) is outcome
    assert (tmp_path / "removed").read_text() == "gone\n"


def test_a_session_that_is_killed_was_killed_for_memory(apptainer: Callable[[str], None]) -> None:
    apptainer(RUNS)
    assert over("kill -9 $PPID") is Outcome.MEMORY_LIMIT
    assert over("read _ _ _ clock _ < /proc/$PPID/stat; kill -9 $clock $PPID") is Outcome.MEMORY_LIMIT
    assert over("kill -TERM $PPID; sleep 3") is Outcome.EXITED


def test_a_session_ends_when_its_time_is_over(apptainer: Callable[[str], None]) -> None:
    apptainer(RUNS)
    assert over("sleep 60", wall_s=2.0) is Outcome.TIMEOUT


def test_what_apptainer_leaves_behind_holds_no_session_up(apptainer: Callable[[str], None]) -> None:
    """With the pipes of the server open, out of its group."""
    apptainer(f"setsid sleep 30 & {RUNS}")
    begun = time.monotonic()
    assert over("kill -9 $PPID") is Outcome.MEMORY_LIMIT
    assert time.monotonic() - begun < 25
