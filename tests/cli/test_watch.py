"""`steps watch`: what it shows of a run, how it follows one in another process, what it costs."""

from __future__ import annotations

import glob
import io
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.cli import watch
from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.cli.watch import _draw, _pace, _RunConfigs, _samples, picture, sparkline
from nemotron_steps.runs.follow import Follower, StepSeen
from nemotron_steps.runs.run_folder import RunFolder, RunInfo, get_run
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


def test_a_half_written_line_waits_for_its_end(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    assert follower.look() == []
    file = tmp_path / "metrics.jsonl"
    whole = metrics(2, 20.0, loss=0.5)
    file.write_text(metrics(1, 10.0, loss=1.0) + "not json\n" + whole[:30])
    assert [record["index"] for record in follower.look()] == [1]
    with file.open("a") as more:
        more.write(whole[30:])
    assert [record["index"] for record in follower.look()] == [2]
    assert follower.steps["rl"].curves["loss"].values == [1.0, 0.5]
    assert follower.steps["rl"].seconds_per_step == 10.0


def test_steps_that_a_resumed_run_repeats_count_once(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(
        "".join(metrics(i, i, loss=i) for i in (1, 2, 3, 2)) + metrics(3, 9, loss=30)
    )
    follower.look()
    assert follower.steps["rl"].curves["loss"].values == [1.0, 2.0, 30.0]


def test_a_sparkline_has_the_columns_that_it_may_have() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 20) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0] * 5, 3) == "▁▁▁"
    assert len(sparkline(list(range(500)), 40)) == 40
    assert sparkline([float("nan")], 5) == ""
    assert sparkline([0, 0, 7, 7], 2) == "▁█" and sparkline([0, 4, 7, 7, 0], 2) == "▁█"
    assert sparkline([0, float("inf"), 7, float("-inf")], 2) == "▁█" and sparkline([1], 0) == ""


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


def test_what_is_left_is_what_is_not_done_yet_at_the_pace_of_late() -> None:
    seen = StepSeen(index=4)
    seen.times.extend([(2, 100.0), (4, 120.0)])
    assert _pace(seen, 10) == "step 4/10  10.0 s a step  1 min 00 s left"
    assert _pace(seen, 4) == "step 4/4  10.0 s a step" and _pace(seen, None) == "step 4  10.0 s a step"
    assert _pace(StepSeen(), 10) == "" and _pace(StepSeen(index=1), 10) == "step 1/10"


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


def test_of_many_signals_the_last_five_are_shown_with_what_explains_them_and_every_warning(tmp_path: Path) -> None:
    signals = [{"kind": "signal", "time": 1.0, "step": "a", "name": f"s{n}", "numbers": {"step": n}} for n in range(7)]
    warning = {"kind": "warning", "time": 1.0, "text": "slow\x1b[2J"}
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (*signals, warning)))
    lines = lines_of(RunInfo("r1", steps={"a": {"state": "running"}}), tmp_path)
    assert [line for line in lines if line.startswith("steps explain")] == [f"steps explain s{n}" for n in range(2, 7)]
    assert lines[-1] == "▲ slow�[2J"


def test_how_many_steps_there_are_is_read_from_the_config_wherever_it_says_so(tmp_path: Path) -> None:
    assert _RunConfigs(tmp_path).total("a") is None  # nothing is written yet
    (tmp_path / "plan.json").write_text(json.dumps({"steps": [{"key": key, "step": "toy/x"} for key in "abc"]}))
    (tmp_path / "config.yaml").write_text(
        "a: {max_num_steps: 3, sft: {max_num_steps: 9}}\nb: {sft: {max_num_steps: 4}}\n"
    )
    asked = _RunConfigs(tmp_path)
    assert [asked.total(key) for key in "abcd"] == [3, 4, None, None]


def test_the_key_s_shows_samples_and_hides_them_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pressed, shown = iter("s xsq"), []
    monkeypatch.setattr(watch, "_keys", lambda: nullcontext(lambda seconds: next(pressed).strip()))
    monkeypatch.setattr(watch, "_now", lambda store, info, view: info)
    monkeypatch.setattr(watch, "picture", lambda *_, samples, view: shown.append(samples) or [])
    info = RunInfo("r1", status="running")
    terminal = Terminal(io.StringIO(), color=False, width=80)
    left = _draw(None, info, Follower(tmp_path), terminal, _RunConfigs(tmp_path), None, samples=False)
    assert left is info and shown == [False, True, True, True, False]
    shown.clear()
    done = RunInfo("r1", status="done")  # it is drawn once more, as it ended
    assert _draw(None, done, Follower(tmp_path), terminal, _RunConfigs(tmp_path), None, samples=True) is done
    assert shown == [True]


def test_a_run_that_was_killed_ends_the_watch_as_one_that_may_be_tried_again(cli: Cli, workplace: Path) -> None:
    folder = RunFolder(ArtifactStore("home"), "r1")
    folder.update(folder.create("toy/train", {}), status="running", host=socket.gethostname())
    watched = cli("watch", "r1")
    assert watched.code == 3 and "r1  killed" in watched.out and "steps run --resume r1" in watched.out
