"""`steps runs`, `logs`, `status`, `cancel`, `report`, `index`: what ran here, what it said, how it stands."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.cli.errors import print_json, render
from nemotron_steps.cli.run import show_values
from nemotron_steps.cli.terminal import Terminal, duration, number
from nemotron_steps.errors import RequestError, UnknownNameError, WorkerLostError
from nemotron_steps.runs.log_format import metric_text
from nemotron_steps.session.jobs import AT_WORK, JobView, not_started, printable, said, shown_path
from nemotron_steps.session.session import Session

if TYPE_CHECKING:
    import argparse

    from nemotron_steps.artifacts.store import ArtifactStore
    from nemotron_steps.runs.run_folder import RunInfo

_POLL_SECONDS = 0.25
_CANCEL_SECONDS = 20.0
_HEADLINES = {
    "reward": "reward/mean",
    "validation": "validation/reward",
    "held-out reward": "heldout/reward",
    "accuracy": "accuracy",
    "loss": "loss",
    "validation loss": "validation_loss",
    "kl": "kl_penalty",
}
COLORS = {
    **dict.fromkeys(("done", "ran", "cached", "reused"), "green"),
    **dict.fromkeys(("running", "submitted"), "cyan"),
    **dict.fromkeys(("interrupted", "killed"), "yellow"),
    "failed": "red",
}


def runs(args: argparse.Namespace) -> int:
    """`steps runs`."""
    from nemotron_steps.runs.run_folder import called, list_runs

    every = list_runs(Session(args.home).store)
    found = every[-args.limit :] if args.limit > 0 else every
    if args.as_json:
        return print_json([{**info.to_dict(), **info.listed()} for info in found])
    out = Terminal.of()
    if not found:
        out.print("no runs yet")
        out.print(f"  {out.style('hint:', 'cyan')} steps run rl/nemo_rl/rlhf -c tiny")
        return 0
    rows = []
    for info in found:
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(info.created))
        # A killed run could not write down when it ended.
        took = "" if info.status == "killed" else duration(max(info.updated - info.created, 0.0))
        notes = [out.style(text, "dim") for text in (began, took)]
        listed = info.listed()
        said = (metric_text(listed["metric"]), " ".join([info.name, *listed["overrides"]]))
        rows.append([called(info, every), _status(info.status, out), *notes, *map(printable, said)])
    out.table(rows)
    return 0


def status(args: argparse.Namespace) -> int:
    """`steps status RUN`."""
    from nemotron_steps.runs.launch import error_of
    from nemotron_steps.runs.run_folder import get_run, read_events

    store = Session(args.home).store
    view = JobView(store, args.run, *([say_on_stderr] if args.as_json else []))
    info = view.look()
    job = view.ask(info) if info.status in AT_WORK else None
    info = get_run(store, info.id)  # read after: it may have begun, or its job was cancelled
    metrics = {record["step"]: record for record in read_events(store, info.id, "metrics")}
    if args.as_json:
        latest = {step: {"index": record["index"], "values": record["values"]} for step, record in metrics.items()}
        return print_json({**info.to_dict(), "metrics": latest})
    out = Terminal.of()
    out.print(f"{out.style(info.id, 'bold')}  {_status(info.status, out)}  {printable(info.title)}")
    rows = []
    for key, step in info.steps.items():
        state = str(step.get("state", "pending"))
        note = headline(metrics[key]["values"]) if key in metrics else ""
        if key in metrics and state == "running":
            note = f"step {metrics[key]['index']}  {note}"
        if state == "running" and info.status == "killed":
            state = "killed"
        note = note or ", ".join(step.get("outputs", {}).values())
        seconds = duration(step["seconds"]) if step.get("seconds") is not None else ""
        rows.append([key, _status(state, out), out.style(seconds, "dim"), printable(note)])
    out.table(rows, indent=2)
    summaries = {r["step"]: r["values"] for r in read_events(store, info.id) if r.get("kind") == "summary"}
    for key, values in summaries.items():
        out.print(f"\n  {out.style(key, 'bold')}")
        show_values(values, out)
    for line in job_lines(view, info, out):
        out.print(line)
    failure = error_of(info)
    if failure is not None:
        out.print()
        render(failure, out)
    if info.status == "submitted" and job is not None and job.state.over:
        raise not_started(store, info)
    out.print()
    for hint in advice(info, has_metrics=bool(metrics)):
        out.print(f"  {out.style(hint, 'cyan')}")
    return 0


def headline(values: Mapping[str, Any]) -> str:
    """The few numbers worth showing of a step's metrics: `reward 0.61  loss 0.02  kl 0.0031`."""
    numbers = {label: values.get(name) for label, name in _HEADLINES.items()}
    shown = {label: value for label, value in numbers.items() if isinstance(value, int | float)}
    if shown.get("kl") == 0:
        del shown["kl"]
    return "  ".join(f"{label} {number(value)}" for label, value in shown.items())


def job_lines(view: JobView, info: RunInfo, out: Terminal) -> Iterator[str]:
    """What there is to say of a run's job beside what the run says itself."""
    if view.job is not None and info.status in AT_WORK:
        yield f"  {printable(info.executor)} job {printable(info.job)}: {printable(said(view.job))}"
    for text in view.missing():
        yield f"  {out.style('▲', 'yellow')} {printable(text)}"


def say_on_stderr(text: str) -> None:
    """What is missing of a run that works elsewhere."""
    out = Terminal.of(sys.stderr)
    out.print(f"{out.style('▲', 'yellow')} {printable(text)}")


def logs(args: argparse.Namespace) -> int:
    """`steps logs RUN [-f] [--json]`: the log's lines, or the records of events and metrics in the order of time."""
    from nemotron_steps.runs.launch import error_of
    from nemotron_steps.runs.report.follow import Tail
    from nemotron_steps.runs.run_folder import run_file

    store = Session(args.home).store
    view = JobView(store, args.run, say_on_stderr)
    info = view.look()
    folder = store.backend.scratch / "runs" / info.id
    first, *others = ("events.jsonl", "metrics.jsonl") if args.as_json else ("log.txt",)
    refused = error_of(info)
    if refused is not None and info.attempts == 0 and not (folder / first).is_file():
        raise refused  # the run never began: why is all there is to say
    tails = [Tail(folder / name) for name in (first, *others)]
    if not args.follow:
        run_file(store, info.id, first)
        _bring(store, info.id, *others)
        _write([line for tail in tails for line in tail.rest()], as_json=args.as_json)
        return 0
    try:
        while True:
            info, lines = view.now(info), list[bytes]()
            while new := [line for tail in tails for line in tail.new()]:  # until none has more: all up to one moment
                lines += new
            _write(lines, as_json=args.as_json)
            if info.status not in AT_WORK:
                return 0
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        return 130


def _write(lines: Sequence[bytes], *, as_json: bool) -> None:
    from nemotron_steps.runs.run_folder import parse_lines

    if as_json:
        records = sorted(parse_lines(lines), key=lambda record: float(record["time"]))
        texts = [json.dumps(record, ensure_ascii=False) for record in records]
    else:
        texts = [printable(line.decode("utf-8", "replace")) for line in lines]
    sys.stdout.write("".join(f"{text}\n" for text in texts))
    sys.stdout.flush()


def _bring(store: ArtifactStore, run: str, *names: str) -> None:
    from nemotron_steps.runs.run_folder import run_file

    for name in names:
        with suppress(UnknownNameError):  # a run that ended early may not have it
            run_file(store, run, name)


def cancel(args: argparse.Namespace) -> int:
    """`steps cancel RUN`: ask the run's process to stop, and wait until it has; or its job, which stops later."""
    from nemotron_steps.runs.launch import cancel as cancel_job
    from nemotron_steps.runs.run_folder import get_run

    store = Session(args.home).store
    info = get_run(store, args.run)
    look = f"steps status {info.id}"
    if info.status not in AT_WORK:
        raise RequestError(f"run '{info.id}' is not running", found=info.status, hints=(look,))
    is_here = info.host == socket.gethostname()
    if info.job:
        cancel_job(store, info)
    elif not is_here:
        raise RequestError(
            f"run '{info.id}' works on another machine", found=info.host, hints=(f"run `steps cancel` on {info.host}",)
        )
    elif info.pid <= 1:
        # 0 and 1 are not processes of a run, and 0 would be this command and its shell.
        raise RequestError(f"no process works on run '{info.id}'", hints=(look,))
    else:
        os.kill(info.pid, signal.SIGTERM)
    waits = not info.job or (info.status == "running" and is_here)
    deadline = time.monotonic() + _CANCEL_SECONDS
    while waits and get_run(store, info.id).status == "running":
        if time.monotonic() > deadline:
            raise WorkerLostError(
                f"run '{info.id}' was asked to stop and still runs",
                where=f"process {info.pid} on {info.host}",
                hints=(look, f"steps cancel {info.id}"),
            )
        time.sleep(_POLL_SECONDS)
    if args.as_json:
        return print_json(get_run(store, info.id).to_dict())
    out = Terminal.of()
    done = f"stopped {out.style(info.id, 'bold')}"
    asked = f"{info.executor} job {printable(info.job)} was asked to stop"
    out.print(f"{done if waits else asked}; what it committed stays")
    for hint in (*(() if waits else (look,)), f"steps run --resume {info.id}"):
        out.print(f"  {out.style(hint, 'cyan')}")
    return 0


def report(args: argparse.Namespace) -> int:
    """`steps report RUN`: write report.html anew from what the run recorded; of several runs, a comparison."""
    from nemotron_steps.runs.report.page import write_comparison, write_report
    from nemotron_steps.runs.run_folder import run_file

    store = Session(args.home).store
    folders = []
    for run in (args.run, *args.others):
        info = JobView(store, run, say_on_stderr).look()
        folders.append(run_file(store, info.id, "run.json").parent)
        _bring(store, info.id, "events.jsonl", "metrics.jsonl", "samples.jsonl", "plan.json", "config.yaml")
    path, found = write_comparison(folders, store) if args.others else (write_report(folders[0], store), {})
    if args.as_json:
        return print_json({"run": folders[0].name, "report": str(path), **found})
    out = Terminal.of()
    for text in found.get("unlike", ()):
        out.print(f"{out.style('▲', 'yellow')} {printable(text)}")
    out.print(shown_path(path))
    return 0


def index(args: argparse.Namespace) -> int:
    """`steps index [--out FILE]`: write the page of every run and artifact and say where it is."""
    from nemotron_steps.runs.report.page import write_index

    store = Session(args.home).store
    path = store.backend.scratch / "index.html" if args.out is None else Path(args.out).expanduser()
    try:
        write_index(store, path)
    except OSError as error:  # a folder, below a file, not ours
        what, found = "the page cannot be written", error.strerror
        raise RequestError(what, where=str(path), found=found, hints=("steps index --out FILE",)) from error
    if args.as_json:
        return print_json({"index": str(path)})
    Terminal.of().print(shown_path(path))
    return 0


def _status(text: str, out: Terminal) -> str:
    return out.style(text, COLORS.get(text, "dim"))


def advice(info: RunInfo, *, has_metrics: bool) -> tuple[str, ...]:
    """Commands that come next for a run."""
    if info.status in AT_WORK:
        return (f"steps watch {info.id}", f"steps logs {info.id} -f", f"steps cancel {info.id}")
    if info.status == "done":
        return (f"steps report {info.id}",)
    ran = any(step.get("state") == "ran" for step in info.steps.values())
    # What was wrong with the request is still wrong: going on helps where something is there to go on from.
    wrong = info.error is not None and str(info.error.get("code", "")) < "E600"
    if wrong and not ran and not has_metrics:
        return (f"steps logs {info.id}",)
    return (f"steps run --resume {info.id}", f"steps logs {info.id}")
