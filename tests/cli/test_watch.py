"""A run while it works, and what its end says."""

import glob
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.runs.run_folder import get_run
from tests.cli.conftest import Cli, until_at_work

STEPS = [sys.executable, "-m", "nemotron_steps.cli.main"]


def start(seconds: float, steps: int = 30) -> subprocess.Popen[bytes]:
    words = ["run", "toy/train", "-c", "tiny", f"steps={steps}", f"seconds_per_step={seconds / steps}"]
    process = subprocess.Popen([*STEPS, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until_at_work(process)
    return process


def test_one_look_shows_stages_curves_and_signals_with_what_to_paste(cli: Cli) -> None:
    assert cli("run", "toy/train", "-c", "tiny").code == 0
    result = cli("watch", "--once")
    assert result.code == 0
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    assert lines[0].split()[1] == "done"
    assert {"✓ toy/make ran", "✓ toy/train ran"} <= {" ".join(line.split()[:3]) for line in lines}
    assert "reward 1 ▁▄█" in lines and "loss 0.3333 █▃▁" in lines and "KL 0.003 ▁▅█" in lines
    at = lines.index("▲ reward_saturated (share=0.99)")
    assert lines[at + 1] == "optimizer.lr=0.0333333"


def test_a_run_that_failed_ends_the_watch_as_it_ended(cli: Cli) -> None:
    assert cli("run", "toy/train", "-c", "tiny", "end=diverge").code == 1
    result = cli("watch")
    assert result.code == 1
    assert "failed" in result.out and "error[E600]" in result.err
    assert cli("watch", "--once").code == 0


def test_on_a_terminal_it_redraws_and_ctrl_c_leaves_the_run_at_work(workplace: Path) -> None:
    run = start(20.0, 200)
    leader, terminal = pty.openpty()
    try:
        process = subprocess.Popen([*STEPS, "watch"], stdin=terminal, stdout=terminal, stderr=subprocess.STDOUT)
        os.close(terminal)
        said = read_until(leader, "reward")
        process.send_signal(signal.SIGINT)
        said += read_until(leader, "goes on")
        assert process.wait(20) == 0
        assert "reward" in said and run.poll() is None
    finally:
        run.send_signal(signal.SIGTERM)
        run.wait(30)
        os.close(leader)


def read_until(descriptor: int, text: str) -> str:
    found = ""
    deadline = time.monotonic() + 30
    while text not in found:
        assert time.monotonic() < deadline, found
        found += os.read(descriptor, 65536).decode(errors="replace")
    return found


def test_ctrl_c_says_what_of_a_pipeline_is_kept(workplace: Path) -> None:
    command = [*STEPS, "run", "toy_all", "train.steps=600", "train.seconds_per_step=0.1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    interrupt(process)
    _, said = process.communicate(timeout=30)
    info = get_run(ArtifactStore("home"), "latest")
    assert process.returncode == 130 and info.status == "interrupted"
    assert said.count("interrupted by SIGINT; kept: make; train has no checkpoint yet and begins anew") == 1
    assert said.count(f"hint: steps run --resume {info.id}") == 1


def test_a_second_ctrl_c_ends_at_once_what_does_not_let_go(workplace: Path) -> None:
    command = [*STEPS, "run", "toy/train", "-c", "tiny", "end=stubborn"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    interrupt(process)
    deadline = time.monotonic() + 30
    while not glob.glob("home/**/will_not_stop", recursive=True):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    time.sleep(1.0)  # what follows at once counts as the same one
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=10)
    info = get_run(ArtifactStore("home"), "latest")
    assert process.returncode == 130
    assert said.count("ended by SIGINT; kept: toy/make; toy/train has no checkpoint yet") == 1
    assert said.count(f"hint: steps run --resume {info.id}") == 1 and "error[" not in said
    assert (info.status, info.steps["toy/train"]["state"]) == ("interrupted", "interrupted")


def interrupt(process: subprocess.Popen[str]) -> None:
    """Ctrl-C once the run's training step is at work."""
    until_at_work(process)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
