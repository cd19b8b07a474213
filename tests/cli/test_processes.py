"""`steps run` as a process among others: readers that leave, deaths without a word, signals to either of its two."""

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.runs.run_folder import RunInfo, get_run, read_events
from tests.cli.conftest import until_at_work

STEPS = f"{sys.executable} -m nemotron_steps.cli.main"


def shell(command: str, folder: Path, timeout: float = 90) -> subprocess.CompletedProcess[str]:
    words = ["bash", "-c", command]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=timeout)


def latest(folder: Path) -> RunInfo:
    return get_run(ArtifactStore(folder / "home"), "latest")


@pytest.mark.parametrize("reader", ["2>&1 | head -n 1", ">&- 2>&-"])
def test_a_reader_that_leaves_does_not_touch_the_run(workplace: Path, reader: str) -> None:
    slow = "toy/train -c tiny steps=4 seconds_per_step=0.1"
    done = shell(f"{STEPS} run {slow} {reader}; echo ${{PIPESTATUS[0]}} >> code", workplace)
    info = latest(workplace)
    assert info.status == "done", done.stderr
    assert {step["state"] for step in info.steps.values()} == {"ran"}
    assert (workplace / "code").read_text() == "0\n"


@pytest.mark.parametrize(("end", "how"), [("vanish", "exit code 0"), ("killed", "killed by SIGKILL")])
def test_a_step_that_dies_without_a_word_is_journalled_and_retryable(workplace: Path, end: str, how: str) -> None:
    done = shell(f"{STEPS} run toy/train -c tiny end={end}", workplace)
    assert done.returncode == 3, done.stderr
    info = latest(workplace)
    assert "error[E710]" in done.stderr and how in done.stderr and f"steps run --resume {info.id}" in done.stderr
    states = {key: step["state"] for key, step in info.steps.items()}
    assert (info.status, states) == ("failed", {"toy/make": "ran", "toy/train": "failed"})
    assert info.error is not None and (info.error["code"], info.error["found"]) == ("E710", how)
    store = ArtifactStore(workplace / "home")
    kinds = [record["kind"] for record in read_events(store, info.id)]
    assert kinds[-2:] == ["step_failed", "run_finished"]
    report = (workplace / "home/runs" / info.id / "report.html").read_text()
    assert "ended without a word" in report
    # What was committed is there: the same command goes on behind it.
    again = shell(f"{STEPS} run --resume {info.id}", workplace)
    assert again.returncode == 3 and "1 cached" in again.stdout


def test_the_last_words_of_a_process_that_dies_are_handed_on(workplace: Path) -> None:
    code = (
        "import os, sys, toy_steps\n"
        "def last_words(context):\n"
        "    os.write(2, b'x' * 50_000 + b' the last words')\n"
        "    os._exit(1)\n"
        "toy_steps.make = last_words\n"
        "from nemotron_steps.cli.main import steps\n"
        "sys.argv = ['steps', 'run', 'toy/make']\n"
        "sys.exit(steps())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=workplace, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert done.stderr.index("the last words") < done.stderr.index("error[E710]")
    process = subprocess.Popen([sys.executable, "-c", code], cwd=workplace, stderr=subprocess.PIPE, stdout=-1)
    for reader in (process.stdout, process.stderr):
        assert reader is not None
        reader.close()  # and nobody listens any more
    assert process.wait(60) == 3


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A run that takes a minute, once its steps have begun."""
    command = [*STEPS.split(), "run", "toy/train", "-c", "tiny", "steps=600", "seconds_per_step=0.1", *words]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until_at_work(process, folder)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_process_that_works(workplace: Path, number: signal.Signals) -> None:
    process = start(workplace)
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130 and f"interrupted by {number.name}" in said
    assert latest(workplace).status == "interrupted"


@pytest.mark.parametrize(("signals", "hears"), [(1, False), (2, False), (1, True)])
def test_a_worker_that_hears_no_signal_is_ended_sooner_after_a_second(
    workplace: Path, signals: int, hears: bool
) -> None:
    code = (
        "import signal, sys, time\n"
        "from nemotron_steps import stopping\n"
        "from nemotron_steps.session import supervise\n"
        "def work():\n"
        f"    signal.pthread_sigmask(signal.SIG_{'UN' if hears else ''}BLOCK, {{signal.SIGTERM}})\n"
        "    print('deaf', flush=True)\n"
        f"    time.sleep({2 if hears else 60})\n"
        "    return 0\n"
        "stopping.note()\n"
        f"supervise._UNHEARD_S, supervise._UNHEARD_AGAIN_S = {(0.5, 60) if signals == 1 else (60, 0.5)}\n"
        "from nemotron_steps.cli.errors import report\n"
        "sys.exit(supervise.supervise(work, lambda error: report(error, as_json=False)))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=workplace, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "deaf\n"
    for _ in range(signals):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.7)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, "ended by SIGTERM" in said) == ((0, False) if hears else (130, True))


def test_a_slow_reader_that_does_not_block_gets_everything(workplace: Path) -> None:
    code = (
        "import os, sys\n"
        "from nemotron_steps.session.supervise import supervise\n"
        "sys.exit(supervise(lambda: os.write(1, b'x' * 400_000) * 0, lambda error: 1))\n"
    )
    read, write = os.pipe()
    os.set_blocking(write, False)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=workplace, stdout=write)
    os.close(write)
    time.sleep(1.0)
    with os.fdopen(read, "rb") as file:
        assert len(file.read()) == 400_000
    assert process.wait(30) == 0


def test_a_caller_that_ignores_its_children_is_no_trap(workplace: Path) -> None:
    assert shell(f"trap '' CHLD; exec {STEPS} run toy/make", workplace).returncode == 0


COUNTING = """
import os, signal, sys, time
from nemotron_steps.session.supervise import supervise

kill = os.kill
os.kill = lambda *to: (time.sleep(0.2), kill(*to))  # a second signal that comes too soon would be one with the first

def work():
    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    print("ready", flush=True)
    deadline = time.monotonic() + 30
    while not seen and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(1)
    return 40 + len(seen)

sys.exit(supervise(work, print))
"""


def test_ctrl_c_at_a_terminal_reaches_the_working_process_once(tmp_path: Path) -> None:
    """The terminal's driver signals both processes; only what one of them alone got is handed on."""

    def own_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    keyboard, screen = pty.openpty()
    command = [sys.executable, "-c", COUNTING]
    process = subprocess.Popen(
        command, stdin=screen, stdout=screen, stderr=screen, start_new_session=True, preexec_fn=own_terminal
    )
    os.close(screen)
    said = b""
    while b"ready" not in said:
        assert select.select([keyboard], [], [], 60)[0]
        said += os.read(keyboard, 4096)
    os.write(keyboard, b"\x03")
    assert process.wait(60) == 41
    os.close(keyboard)


def test_the_working_process_dies_with_the_one_that_waits(workplace: Path) -> None:
    process = start(workplace)
    worker = latest(workplace).pid
    assert worker != process.pid
    process.kill()
    process.wait(timeout=30)
    deadline = time.monotonic() + 20
    while latest(workplace).status == "running" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert latest(workplace).status == "killed"
    assert not re.search(r"^State:\s+[RSD]", _proc_status(worker), re.MULTILINE)


def _proc_status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
