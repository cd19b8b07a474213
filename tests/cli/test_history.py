"""Runs that are looked at, followed, cancelled, here and elsewhere."""

import json
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.cli import history, watch
from nemotron_steps.runs import launch
from nemotron_steps.runs.locks import hold
from nemotron_steps.runs.run_folder import RunFolder, RunInfo
from nemotron_steps.session import jobs
from nemotron_steps.session.jobs import not_started
from tests.cli.conftest import Cli
from tests.runs.executors.jobs import wait_until


def recorded(workplace: Path, run: str = "r1", **fields: Any) -> RunFolder:
    folder = RunFolder(ArtifactStore(workplace / "home"), run)
    folder.update(folder.create("toy/train", {}), **fields)
    return folder


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"status": "submitted"}, "open job job-7 was asked to stop"),
        ({"status": "running", "host": "elsewhere"}, "open job job-7 was asked to stop"),
        ({"status": "running", "host": socket.gethostname()}, "stopped r1"),  # it is waited for
    ],
)
def test_a_job_is_cancelled_by_its_executor(
    cli: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], said: str
) -> None:
    folder = recorded(workplace, executor="open", job="job-7", **fields)
    asked: list[str] = []

    def cancel(store: ArtifactStore, info: RunInfo) -> None:
        asked.append(info.id)
        folder.update(info, status="interrupted")

    monkeypatch.setattr(launch, "cancel", cancel)
    monkeypatch.setattr(os, "kill", lambda pid, number: pytest.fail("a process of this machine was signalled"))
    with hold(folder.lock, {}, lambda holder: None):
        cancelled = cli("cancel", "r1")
    assert cancelled.code == 0 and asked == ["r1"]
    assert said in cancelled.out and "steps run --resume r1" in cancelled.out


RUN = "20260101-000000-far-0001"
SSH = """#!/bin/sh
# The words after `--` are a host and a script; a machine that is not there answers with 255.
[ -e {away} ] && {{ : > {away}.asked; echo "ssh: connect to host login: Connection refused" >&2; exit 255; }}
while [ "$1" != "--" ]; do shift; done
exec sh -c "$3"
"""
SCONTROL = """#!/bin/sh
echo 'JobId=17 JobState={state} Reason=NonZeroExitCode ExitCode=1:0'
"""


class Far:
    """A run of job 17 of a cluster behind ssh, whose folder there is `there`; `away` exists while ssh is refused."""

    def __init__(self, root: Path, status: str) -> None:
        self.there = root / "far" / ".steps" / "runs" / RUN
        self.away, self.bin = root / "away", root / "bin"
        self.there.mkdir(parents=True)
        self.bin.mkdir()
        self.program("ssh", SSH.format(away=self.away))
        self.store = ArtifactStore("home")
        self.folder = RunFolder(self.store, RUN)
        info = self.folder.create("far", {}, executor="slurm")
        self.info = self.folder.update(info, status=status, job=f"ssh://login/17?folder={root}/far")
        self.write("first line\n")

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def write(self, log: str) -> None:
        with (self.there / "log.txt").open("a") as file:
            file.write(log)


@pytest.fixture
def far(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Far:
    far = Far(workplace, "submitted")
    far.program("bash", "#!/bin/sh\nexec /bin/bash -s\n")  # no login shell, which has a PATH of its own
    far.program("scontrol", SCONTROL.format(state="RUNNING"))
    monkeypatch.setenv("PATH", f"{far.bin}:/usr/bin:/bin")
    return far


def test_logs_say_once_that_nothing_is_brought_here_and_go_on_when_it_is(
    cli: Cli, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "FETCH_SECONDS", 0.0)
    monkeypatch.setattr(history, "_POLL_SECONDS", 0.02)

    def come_back() -> None:
        wait_until(Path(f"{far.away}.asked").exists)
        far.write("second line\n")
        (far.there / "run.json").write_bytes((far.folder.path / "run.json").read_bytes().replace(b"submitted", b"done"))
        far.away.unlink()

    assert cli("logs", RUN).out == "first line\n"
    far.away.touch()
    back = threading.Thread(target=come_back)
    back.start()
    followed = cli("logs", RUN, "-f")
    back.join()
    assert followed.code == 0 and followed.out == "first line\nsecond line\n"
    missing = "what its job wrote lately is missing: the login node cannot be reached by ssh"
    assert followed.err.count(missing) == 1 and "Connection refused" in followed.err


@pytest.mark.parametrize("command", [("status",), ("status", "--json"), ("cancel", "--json"), ("logs", "-f")])
def test_a_run_whose_queued_job_somebody_cancelled_is_over(cli: Cli, far: Far, command: tuple[str, ...]) -> None:
    far.program("scontrol", SCONTROL.format(state="CANCELLED"))
    name, *options = command
    shown = cli(name, RUN, *options)
    assert shown.code == 0
    if options == ["--json"]:
        assert json.loads(shown.out)["status"] == "interrupted"
    if command == ("status",):
        assert "the job was cancelled before it began" in shown.out and f"steps run --resume {RUN}" in shown.out
    assert [run["status"] for run in json.loads(cli("runs", "--json").out)] == ["interrupted"]


@pytest.mark.parametrize("command", [("logs", RUN, "-f"), ("watch", RUN)])
def test_who_follows_a_run_asks_the_scheduler_no_more_often_than_it_bears(
    cli: Cli, far: Far, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr(jobs, "FETCH_SECONDS", 600.0)
    monkeypatch.setattr(history, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(watch, "_EVERY_S", 0.02)
    questions = far.bin / "questions"
    far.program("scontrol", SCONTROL.format(state="PENDING") + f"echo asked >>{questions}\n")

    def end_later() -> None:
        wait_until(questions.exists)
        time.sleep(0.4)  # in which it would be asked twenty times
        far.folder.update(far.info, status="done")

    end = threading.Thread(target=end_later)
    end.start()
    assert cli(*command).code == 0
    end.join()
    assert questions.read_text() == "asked\n"


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("console.txt", "\n  error[E200]: \x1b[2J\nand more\n", "error[E200]: �[2J"),
        (
            "slurm-777.txt",
            "pyxis: importing\nerror: image x has no `steps`\nsrun: x\n",
            "error: image x has no `steps`",
        ),
        ("slurm-777.txt", "1\nslurmstepd: 2\n3\nbash: 4\n", "slurmstepd: 2\n3\nbash: 4"),
    ],
)
def test_a_run_that_never_began_is_told_with_what_its_job_said(
    workplace: Path, name: str, text: str, found: str
) -> None:
    store = ArtifactStore("home")
    silent = not_started(store, RunInfo(RUN))
    assert (silent.found, silent.where, silent.hints) == (None, f"run {RUN}", (f"steps run --resume {RUN}",))
    printed = RunFolder(store, RUN).path / name
    printed.parent.mkdir(parents=True)
    printed.write_text(text)
    error = not_started(store, RunInfo(RUN))
    assert (error.found, error.where) == (found, f"home/runs/{RUN}/{name}")
    assert error.hints == (f"steps run --resume {RUN}",)


def test_the_page_is_written_and_links_reports_and_artifacts(cli, workplace):
    assert cli("run", "toy/train", "-c", "tiny", "--name", "one", "judge.model='<b>x'").code == 0
    (folder,) = (workplace / "home" / "runs").iterdir()
    assert cli("index").out == "home/index.html\n"
    page = (workplace / "home" / "index.html").read_text()
    assert "toy/make/rows:v1" in page and "held out reward 0.25 → 0.75" in page
    assert "toy/train -c tiny" in page and "&lt;b&gt;x" in page and "<b>x" not in page
    links = [unquote(link) for link in re.findall('<a href="(.*?)"', page)]
    assert f"./runs/{folder.name}/report.html" in links and len(links) == 5  # the run, two artifacts with their maker
    assert all((workplace / "home" / link).exists() for link in links)
    made = cli("index", "--out", "pages/all.html", "--json").json
    assert made == {"index": "pages/all.html"} and (workplace / "pages" / "all.html").is_file()


def test_a_comparison_says_what_differs_and_which_runs_are_unlike(cli, workplace):
    for name, *asked in (("a", "toy/train", "-c", "tiny"), ("b", "toy_all", "make.count=5"), ("c", "toy/make")):
        assert cli("run", *asked, "--name", name).code == 0
    a_and_b = cli("report", "a", "b", "--json").json
    assert [run["name"] for run in a_and_b["runs"]] == ["a", "b"]
    assert a_and_b["requests"] == {
        "steps run": ["toy/train", "toy_all"],
        "-c": ["tiny", None],
        "make.count": [None, "5"],
    }
    assert a_and_b["configs"]["toy/make"] == {"count": [3, 5]}
    assert a_and_b["configs"]["toy/train"] == {"input rows": ["toy/make/rows:v1", "toy/make/rows:v2"]}
    assert a_and_b["results"]["toy/make"]["rows"][1]["difference"] == 2
    shown = cli("report", "a", "b", "c").out
    assert "toy/train: different held-out prompts (rows): their rewards are not comparable" in shown
    assert "different steps (a: toy/train; b: toy/make, toy/score, toy/train; c: toy/make)" in shown
