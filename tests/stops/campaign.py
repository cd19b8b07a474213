"""SIGINT and SIGTERM at random moments of a command: each ends it in time, as interrupted, and leaves nothing.

    python -m tests.stops.campaign [--stops 100] [--seed 0] [--only NAME]     the last line is JSON
    python -m tests.stops.campaign --kill [--stops 20]     SIGKILL, then every artifact compared with an unbroken run's

Each start of a run goes on in the home in which the one before was stopped, so that whether a stopped run can go on is
tried by the next; one that comes to its end gives way to a fresh copy of the home.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

STEPS = [sys.executable, "-c", "from nemotron_steps.cli.main import steps; raise SystemExit(steps())"]
"""As the console script does: `-m` imports more before."""
TOKEN = "STOP_CAMPAIGN"
WAYS = ("group", "parent")
"""Whom the signal reaches: every process of the group, as Ctrl-C does, or the one that was started alone."""
IN_TIME_S = 30.0
CACHES = ("torchinductor_",)
"""What torch keeps in TMPDIR for the next process."""


@dataclass(frozen=True)
class Case:
    """A command to stop, and about how long it takes alone."""

    words: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Stop:
    """What one signal came to."""

    command: str
    signal: str
    way: str
    after_s: float
    took_s: float
    code: int
    late: bool
    left: tuple[str, ...]
    said: str

    @property
    def outcome(self) -> str:
        """`interrupted`; `done`, in spite of the signal, or `over` before it; `before`: Python had not come to this
        program yet; or what is wrong."""
        if self.left:
            return f"left running: {self.left}"
        if self.took_s > IN_TIME_S:
            return f"took {self.took_s:.0f} s"
        if self.code in (1, -signal.Signals[self.signal]) and self.after_s < 1 and "in steps" not in self.said:
            return "before"
        if "Traceback" in self.said or "Exception ignored" in self.said:
            return "a traceback"
        if self.code == 0:
            return "over" if self.late else "done"
        if self.code == 130 and ("interrupted" in self.said or "ended by" in self.said):
            return "interrupted"
        return f"exit code {self.code}"

    @property
    def right(self) -> bool:
        return self.outcome in ("interrupted", "done", "over", "before")


def stopped(case: Case, folder: Path, after: float, number: signal.Signals, way: str) -> Stop:
    """Start a command in `folder`, whose `home` it works in, send the signal after so many seconds, and wait."""
    token = f"{os.getpid()}-{time.monotonic_ns()}"
    scratch = Path(tempfile.mkdtemp(dir=folder))
    environment = os.environ | {TOKEN: token, "TMPDIR": str(scratch), "STEPS_HOME": str(folder / "home")}
    with (scratch / "said").open("w+b") as said:
        process = subprocess.Popen(
            [*STEPS, *case.words], cwd=folder, env=environment, stdout=said, stderr=said, start_new_session=True
        )
        late = False
        try:
            process.wait(after)
            late = True
        except subprocess.TimeoutExpired:
            (os.killpg if way == "group" else os.kill)(process.pid, number)
        sent = time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            process.wait(4 * IN_TIME_S)
        took = time.monotonic() - sent
        left = _left(token)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        code = process.wait()
        said.seek(0)
        text = said.read().decode(errors="replace")
    (scratch / "said").unlink()
    leavings = (*left.values(), *(path.name for path in scratch.iterdir() if not path.name.startswith(CACHES)))
    shutil.rmtree(scratch)
    return Stop(
        " ".join(case.words), number.name, way, round(after, 2), round(took, 2), code, late, leavings, text[-3000:]
    )


def _left(token: str) -> dict[int, str]:
    """Processes with the token in their environment, once those that are about to end have had two seconds."""
    until = time.monotonic() + 2
    while True:
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and f"{TOKEN}={token}".encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100]
            except OSError:
                continue
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.05)


def campaign(cases: Sequence[Case], template: Path, scratch: Path, stops: int, rng: random.Random) -> list[Stop]:
    """Stop each command in turn, `stops` times in all; says what went wrong as it happens."""
    found: list[Stop] = []
    folders: dict[Case, Path] = {}
    while len(found) < stops:
        case = cases[len(found) % len(cases)]
        if case not in folders:
            folders[case] = Path(tempfile.mkdtemp(dir=scratch))
            if template.is_dir():
                shutil.copytree(template, folders[case] / "home", symlinks=True)
        # Half of the moments are in the first second, where a command starts.
        longest = rng.choice((1.0, case.seconds))
        number = rng.choice((signal.SIGINT, signal.SIGTERM))
        stop = stopped(case, folders[case], rng.uniform(0, longest), number, rng.choice(WAYS))
        found.append(stop)
        print(f"{len(found):4} {stop.after_s:6.2f} s {stop.signal} {stop.way:6} {stop.outcome:14}", end=" ")
        print(f"in {stop.took_s:.2f} s: {stop.command}", flush=True)
        if not stop.right:
            print(stop.said, flush=True)
        if stop.code == 0:
            shutil.rmtree(folders.pop(case))
    return found


def killed(case: Case, scratch: Path, kills: int, rng: random.Random) -> dict[str, object]:
    """Kill a run at random moments, each time going on with the same command; what became of its artifacts."""
    unbroken = Path(tempfile.mkdtemp(dir=scratch))
    stopped(case, unbroken, 3600, signal.SIGKILL, "group")
    expected, same, done, folder = _digests(unbroken), list[bool](), 0, Path(tempfile.mkdtemp(dir=scratch))
    while done < kills or folder.is_dir():
        moment = rng.uniform(case.seconds / 15, case.seconds) if done < kills else 3600
        stop = stopped(case, folder, moment, signal.SIGKILL, "group")
        done += not stop.late
        if stop.code not in (0, -signal.SIGKILL):
            raise SystemExit(f"the run failed by itself after {done} kills: {stop.said}")
        if stop.code == 0:
            found = _digests(folder)
            same += [found.get(name) == digest for name, digest in expected.items()]
            shutil.rmtree(folder)
            if done < kills:
                folder.mkdir()
    return {"kills": done, "identical": sum(same), "artifacts": len(same)}


def _digests(folder: Path) -> dict[str, str]:
    """Name and version of every committed artifact → digest of its content."""
    listing = [*STEPS, "artifacts", "list", "--json", "--home", str(folder / "home")]
    rows = json.loads(subprocess.run(listing, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return {f"{row['name']}:v{row['version']}": row["digest"] for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stops", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--home", type=Path, help="home in which the tiny chain of RLVR is done; made when missing")
    parser.add_argument("--only", default="", help="commands that begin so")
    parser.add_argument("--kill", action="store_true", help="SIGKILL, of the tiny chain of RLHF or what --only names")
    arguments = parser.parse_args()
    rl = ("run", "rl/nemo_rl/rlvr", "-c", "tiny")
    cases = [
        Case((*rl, "grpo.max_num_steps=6"), 8),
        Case((*rl, "--home", "fresh"), 20),
        Case(("run", "data_prep/rl_prep", "-c", "tiny"), 2.5),
        Case(("plan", *rl[1:]), 0.8),
        Case((*rl, "-d"), 0.8),
        Case(("doctor",), 6),
        Case(("report", "latest"), 0.5),
        Case(("watch", "latest"), 2),
        Case(("env", "list"), 0.5),
        Case(("artifacts", "list"), 0.3),
    ]
    cases = [case for case in cases if " ".join(case.words).startswith(arguments.only)]
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.kill:
            chain = cases[0] if arguments.only else Case(("run", "rl/nemo_rl/rlhf", "-c", "tiny"), 30)
            print(json.dumps(killed(chain, Path(scratch), arguments.stops, random.Random(arguments.seed))))
            return
        home = arguments.home or Path(scratch, "home")
        if not home.is_dir():
            subprocess.run([*STEPS, *rl, "--home", str(home)], check=True, stdout=subprocess.DEVNULL)
        stops = campaign(cases, home, Path(scratch), arguments.stops, random.Random(arguments.seed))
    outcomes = Counter(stop.outcome if stop.right else "wrong" for stop in stops)
    worst = max(stops, key=lambda stop: stop.took_s)
    before = max((stop.after_s for stop in stops if stop.outcome == "before"), default=0.0)
    print(json.dumps({"stops": len(stops), **outcomes, "last_before_s": before, "worst": asdict(worst) | {"said": ""}}))
    sys.exit(not all(stop.right for stop in stops))


if __name__ == "__main__":
    main()
