"""`steps run -r PROFILE` and `-b PROFILE` under an executor other than this machine: submit, and follow if attached.

The job runs `steps run --resume RUN`; what was asked, and what of it is forced, is read from the run folder there, so
that nothing of it has to be spelled again in a script, and a job that is begun again goes on. JOB_VARIABLE tells that
command that it is the job and works here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nemotron_steps.cli.asked import Asked
from nemotron_steps.cli.errors import print_json
from nemotron_steps.cli.planning import show_needs, show_plan, with_cached
from nemotron_steps.cli.request import Workbench
from nemotron_steps.cli.terminal import Terminal, printable
from nemotron_steps.config.redaction import MASK, mask
from nemotron_steps.config.secret_shapes import looks_random
from nemotron_steps.errors import InterruptedRunError, RequestError

if TYPE_CHECKING:
    import argparse

    from nemotron_steps.artifacts.store import ArtifactStore
    from nemotron_steps.config.profiles import Profile
    from nemotron_steps.resolver.plan import Plan
    from nemotron_steps.runs.run_folder import RunInfo

JOB_VARIABLE = "STEPS_JOB"
_OF_A_LOGIN = frozenset({"HOME", "HOSTNAME", "LOGNAME", "PATH", "PWD", "SHELL", "TMPDIR", "USER"})


def inside_job(run_id: str | None) -> bool:
    """Whether this process is the job that an executor started for a run."""
    return run_id is not None and os.environ.get(JOB_VARIABLE) == run_id


def launch(arguments: argparse.Namespace, bench: Workbench, asked: Asked, profile: Profile) -> int:
    """Submit the run; with `-r` follow its log to the end, with `-b` return at once."""
    terminal = Terminal.of()
    info = submit_asked(
        bench,
        asked,
        profile,
        force=arguments.force,
        resume=arguments.resume,
        attached=arguments.batch is None,
        force_squash=arguments.force_squash,
        accept=arguments.accept,
        terminal=None if arguments.as_json else terminal,
    )
    if arguments.batch is not None:
        return _submitted(arguments, info, terminal)
    return _followed(arguments, bench, info, terminal)


def submit_asked(
    bench: Workbench,
    asked: Asked,
    profile: Profile,
    *,
    force: bool,
    resume: str | None,
    attached: bool,
    force_squash: bool = False,
    accept: Sequence[str] = (),
    terminal: Terminal | None = None,
) -> RunInfo:
    """Plan a request and hand it to the profile's executor.

    Args:
        resume: the id of an earlier run, or `latest`: its folder is continued.
        attached: somebody follows it.
        accept: see `with_cached`.
        terminal: where the plan and the job are shown; None shows nothing.

    Raises:
        PlanError: nothing was submitted.
        RequestError: what was asked for holds a secret.
    """
    from nemotron_steps.runs.launch import submit
    from nemotron_steps.runs.prerequisites import refuse_unimplemented
    from nemotron_steps.runs.run_folder import RunFolder, get_run, new_run_id

    plan = with_cached(bench, bench.plan(asked), force=force, resume=resume, accept=accept)
    refuse_unimplemented(plan)
    redacted = asked.taking(plan.taken).redacted()
    if MASK in redacted.command:
        raise RequestError(
            "a secret on the command line would end up in the job's files",
            found=redacted.command,
            hints=("set it as an environment variable here, or under env_vars of the profile",),
        )
    if terminal is not None:
        show_plan(plan, terminal, asked)
        show_needs(plan, terminal, asked)
        terminal.print()
    if resume:
        run_id = get_run(bench.store, resume).id
    else:
        run_id = new_run_id(plan.name or plan.goals[-1])
        RunFolder(bench.store, run_id).create(plan.name, redacted.to_dict(), executor=profile.executor)
    info = submit(
        bench.store,
        profile,
        run_id=run_id,
        environment={**_variables_read(plan, profile), **_profiles_file(), JOB_VARIABLE: run_id},
        request=redacted.to_dict(),
        forced=plan.goals if force else (),
        attached=attached,
        force_squash=force_squash,
    )
    if terminal is not None:
        job = f"{info.executor} job {info.job}"
        terminal.print(f"submitted as {terminal.style(info.id, 'bold')} ({printable(job)})")
    return info


def _variables_read(plan: Plan, profile: Profile) -> dict[str, str]:
    """The variables of this process that the plan's configs take values from: the job plans again, and the same.

    Without those that the profile sets itself, what describes a login rather than a run, and secrets, which no job's
    files may hold.
    """
    read = set[str]().union(*(planned.variables for planned in plan)) - _OF_A_LOGIN - profile.env_vars.keys()
    given = {name: os.environ[name] for name in sorted(read)}
    secret = {name for name, value in given.items() if looks_random(value) or mask(name, value, {}) != value}
    return {name: value for name, value in given.items() if name not in secret}


def _profiles_file() -> dict[str, str]:
    """The variable that names this directory's env.toml to the job, which may see it under this path alone."""
    from nemotron_steps.config.locations import ENVIRONMENT_VARIABLE, environment_files

    file = environment_files()[0]
    return {ENVIRONMENT_VARIABLE: str(file.absolute())} if file.is_file() else {}


def _submitted(arguments: argparse.Namespace, info: RunInfo, terminal: Terminal) -> int:
    if arguments.as_json:
        print_json({"run": info.id, "executor": info.executor, "job": info.job})
        return 0
    for hint in (f"steps logs {info.id} -f", f"steps status {info.id}", f"steps cancel {info.id}"):
        terminal.print(f"  {terminal.style(hint, 'cyan')}")
    return 0


def _followed(arguments: argparse.Namespace, bench: Workbench, info: RunInfo, terminal: Terminal) -> int:
    info = follow_attached(bench.store, info, quiet=arguments.as_json)
    if arguments.as_json:
        print_json(info.to_dict())
        return 0
    terminal.print()
    for hint in (f"steps status {info.id}", f"steps report {info.id}"):
        terminal.print(f"  {terminal.style(hint, 'cyan')}")
    return 0


def follow_attached(store: ArtifactStore, info: RunInfo, *, quiet: bool) -> RunInfo:
    """Show a submitted run's log until it is over; Ctrl-C cancels the job. See `runs.launch.follow`."""
    from nemotron_steps.runs.launch import cancel, follow

    try:
        return follow(store, info.id, ignore_log if quiet else write_log)
    except KeyboardInterrupt:
        cancel(store, info)
        raise InterruptedRunError(
            "interrupted: the job was asked to stop; what it committed stays",
            where=f"run {info.id}",
            hints=(f"steps status {info.id}", f"steps run --resume {info.id}"),
        ) from None


def write_log(text: str) -> None:
    """A part of a job's log, to stdout, without what would steer the terminal."""
    sys.stdout.write("".join(printable(line) + "\n" for line in text.splitlines()))
    sys.stdout.flush()


def ignore_log(text: str) -> None:
    """A part of a job's log, where nobody wants to see it."""
