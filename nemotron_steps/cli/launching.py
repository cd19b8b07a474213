"""`steps run -r PROFILE` and `-b PROFILE` under an executor other than this machine: submit, and follow if attached.

The job runs `steps run --resume RUN`; what was asked, and what of it is forced, is read from the run folder there, so
that nothing of it has to be spelled again in a script, and a job that is begun again goes on. JOB_VARIABLE tells that
command that it is the job and works here.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.cli.errors import print_json
from nemotron_steps.cli.planning import show_needs, show_plan, with_cached
from nemotron_steps.cli.terminal import Terminal, printable
from nemotron_steps.config.secrets import MASK, looks_random, mask
from nemotron_steps.errors import InterruptedRunError, RequestError
from nemotron_steps.session.run_request import RunRequest
from nemotron_steps.session.session import Session

if TYPE_CHECKING:
    import argparse

    from nemotron_steps.artifacts.store import ArtifactStore
    from nemotron_steps.config.profiles import Profile
    from nemotron_steps.resolver.plan import Plan
    from nemotron_steps.runs.executors.base import Launch
    from nemotron_steps.runs.run_folder import RunInfo

JOB_VARIABLE = "STEPS_JOB"
_OF_A_LOGIN = frozenset({"HOME", "HOSTNAME", "LOGNAME", "PATH", "PWD", "SHELL", "TMPDIR", "USER"})


def inside_job(run_id: str | None) -> bool:
    """Whether this process is the job that an executor started for a run."""
    return run_id is not None and os.environ.get(JOB_VARIABLE) == run_id


def launch(arguments: argparse.Namespace, bench: Session, asked: RunRequest, profile: Profile) -> int:
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
    if arguments.batch is None:
        info = follow_attached(bench.store, info, quiet=arguments.as_json)
    if arguments.as_json:
        job = {"run": info.id, "executor": info.executor, "job": info.job}
        print_json(info.to_dict() if arguments.batch is None else job)
        return 0
    terminal.print()
    next_commands = (
        ("logs {} -f", "status {}", "cancel {}") if arguments.batch is not None else ("status {}", "report {}")
    )
    for command in next_commands:
        terminal.print(f"  {terminal.style('steps ' + command.format(info.id), 'cyan')}")
    return 0


def submit_asked(
    bench: Session,
    asked: RunRequest,
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
    profile = bench.job_profile(asked, plan) or profile
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
    run_id = get_run(bench.store, resume).id if resume else new_run_id(plan.name or plan.goals[-1])
    launch = checked_launch(bench, asked, plan, profile, run_id, attached=attached, force_squash=force_squash)
    if not resume:
        RunFolder(bench.store, run_id).create(plan.name, redacted.to_dict(), executor=profile.executor)
    info = submit(
        bench.store,
        profile,
        run_id=run_id,
        environment=launch.environment,
        request=redacted.to_dict(),
        forced=plan.goals if force else (),
        paths=launch.paths,
        attached=attached,
        force_squash=force_squash,
    )
    if terminal is not None:
        gpus = f", GPUs per node: {profile.gpus_per_node}" if profile.gpus_per_node else ""
        image = getattr(profile, "container_image", None)
        size = f"{profile.nodes} node{'s' if profile.nodes > 1 else ''}{gpus}{f', image {image}' if image else ''}"
        job = f"{info.executor} job {info.job}: {size}"
        terminal.print(f"submitted as {terminal.style(info.id, 'bold')} ({printable(job)})")
    return info


def checked_launch(
    bench: Session,
    asked: RunRequest,
    plan: Plan,
    profile: Profile,
    run_id: str,
    *,
    attached: bool = False,
    force_squash: bool = False,
) -> Launch:
    """A job as submitted. RequestError, at the profile's line, for what its executor would refuse of it."""
    from nemotron_steps.config.locations import ENVIRONMENT_VARIABLE, environment_files
    from nemotron_steps.config.profiles import load_environment
    from nemotron_steps.runs.executors.base import Launch, find_executor

    # The job may see this directory's env.toml under this path alone.
    file = environment_files()[0]
    profiles = {ENVIRONMENT_VARIABLE: str(file.absolute())} if file.is_file() else {}
    launch = Launch(
        run_id,
        bench.store.backend.scratch / "runs" / run_id,
        ("--resume", run_id, "--home", bench.store.backend.url),
        profile,
        Path.cwd(),
        {**_variables_read(plan, profile), **profiles, JOB_VARIABLE: run_id},
        _paths(plan, asked),
        attached,
        force_squash,
    )
    try:
        getattr(find_executor(profile.executor), "check", lambda launch: None)(launch)
    except RequestError as error:
        lines, name = load_environment().lines, asked.profile or ""
        error.where = lines.get((name, error.where or "")) or lines.get((name, ""), error.where)
        raise
    return launch


def _variables_read(plan: Plan, profile: Profile) -> dict[str, str]:
    """The variables of this process that the plan's configs take values from: the job plans again, and the same.

    Without those that the profile sets itself, what describes a login rather than a run, and secrets, which no job's
    files may hold.
    """
    read = set[str]().union(*(planned.variables for planned in plan)) - _OF_A_LOGIN - profile.env_vars.keys()
    given = {name: os.environ[name] for name in sorted(read)}
    secret = {name for name, value in given.items() if looks_random(value) or mask(name, value, {}) != value}
    return {name: value for name, value in given.items() if name not in secret}


_OF_AN_IMAGE = frozenset(
    {"bin", "boot", "dev", "etc", "lib", "lib64", "opt", "proc", "run", "sbin", "sys", "usr", "var"}
)
"""Folders of `/` that an image has of its own: a file there that a config names is the container's."""


def _paths(plan: Plan, asked: RunRequest) -> tuple[Path, ...]:
    """What a request, its plan's inputs and configs name of this machine's files: a container has to see it."""
    from nemotron_steps.manifest.packs import PATH_VARIABLE
    from nemotron_steps.resolver.plan import SuppliedInput

    inputs = {source.ref for step in plan for source in step.inputs.values() if isinstance(source, SuppliedInput)}
    inputs |= {asked.config or "", *asked.targets, *os.environ.get(PATH_VARIABLE, "").split(os.pathsep)} - {""}
    named = {text for step in plan for text in _texts(step.config) if text.startswith(("/", "~/", "../"))}
    of_image = {text for text in named if Path(text).parts[1:2] and Path(text).parts[1] in _OF_AN_IMAGE}
    there = sorted({Path(os.path.abspath(os.path.expanduser(text))) for text in inputs | named - of_image})
    return tuple(path for path in there if path.exists() and path.name)


def _texts(node: Any) -> Iterator[str]:
    """Every text in plain values."""
    if isinstance(node, str):
        yield re.sub(r"(\.py):\w+$", r"\1", node)  # a function of a file
    elif isinstance(node, Mapping | list):
        for item in node.values() if isinstance(node, Mapping) else node:
            yield from _texts(item)


def follow_attached(store: ArtifactStore, info: RunInfo, *, quiet: bool) -> RunInfo:
    """Show a submitted run's log until it is over; Ctrl-C cancels the job. See `runs.launch.follow`."""
    from nemotron_steps.runs.launch import cancel, follow

    try:
        return follow(store, info.id, (lambda text: None) if quiet else write_log)
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
