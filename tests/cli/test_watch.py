"""`steps watch`: what it shows of a run, how it follows one in another process, what it costs."""

from __future__ import annotations

import glob
import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.cli.watch import _RunConfigs, _samples, picture
from nemotron_steps.runs.follow import Follower, StepSeen
from nemotron_steps.runs.run_folder import RunInfo, get_run
from tests.cli.conftest import Cli

STEPS = [sys.executable, "-m", "nemotron_steps.cli.main"]


def metrics(index: int, moment: float, **values: float) -> str:
    return json.dumps({"kind": "metrics", "time": moment, "step": "rl", "index": index, "values": values}) + "\n"


def start(seconds: float, steps: int = 30, *words: str) -> subprocess.Popen[bytes]:
    command = [
        *STEPS,
        "run",
        "toy/train",
        "-c",
        "tiny",
        f"steps={steps}",
        f"seconds_per_step={seconds / steps}",
        *words,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not any(file.stat().st_size for file in Path("home/runs").glob("*/metrics.jsonl")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
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


def test_a_run_in_another_process_is_followed_to_its_end(cli: Cli) -> None:
    process = start(3.0)
    result = cli("watch", "latest")
    assert process.wait(30) == 0
    assert result.code == 0
    assert "[toy/train] step 30: reward 1" in result.out and "done" in result.out.splitlines()[-2]


def test_steps_that_a_resumed_run_repeats_count_once(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(
        "".join(metrics(i, i, loss=i) for i in (1, 2, 3, 2)) + metrics(3, 9, loss=30)
    )
    follower.look()
    assert follower.steps["rl"].curves["loss"].values == [1.0, 2.0, 30.0]


def test_watching_imports_no_framework_and_costs_little(workplace: Path) -> None:
    """Less than a twentieth of a core, its start set aside, beside a run of six seconds."""
    code = """
import resource, sys
from nemotron_steps.cli.main import steps
import nemotron_steps.cli.watch as watch, time
first, began = None, time.monotonic()
look = watch.JobView.look
def measured(view):
    global first, began
    if first is None:
        first, began = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]), time.monotonic()
    return look(view)
watch.JobView.look = measured
print("ready", flush=True)
input()
code = steps(["watch"])
used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - first
heavy = {"torch", "ray", "vllm", "hydra"} & set(sys.modules)
print("SHARE", used / (time.monotonic() - began), sorted(heavy), code)
"""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as watching:
        assert watching.stdout is not None and watching.stdout.readline() == "ready\n"
        process = start(6.0)  # not before: all of it is watched, however long the imports take
        said, errors = watching.communicate("\n", timeout=60)
    assert process.wait(30) == 0
    share, heavy, ended = said.splitlines()[-1].removeprefix("SHARE ").split(" ")
    assert (heavy, ended) == ("[]", "0"), errors
    assert float(share) < 0.05


def test_on_a_terminal_it_redraws_and_q_leaves_the_run_at_work(workplace: Path) -> None:
    run = start(20.0, 200)
    leader, terminal = pty.openpty()
    try:
        process = subprocess.Popen([*STEPS, "watch"], stdin=terminal, stdout=terminal, stderr=subprocess.STDOUT)
        os.close(terminal)
        said = read_until(leader, "q leave")
        os.write(leader, b"q")
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
    deadline = time.monotonic() + 60
    while not any(file.stat().st_size for file in Path("home/runs").glob("*/metrics.jsonl")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)


def test_a_sample_is_shown_with_its_reward_and_no_more_of_a_long_text_than_its_beginning() -> None:
    seen = StepSeen()
    words = "word " * 200
    seen.samples = {
        "best": {"step": 3, "reward": 1.0, "prompt": "2 +\n 2?", "response": words},
        "latest": {"response": "\x1b[2J"},
    }
    assert [*_samples(seen, Terminal.of(io.StringIO()))] == [
        *("", "  best, step 3  reward 1", "    prompt  2 + 2?", f"  response  {words[:400]}"),
        *("", "  latest, step ?", "  response  �[2J"),
    ]


def lines_of(info: RunInfo, folder: Path, **fields: float) -> list[str]:
    follower = Follower(folder)
    follower.look()
    terminal = Terminal(io.StringIO(), color=False, width=None)
    found = picture(info, follower, terminal, _RunConfigs(folder), samples=False, now=130.0, **fields)
    return [" ".join(line.split()) for line in found]


@pytest.mark.parametrize(
    ("status", "took", "steps"),
    [
        ("running", "30.0 s", ["✓ make ran 2.0 s", "● train running step 3 10.0 s a step", "○ score pending"]),
        ("failed", "8.0 s", ["✓ make ran 2.0 s", "✗ train failed", "○ score pending"]),
        ("killed", "8.0 s", ["✓ make ran 2.0 s", "○ train killed", "○ score pending"]),
    ],
)
def test_a_picture_tells_how_each_step_stands_and_how_long_this_attempt_takes(
    tmp_path: Path, status: str, took: str, steps: list[str]
) -> None:
    """The run began at 50, this attempt at 100; it was heard of last at 108."""
    (tmp_path / "events.jsonl").write_text(json.dumps({"kind": "run_started", "time": 100.0, "run": "r1"}) + "\n")
    (tmp_path / "metrics.jsonl").write_text(metrics(2, 110.0, loss=1.0) + metrics(3, 120.0, loss=0.5))
    text = (tmp_path / "metrics.jsonl").read_text().replace('"rl"', '"train"')
    (tmp_path / "metrics.jsonl").write_text(text)
    states = {"make": {"state": "ran", "seconds": 2.0}, "train": {"state": "running"}, "score": {}}
    info = RunInfo("r1", name="three", status=status, steps=states, created=50.0, updated=108.0)
    lines = lines_of(info, tmp_path)
    assert lines[0] == f"r1 {status} three {took}" and lines[1:4] == steps
    assert "loss 0.5 █▁" in lines


def test_the_curves_are_those_of_the_step_at_work_else_of_the_last_that_reported(tmp_path: Path) -> None:
    texts = [metrics(1, 1.0, loss=float(n)).replace('"rl"', f'"{step}"') for n, step in enumerate(("a", "b"))]
    (tmp_path / "metrics.jsonl").write_text("".join(texts))
    for states, loss in ((("running", "running"), 0), (("ran", "running"), 1), (("ran", "ran"), 1)):
        steps = {key: {"state": state} for key, state in zip("abc", (*states, "pending"), strict=True)}
        lines = lines_of(RunInfo("r1", steps=steps, status="running"), tmp_path)
        assert f"loss {loss} ▁" in lines
    assert not any("loss" in line for line in lines_of(RunInfo("r1", steps={"c": {"state": "running"}}), tmp_path))
