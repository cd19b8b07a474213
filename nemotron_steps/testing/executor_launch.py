"""Checks of how an executor starts a job: its words, variables and folders, what it prints, and what stays secret."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from nemotron_steps.errors import StepsError
from nemotron_steps.runs.executors.base import JobState
from nemotron_steps.testing.executor_subject import OF_THE_JOB, SECRET, ExecutorSubject, bytes_of
from nemotron_steps.testing.suite import Suite, Unmet
from nemotron_steps.testing.watching import process_state, stdout_seen

_AWKWARD = (
    "two words",
    'a"b',
    "it's",
    "$HOME",
    "`id`",
    "a;b",
    "a\\b",
    "*",
    "",
    "{x}",
    "\u00e9\u6f22",
    "line\nbreak",
    "-n",
)

LAUNCH_SUITE: Suite[ExecutorSubject] = Suite()


@LAUNCH_SUITE.check("is_registered")
def a_job_runs(subject: ExecutorSubject) -> None:
    """A job begins, and is over."""
    launch = subject.launch("run")
    job = subject.submitted(launch)
    subject.told(launch)
    state = subject.over(job).state
    if state not in (JobState.DONE, JobState.LOST):
        raise Unmet("a job that ended well is told as something else", found=state)


@LAUNCH_SUITE.check("a_job_runs")
def submitting_does_not_wait(subject: ExecutorSubject) -> None:
    """`submit` returns while the job works, whether somebody waits for the run (`-r`) or not (`-b`)."""
    for attached in (False, True):
        launch = replace(subject.launch("wait"), attached=attached)
        with ThreadPoolExecutor(1) as pool:
            submitted = pool.submit(subject.submitted, launch)
            in_time = subject.wait(submitted.done)
            (launch.folder / "go").touch()
        if not in_time:
            raise Unmet(
                f"submit waits for the job's end (attached={attached})", hint="start it, and return its name at once"
            )
        subject.over(submitted.result())


@LAUNCH_SUITE.check("a_job_runs")
def submitting_leaves_the_process_as_it_was(subject: ExecutorSubject) -> None:
    """Working directory, environment and signal handlers of who submits are as before."""
    before = process_state()
    subject.ran(subject.launch("run", environment={"KIT_LAUNCH": "a"}, env_vars={"KIT_PROFILE": "b"}))
    after = process_state()
    changed = [name for name in before if before[name] != after[name]]
    if changed:
        raise Unmet(f"submitting a job changes {', '.join(changed)} of the process", hint="hand it to the job alone")


@LAUNCH_SUITE.check("a_job_runs")
def it_prints_nothing(subject: ExecutorSubject) -> None:
    """Nothing goes to stdout, which belongs to `--json`; nor does what its commands print."""
    launch = subject.launch("wait")
    with stdout_seen() as printed:
        job = subject.submitted(launch)
        subject.told(launch)
        subject.executor.status(job)
        subject.executor.cancel(job)
    subject.over(job)
    if any(printed):
        raise Unmet("it prints to stdout", found=repr(printed[0][:200]), hint="logging, or capture_output=True")


@LAUNCH_SUITE.check("a_job_runs")
def words_arrive_as_they_are(subject: ExecutorSubject) -> None:
    """Spaces, quotes, `$`, line ends: no shell reads the command."""
    found = subject.ran(subject.launch("run", *_AWKWARD))["words"]
    if found != list(_AWKWARD):
        wrong = [(given, got) for given, got in zip(_AWKWARD, [*found, *[None] * 20], strict=False) if given != got]
        raise Unmet("a word of the command arrives as another", found=wrong[:2], hint="shlex.join, or a list")


@LAUNCH_SUITE.check("a_job_runs")
def variables_arrive(subject: ExecutorSubject) -> None:
    """The profile's env_vars and the launch's variables are set, as they are."""
    awkward = "a 'b' \"c\" $HOME;\\ \u00e9"
    launch = subject.launch("run", environment={"KIT_LAUNCH": awkward}, env_vars={"KIT_PROFILE": awkward})
    found = subject.ran(launch)["environment"]
    for name in ("KIT_LAUNCH", "KIT_PROFILE"):
        if found.get(name) != awkward:
            raise Unmet(f"the variable {name} arrives as something else", found=repr(found.get(name)))


@LAUNCH_SUITE.check("variables_arrive")
def the_launch_has_the_last_word(subject: ExecutorSubject) -> None:
    """A variable of the launch's stands in place of the profile's of that name."""
    launch = subject.launch("run", environment={"KIT_BOTH": "launch"}, env_vars={"KIT_BOTH": "profile"})
    found = subject.ran(launch)["environment"].get("KIT_BOTH")
    if found != "launch":
        raise Unmet("a variable has the profile's value, not the launch's", found=found, hint="launch.variables")


@LAUNCH_SUITE.check("a_job_runs")
def it_runs_where_it_was_asked(subject: ExecutorSubject) -> None:
    """The working directory is the launch's."""
    launch = subject.launch("run")
    found = subject.ran(launch)["cwd"]
    if os.path.realpath(found) != os.path.realpath(launch.working_dir):
        raise Unmet("the job works in another directory", found=found)


@LAUNCH_SUITE.check("a_job_runs")
def folders_have_any_name(subject: ExecutorSubject) -> None:
    """A home with spaces, quotes, `%` and letters beyond ASCII in its path is one like any other."""
    launch = subject.launch("run", suffix=" %j 'a' $b \u00e9")
    job = subject.submitted(launch)
    if not subject.wait((launch.folder / "told.json").is_file):
        raise Unmet("a job does not begin where its run's folder has an awkward name", found=launch.folder.name)
    subject.over(job)


@LAUNCH_SUITE.check("a_job_runs")
def it_writes_in_the_run_folder_only(subject: ExecutorSubject) -> None:
    """Scripts and logs of a job are in its run's folder, not where somebody happens to work."""
    launch = subject.launch("run")
    places = (Path.cwd(), launch.working_dir, launch.folder.parent)
    before = {place: set(place.iterdir()) for place in places}
    subject.ran(launch)
    for place in places:
        for path in sorted(set(place.iterdir()) - before[place]):
            raise Unmet("a job leaves a file outside of its run's folder", found=path, hint="launch.folder")


@LAUNCH_SUITE.check("a_job_runs")
def setup_lines_come_first(subject: ExecutorSubject) -> None:
    """The profile's setup_lines are run by a shell before the job."""
    launch = subject.launch("run", setup_lines=["export KIT_SETUP=done", "true"])
    if subject.ran(launch)["environment"].get("KIT_SETUP") != "done":
        raise Unmet("the profile's setup_lines are not run before the job")


@LAUNCH_SUITE.check("a_job_runs")
def it_waits_for_no_input(subject: ExecutorSubject) -> None:
    """A job's stdin is at its end: it does not wait for a terminal, nor take what is typed there."""
    launch = subject.launch("read")
    with _open_stdin():
        told = subject.ran(launch)
    if told["waits"]:
        raise Unmet("a job that reads its stdin waits", hint="stdin=subprocess.DEVNULL")


@LAUNCH_SUITE.check("a_job_runs")
def what_it_prints_is_kept(subject: ExecutorSubject) -> None:
    """stdout and stderr of a job are in its run's folder: all there is of one that dies before its log begins."""
    launch = subject.launch("run")
    job = subject.submitted(launch)
    pid = subject.told(launch)["pid"]
    subject.over(job)

    def missing() -> list[str]:
        return [name for name in ("out", "err") if f"kit {name} {pid}" not in subject.printed(job, launch)]

    if not subject.wait(lambda: not missing()):
        raise Unmet(f"std{missing()[0]} of a job is not in its run's folder", hint="launch.folder / 'console.txt'")


@LAUNCH_SUITE.check("a_job_runs")
def a_lot_of_output_does_no_harm(subject: ExecutorSubject) -> None:
    """A job that prints a megabyte that nobody reads goes on."""
    launch = subject.launch("print")
    job = subject.submitted(launch)
    subject.wait(lambda: (launch.folder / "told.json").is_file() or subject.executor.status(job).state.over)
    if not (launch.folder / "told.json").is_file():
        subject.end(job)
        raise Unmet("a job that prints a megabyte does not get to its end", hint="a file, not a pipe")
    subject.over(job)


@LAUNCH_SUITE.check("a_job_runs")
def a_run_can_be_submitted_again(subject: ExecutorSubject) -> None:
    """`--resume RUN`: the same run is another job, whatever the first one left."""
    launch = subject.launch("run")
    first = subject.submitted(launch)
    subject.told(launch)
    subject.over(first)
    (launch.folder / "told.json").unlink()
    second = subject.submitted(launch)
    subject.told(launch)
    subject.over(second)
    if first == second:
        raise Unmet("a run's second job has the name of its first", found=first, hint="a number for each submission")


@LAUNCH_SUITE.check("a_run_can_be_submitted_again", "what_it_prints_is_kept")
def output_of_attempts_adds_up(subject: ExecutorSubject) -> None:
    """What a run's first job printed is still there after its second."""
    launch, pids, job = subject.launch("run"), [], ""
    for _ in range(2):
        (launch.folder / "told.json").unlink(missing_ok=True)
        job = subject.submitted(launch)
        pids.append(subject.told(launch)["pid"])
        subject.over(job)
    if not subject.wait(lambda: f"kit out {pids[1]}" in subject.printed(job, launch)):
        raise Unmet("what a run's second job printed is not in its folder")
    if f"kit out {pids[0]}" not in subject.printed(job, launch):
        raise Unmet("a run's second job writes over what the first one printed", hint='open("ab")')


@LAUNCH_SUITE.check("variables_arrive")
def secrets_are_not_written_down(subject: ExecutorSubject) -> None:
    """A secret variable reaches the job, or is refused; it is in no file of the run and in no command line."""
    launch = subject.launch("wait", environment={"KIT_TOKEN": SECRET}, env_vars={"KIT_API_KEY": SECRET})
    try:
        job = subject.executor.submit(launch)
    except StepsError:
        return
    try:
        told = launch.folder / "told.json"
        environment = subject.told(launch)["environment"]
        told.unlink()  # the job's own word, not the executor's
        for name in ("KIT_API_KEY", "KIT_TOKEN"):
            if environment.get(name) != SECRET:
                raise Unmet("a secret variable neither arrives nor is refused", found=f"{name}={environment.get(name)}")
        _require_unwritten(launch.folder)
        if SECRET in job:
            raise Unmet("a secret variable is in the job's name")
        for line in Path("/proc").glob("[0-9]*/cmdline"):
            if SECRET.encode() in bytes_of(line):
                raise Unmet("a secret variable is in a command line, which every user of the machine sees")
    finally:
        subject.end(job)


@LAUNCH_SUITE.check("a_job_runs")
def what_cannot_start_is_told(subject: ExecutorSubject) -> None:
    """A working directory that is not there is an error with a code, or a job that is over."""
    launch = replace(subject.launch("run"), working_dir=subject.folder / "absent")
    try:
        job = subject.executor.submit(launch)
    except StepsError:
        return
    except Exception as error:
        raise Unmet(
            f"submitting raises {type(error).__name__}: {error}",
            hint="raise RequestError or UnsupportedError, with a hint to paste",
        ) from error
    subject.over(job)


@LAUNCH_SUITE.check("what_cannot_start_is_told")
def a_refusal_keeps_secrets(subject: ExecutorSubject) -> None:
    """An error that a submission ends with has no secret in it, for it is printed and kept; nor has a file."""
    launch = subject.launch("run", environment={"KIT_TOKEN": SECRET}, env_vars={"KIT_API_KEY": SECRET})
    launch = replace(launch, working_dir=subject.folder / "absent")
    try:
        subject.over(subject.executor.submit(launch))
    except StepsError as error:
        if SECRET in json.dumps(error.to_dict(), default=str):
            raise Unmet("the error of a refused submission shows a secret variable", found=error.code) from None
    _require_unwritten(launch.folder)


def _require_unwritten(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and path.name not in OF_THE_JOB and SECRET.encode() in path.read_bytes():
            raise Unmet("a secret variable is written down", where=str(path))


@contextmanager
def _open_stdin() -> Iterator[None]:
    """A stdin of this process on which somebody may type."""
    kept = os.dup(0)
    reading, writing = os.pipe()
    os.dup2(reading, 0)
    try:
        yield
    finally:
        os.dup2(kept, 0)
        for number in (kept, reading, writing):
            os.close(number)
