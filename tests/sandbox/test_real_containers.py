"""The sandbox and sessions in real containers of Docker and Podman."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.errors import SandboxError
from nemotron_steps.sandbox import Limits, Outcome, SandboxResult
from nemotron_steps.sandbox.containers import ContainerSandbox
from nemotron_steps.sandbox.session import ContainerSession, SessionOverError
from tests.containers.engines import Engines
from tests.sandbox.programs import MIB, PRELUDE, sections

pytestmark = pytest.mark.containers


@pytest.fixture
def run(real_engine: str, container_engines: Engines) -> Callable[..., SandboxResult]:
    """Runs a program in a fresh container, without the probe."""
    sandbox = ContainerSandbox(real_engine, container_engines.image)

    def body(code: str, stdin: str = "", files: dict[str, bytes] | None = None, **limits: Any) -> SandboxResult:
        argv = ["python3", "-I", "-B", "-c", PRELUDE + code]
        return asyncio.run(sandbox.execute(argv, stdin.encode(), files or {}, Limits(**limits)))

    return body


@pytest.fixture
def session(real_engine: str, container_engines: Engines) -> Callable[..., ContainerSession]:
    def make(**limits: Any) -> ContainerSession:
        bounds = Limits(**{"wall_s": 60.0, **limits})
        return ContainerSession(real_engine, container_engines.image, asyncio.Semaphore(1), limits=bounds)

    return make


def over(session: ContainerSession, body: Callable[[ContainerSession], Awaitable[Any]]) -> Any:
    async def entered() -> Any:
        async with session:
            return await body(session)

    return asyncio.run(entered())


def test_the_probe_finds_no_way_out(real_engine: str, container_engines: Engines) -> None:
    asyncio.run(ContainerSandbox(real_engine, container_engines.image).start())


def test_a_program_has_its_files_its_input_threads_and_children_and_leaves_nothing(
    run: Callable[..., SandboxResult], real_engine: str, container_engines: Engines
) -> None:
    code = """
import subprocess, threading
print(open('a/b').read(), input(), flush=True)
thread = threading.Thread(target=print, args=('in a thread',), kwargs={'flush': True}); thread.start(); thread.join()
subprocess.run(['sh', '-c', 'id -u; pwd; echo x > y; cat y'], check=True)
sys.exit(3)
"""
    result = run(code, "said\n", {"a/b": b"laid"})
    assert result.stdout == "laid said\nin a thread\n65534\n/scratch\nx\n", result.stderr
    assert (result.outcome, result.exit_code) == (Outcome.EXITED, 3)
    assert container_engines.names(real_engine) == []


def test_a_program_that_is_killed_for_memory_leaves_no_file_here(
    run: Callable[..., SandboxResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("bytearray(2**30)[::4096] = b'x' * 2**18", memory_bytes=64 * MIB)
    assert result.outcome is Outcome.MEMORY_LIMIT, result
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "limits", "outcome"),
    [
        ("time.sleep(60)", {"wall_s": 0.5}, Outcome.TIMEOUT),
        ("while True: pass", {"cpu_s": 1}, Outcome.TIMEOUT),
        ("while True: print('x' * 1000)", {}, Outcome.OUTPUT_LIMIT),
        ("os._exit(125)", {}, Outcome.EXITED),
    ],
    ids=["wall", "processor", "output", "exit code of the engine"],
)
def test_what_stops_a_program_is_told(
    run: Callable[..., SandboxResult], code: str, limits: dict[str, Any], outcome: Outcome
) -> None:
    assert run(code, **limits).outcome is outcome


def test_an_image_that_is_not_there_is_a_failure_of_the_sandbox(real_engine: str, container_engines: Engines) -> None:
    sandbox = ContainerSandbox(real_engine, "localhost:1/nowhere:1")
    with pytest.raises(SandboxError, match="could not start a container"):
        asyncio.run(sandbox.execute(["true"], b"", {}, Limits()))


ATTEMPTS = """
# namespaces
refused(call('unshare', 0x10000000))
refused(call('unshare', 0x7E020000))
refused(call('clone', 0x10000000 | 17, 0, 0, 0, 0))
refused(call('clone3', text(struct.pack('8Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0)), 64))
refused(call('setns', os.pidfd_open(1), 0x20000))
# mounts
refused(call('mount', text(b't'), text(b'/tmp'), text(b'tmpfs'), 0, 0))
refused(call('mount', 0, text(b'/'), 0, 0x1000 | 0x20, 0))
refused(call('umount2', text(b'/proc'), 2))
refused(call('fsopen', text(b'tmpfs'), 0))
refused(call('open_tree', -100, text(b'/'), 1))
refused(call('chroot', text(b'/scratch')))
refused(call('pivot_root', text(b'/scratch'), text(b'/scratch')))
# parts of the kernel
refused(call('io_uring_setup', 4, text(bytes(120))))
refused(call('userfaultfd', 1))
refused(call('bpf', 0, text(struct.pack('5I', 1, 4, 4, 1, 0) + bytes(100)), 120))
refused(call('perf_event_open', text(struct.pack('2I4Q', 1, 128, 0, 0, 0, 2) + bytes(88)), 0, -1, -1, 0))
refused(call('kexec_load', 0, 0, 0, 0))
refused(call('finit_module', 0, text(b''), 0))
refused(call('syslog', 10, 0, 0))
refused(call('fanotify_init', 0, 0))
refused(call('open_by_handle_at', 0, text(struct.pack('2I', 8, 1) + bytes(8)), 0))
refused(call('personality', 0x0400000))
# keys
refused(call('keyctl', 0, -3, 0))
refused(call('add_key', text(b'user'), text(b'another'), text(b'x'), 1, -2))
# other processes
refused(call('ptrace', 16, 1, 0, 0))
refused(call('process_vm_readv', 1, text(bytes(16)), 1, text(bytes(16)), 1, 0))
refused(call('pidfd_getfd', os.pidfd_open(1), 0, 0))
refused(call('kcmp', 1, os.getpid(), 0, 0, 0))
# the clock and the host's name
refused(call('clock_settime', 0, text(bytes(16))))
refused(call('sethostname', text(b'x'), 1))
# devices
for kind, numbers in ((0o020600, (1, 1)), (0o060600, (8, 0)), (0o060600, (259, 0))):
    try: os.mknod('device', kind, os.makedev(*numbers)); print('ESCAPED')
    except PermissionError: pass
# other user ids
for change in (os.setuid, os.setgid, lambda n: os.setgroups([n])):
    try: change(0); print('ESCAPED')
    except OSError: pass
# the system's files
for name in ('/usr/bin/x', '/etc/x', '/x', '/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/sys/x'):
    try: open(name, 'w').write('1'); print('ESCAPED', name)
    except OSError: pass
for name in ('kcore', 'keys', 'kmsg', 'timer_list', 'sched_debug'):
    try:
        if open('/proc/' + name, 'rb').read(1): print('ESCAPED', name)
    except OSError: pass
"""
ROOTS_OWN = ("the system's files",)
"""Attempts that a session's user, which owns the image's files, need not fail at."""


def attempts(names: list[str]) -> str:
    """A program that makes each in a child of its own and tells of it."""
    parts = {param.id: param.values[0] for param in sections(ATTEMPTS) if param.id in names}
    return f"""
for name, part in {parts!r}.items():
    sys.stdout.flush()
    if os.fork() == 0:
        try: exec(part, dict(globals()))
        except BaseException as error: print('ESCAPED', name, repr(error))
        else: print('tried', name)
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""


NAMES = [str(param.id) for param in sections(ATTEMPTS)]


def test_a_program_has_no_way_out(run: Callable[..., SandboxResult]) -> None:
    result = run(attempts(NAMES))
    assert result.stdout.splitlines() == [f"tried {name}" for name in NAMES], result.stderr


def test_a_session_has_no_way_out_though_its_user_is_root(session: Callable[..., ContainerSession]) -> None:
    names = [name for name in NAMES if name not in (*ROOTS_OWN, "other user ids")]
    code = f"{PRELUDE}\nos.chdir('/tmp')\nprint(os.getuid(), flush=True)\n{attempts(names)}"
    result = over(session(), lambda entered: entered.run(["python3", "-c", code]))
    assert result.stdout.splitlines() == ["0", *(f"tried {name}" for name in names)], result.stderr


NETWORK = """
import socket
print([line.split(':')[0].strip() for line in open('/proc/net/dev') if ':' in line])
for address in (('10.0.0.1', 53), ('8.8.8.8', 53)):
    try: socket.create_connection(address, 2); print('ESCAPED', address)
    except OSError: pass
with socket.create_server(('127.0.0.1', 0)) as own: socket.create_connection(own.getsockname()).close()
print({line.split()[1] for line in open('/proc/self/status') if line.startswith('Cap')})
"""


def test_a_session_has_a_network_of_its_own_alone_and_no_rights(session: Callable[..., ContainerSession]) -> None:
    result = over(session(), lambda entered: entered.run(["python3", "-c", NETWORK]))
    assert result.stdout == "['lo']\n{'0000000000000000'}\n", result.stderr


def test_a_sessions_commands_share_files_and_run_as_the_images_user(session: Callable[..., ContainerSession]) -> None:
    async def body(entered: ContainerSession) -> list[SandboxResult]:
        await entered.write({"/tmp/new/folder/a b": "written\n"})
        first = await entered.run(["sh", "-c", "cat > c; id -u; echo $HOME"], cwd="/tmp/new/folder", stdin="piped")
        return [first, await entered.run(["cat", "/tmp/new/folder/a b", "/tmp/new/folder/c"])]

    first, second = over(session(), body)
    assert (first.stdout, second.stdout) == ("0\n/root\n", "written\npiped"), (first.stderr, second.stderr)


def test_a_command_out_of_time_or_room_goes_with_all_that_was_started_and_the_session_goes_on(
    session: Callable[..., ContainerSession],
) -> None:
    async def body(entered: ContainerSession) -> list[Any]:
        left = "setsid sleep 600 > /dev/null 2>&1 &"
        out_of_time = await entered.run(["sh", "-c", f"{left} sleep 600"], wall_s=0.5)
        flood = await entered.run(["sh", "-c", f"{left} while true; do echo {'x' * 200}; done"])
        count = "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -c '^600$'"
        counted = await entered.run(["sh", "-c", count])
        return [out_of_time.outcome, flood.outcome, counted.stdout]

    assert over(session(), body) == [Outcome.TIMEOUT, Outcome.OUTPUT_LIMIT, "0\n"]


def test_what_commands_leave_behind_and_ends_is_not_counted_for_ever(session: Callable[..., ContainerSession]) -> None:
    """The first process collects it: as zombies, a hundred would fill a limit of thirty."""

    async def body(entered: ContainerSession) -> str:
        for _ in range(5):
            orphans = "for n in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do (sleep 0.01 &) & done; wait"
            await entered.run(["sh", "-c", orphans])
        return str((await entered.run(["sh", "-c", "echo still here | cat"])).stdout)

    assert over(session(processes=50), body) == "still here\n"


def test_a_session_whose_container_is_gone_is_over(
    session: Callable[..., ContainerSession], real_engine: str, container_engines: Engines
) -> None:
    async def body(entered: ContainerSession) -> None:
        await entered.run(["sh", "-c", "kill -9 -1; kill -9 1"])  # its own clock is among what ends
        assert (await entered.run(["echo", "alive"])).stdout == "alive\n", "a command cannot end it"
        container_engines.call(real_engine, "kill", entered.name)
        assert entered._whole is not None
        await asyncio.wait([entered._whole])
        with pytest.raises(SessionOverError):
            await entered.run(["true"])

    over(session(), body)


PARENT = """
import asyncio, sys
from nemotron_steps.sandbox import Limits
from nemotron_steps.sandbox.containers import ContainerSandbox
from nemotron_steps.sandbox.session import ContainerSession
async def main():
    engine, image = sys.argv[1:]
    program = ContainerSandbox(engine, image).execute(['sleep', '600'], b'', {}, Limits(wall_s=8.0))
    running = asyncio.ensure_future(program)
    slots, limits = asyncio.Semaphore(1), Limits(wall_s=600.0)
    async with ContainerSession(engine, image, slots, limits=limits) as session:
        print('in', flush=True)
        await session.run(['sleep', '600'], wall_s=600.0)
asyncio.run(main())
"""


def test_nothing_runs_on_after_a_parent_that_is_killed(real_engine: str, container_engines: Engines) -> None:
    command = [sys.executable, "-c", PARENT, real_engine, container_engines.image]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None and parent.stdout.readline() == b"in\n"
        until = time.monotonic() + 30
        while len(container_engines.names(real_engine, running=True)) < 2:
            assert time.monotonic() < until, "the program's container never ran"
            time.sleep(0.1)
        os.kill(parent.pid, signal.SIGKILL)
    finally:
        parent.kill()
        parent.communicate()
    until = time.monotonic() + 60
    while container_engines.names(real_engine, running=True) and time.monotonic() < until:
        time.sleep(0.5)
    assert container_engines.names(real_engine, running=True) == []
    # What is left of the program is a record that has ended.
    for name in container_engines.names(real_engine):
        assert name.startswith("steps-sandbox-")
        container_engines.call(real_engine, "rm", "--force", name)
