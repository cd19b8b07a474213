import asyncio
import errno
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.errors import SandboxError, UnsupportedError
from nemotron_steps.sandbox import Limits, Outcome, SandboxResult, create_sandbox
from nemotron_steps.sandbox.bubblewrap import BubblewrapSandbox
from tests.sandbox.programs import MIB, started, with_argument

pytestmark = pytest.mark.sandbox


def run(**arguments: Any) -> SandboxResult:
    return asyncio.run(started().run(**arguments))


def test_a_program_gets_its_files_and_input_and_returns_its_output() -> None:
    code = "import sys; print(open('data/in.txt').read() + sys.stdin.read()); sys.exit(3)"
    result = run(code=code, stdin=" world", files={"data/in.txt": b"hello"})
    assert (result.outcome, result.exit_code, result.stdout) == (Outcome.EXITED, 3, "hello world\n")
    assert not result.ok


def test_an_endless_loop_is_stopped_on_the_wall_clock() -> None:
    began = time.monotonic()
    result = run(code="print('begun', flush=True)\nwhile True: pass", limits=Limits(wall_s=2.0))
    assert (result.outcome, result.exit_code) == (Outcome.TIMEOUT, None)
    assert result.stdout == "begun\n"
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("before", ["", "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)"])
def test_spending_the_processor_time_is_a_time_out(before: str) -> None:
    result = run(code=f"{before}\nwhile True: pass", limits=Limits(wall_s=30, cpu_s=1))
    assert (result.outcome, result.exit_code) == (Outcome.TIMEOUT, None)


def test_concurrent_runs_do_not_share_their_process_limit() -> None:
    sandboxes = [started(), BubblewrapSandbox()]
    code = (
        "import subprocess\n"
        "held = [subprocess.Popen(['sleep', '1']) for _ in range(12)]\n"
        "print(sum(p.wait() == 0 for p in held))"
    )

    async def together() -> list[SandboxResult]:
        await sandboxes[1].start()
        runs = [sandboxes[number % 2].run(code=code, limits=Limits(processes=16)) for number in range(4)]
        return await asyncio.gather(*runs)

    assert [result.stdout for result in asyncio.run(together())] == ["12\n"] * 4


def test_a_file_cannot_grow_past_its_limit() -> None:
    code = (
        "import os\n"
        "with open('big', 'wb') as handle:\n"
        "    try: handle.write(b'x' * 3 * 2**20)\n"
        "    except OSError as error: print(error.errno)\n"
        "print(os.path.getsize('big'))\n"
    )
    assert run(code=code, limits=Limits(file_bytes=MIB)).stdout == f"{errno.EFBIG}\n{MIB}\n"


# What a program says or how it ends is a result, never a failure of the sandbox.


@pytest.mark.parametrize("code", [125, 128 + 9])
def test_no_exit_code_of_a_program_is_a_failure_of_the_sandbox(code: int) -> None:
    result = run(code=f"import sys; sys.stderr.write('bwrap: Creating new namespace failed'); sys.exit({code})")
    assert (result.outcome, result.exit_code) == (Outcome.EXITED, code)


@pytest.mark.parametrize("victim", ["-1", "os.getppid()", "0"])
def test_killing_what_is_in_sight_is_a_result(victim: str) -> None:
    result = run(code=f"import os, signal; print('begun', flush=True); os.kill({victim}, signal.SIGKILL)")
    assert result.stdout == "begun\n" and result.outcome is Outcome.EXITED


@pytest.mark.parametrize("text", ["'\ud800'", "\x00", "\U0010ffff"])
def test_any_text_can_be_a_program_an_input_and_a_file(text: str) -> None:
    assert run(code=f"print({text})").outcome is Outcome.EXITED
    code = "import sys; print(len(sys.stdin.buffer.read()), len(open('file', 'rb').read()))"
    size = len(text.encode(errors="surrogatepass"))
    assert run(code=code, stdin=text, files={"file": text}).stdout == f"{size} {size}\n"


def test_the_program_has_no_descriptor_but_its_input_and_outputs() -> None:
    leaked = os.open("/etc/passwd", os.O_RDONLY)
    os.set_inheritable(leaked, True)
    try:
        result = run(code="import os; print([n for n in range(4096) if os.path.lexists(f'/proc/self/fd/{n}')])")
    finally:
        os.close(leaked)
    assert result.stdout == "[0, 1, 2]\n"


class Broken(BubblewrapSandbox):
    """A sandbox that cannot be set up."""

    def __init__(self, broken: str) -> None:
        super().__init__()
        self.broken = broken

    def command(self, *arguments: Any) -> list[str]:
        command = super().command(*arguments)
        place = command.index(self.broken)
        return [
            *command[:place],
            *{"--nproc=64": ["--nproc=many"]}.get(self.broken, ["/nothing"]),
            *command[place + 1 :],
        ]


@pytest.mark.parametrize("broken", ["bwrap", "/usr", "--nproc=64", "setpriv"])
def test_a_sandbox_that_cannot_be_set_up_is_an_error(broken: str) -> None:
    if broken == "setpriv" and os.geteuid() != 0:
        pytest.skip("only root runs it")
    sandbox = Broken(broken)
    with pytest.raises(SandboxError, match="could not be set up"):
        asyncio.run(sandbox.execute(["/bin/true"], b"", {}, Limits()))


def test_a_cancelled_run_is_killed() -> None:
    marker = f"sandbox-cancelled-{os.getpid()}"
    sandbox = started()

    async def cancelled() -> float:
        argv = ["/bin/sh", "-c", f"sleep 600; : {marker}"]
        task = asyncio.create_task(sandbox.run(argv=argv, limits=Limits(wall_s=300)))
        while not with_argument(marker):
            await asyncio.sleep(0.02)
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - began

    assert asyncio.run(cancelled()) < 60
    assert with_argument(marker) == []


def test_killing_the_process_group_reaches_the_sandbox_and_the_program_cannot_signal_it() -> None:
    """However early it is: bubblewrap's first process asks to die with its parent only after it is set up."""
    marker = f"sandbox-group-{os.getpid()}"
    sandbox = started()

    async def groups() -> dict[str, set[int]]:
        argv = ["/bin/sh", "-c", f"sleep 600 & wait; : {marker}"]
        task = asyncio.create_task(sandbox.run(argv=argv))
        found: dict[str, set[int]] = {}
        while "sh" not in found:  # the program itself, which was bubblewrap a moment ago
            await asyncio.sleep(0.02)
            found = {}
            for pid in with_argument(marker):
                with suppress(OSError):  # one of bubblewrap's that has ended meanwhile
                    name = Path(f"/proc/{pid}/comm").read_text().strip()
                    found.setdefault(name, set()).add(os.getpgid(pid))
        task.cancel()
        await asyncio.wait([task])
        return found

    found = asyncio.run(groups())
    assert len(found["bwrap"]) == 1 and found["bwrap"].isdisjoint(found["sh"])


def test_a_parent_that_is_killed_takes_its_runs_with_it() -> None:
    marker = f"sandbox-orphan-{os.getpid()}"
    program = (
        "import asyncio, sys\n"
        "from nemotron_steps.sandbox.bubblewrap import BubblewrapSandbox\n"
        "from nemotron_steps.sandbox import Limits\n"
        "code = f'import os\\nos.fork()\\nwhile True: pass # {sys.argv[1]}'\n"
        "argv = ['/bin/sh', '-c', f'sleep 600 & while :; do :; done; : {sys.argv[1]}']\n"
        "asyncio.run(BubblewrapSandbox().execute(argv, b'', {}, Limits(wall_s=600)))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, marker])
    try:
        until = time.monotonic() + 30
        while len(with_argument(marker)) < 3 and time.monotonic() < until:
            time.sleep(0.05)
        assert len(with_argument(marker)) >= 3
    finally:
        parent.kill()
        parent.wait()
    until = time.monotonic() + 30
    while with_argument(marker) and time.monotonic() < until:
        time.sleep(0.05)
    assert with_argument(marker) == []


def test_without_bubblewrap_it_refuses_with_a_hint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError) as caught:
        asyncio.run(create_sandbox("bubblewrap").run(code="print(1)"))
    assert caught.value.hints == ("apt-get install -y bubblewrap",)
