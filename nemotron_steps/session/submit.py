"""A run under a profile whose executor works elsewhere: plan it here, and hand it over.

The job runs `steps run --resume RUN`; what was asked, and what of it is forced, is read from the run folder there, so
that nothing of it has to be spelled again in a script, and a job that is begun again goes on. JOB_VARIABLE tells that
command that it is the job and works here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from nemotron_steps.config.secrets import MASK, looks_random, mask
from nemotron_steps.errors import InterruptedRunError, RequestError
from nemotron_steps.session.run import plan_run
from nemotron_steps.session.run_request import RunRequest
from nemotron_steps.session.session import Session

if TYPE_CHECKING:
    from nemotron_steps.artifacts.store import ArtifactStore
    from nemotron_steps.config.profiles import Profile
    from nemotron_steps.resolver.plan import Plan, PlannedStep
    from nemotron_steps.runs.executors.base import Launch
    from nemotron_steps.runs.run_folder import RunInfo

JOB_VARIABLE = "STEPS_JOB"
_OF_A_LOGIN = frozenset({"HOME", "HOSTNAME", "LOGNAME", "PATH", "PWD", "SHELL", "TMPDIR", "USER"})
_OF_AN_IMAGE = frozenset(
    {"bin", "boot", "dev", "etc", "lib", "lib64", "opt", "proc", "run", "sbin", "sys", "usr", "var"}
)
"""Folders of `/` that an image has of its own: a file there that a config names is the container's."""


def inside_job(run_id: str | None) -> bool:
    """Whether this process is the job that an executor started for a run."""
    return run_id is not None and os.environ.get(JOB_VARIABLE) == run_id


def submit(
    session: Session,
    request: RunRequest,
    profile: Profile,
    *,
    force: bool,
    resume: str | None,
    attached: bool,
    force_squash: bool = False,
    accept: Sequence[str] = (),
    show: Callable[[Plan, Profile], None] = lambda plan, profile: None,
) -> tuple[RunInfo, Profile]:
    """Plan a request and hand it to the profile's executor; see `plan_run`. RequestError if it holds a secret.

    `attached`: somebody follows it; `show` is called with the plan and the profile before it is handed over, and may
    raise. Returns the run, and the profile with the image, the nodes and the GPUs of its steps."""
    from nemotron_steps.runs.launch import submit as hand_over
    from nemotron_steps.runs.prerequisites import refuse_unimplemented
    from nemotron_steps.runs.run_folder import RunFolder, get_run, new_run_id

    plan = plan_run(session, request, force=force, resume=resume, accept=accept)
    refuse_unimplemented(plan)
    profile = session.job_profile(request, plan) or profile
    redacted = request.taking(plan.taken).redacted()
    if MASK in redacted.command:
        hints = ("set it as an environment variable here, or under env_vars of the profile",)
        what = "a secret on the command line would end up in the job's files"
        raise RequestError(what, found=redacted.command, hints=hints)
    show(plan, profile)
    run_id = get_run(session.store, resume).id if resume else new_run_id(plan.name or plan.goals[-1])
    launch = checked_launch(session, request, plan, profile, run_id, attached=attached, force_squash=force_squash)
    if not resume:
        RunFolder(session.store, run_id).create(plan.name, redacted.to_dict(), executor=profile.executor)
    info = hand_over(
        session.store,
        profile,
        run_id=run_id,
        environment=launch.environment,
        request=redacted.to_dict(),
        forced=plan.goals if force else (),
        paths=launch.paths,
        attached=attached,
        force_squash=force_squash,
    )
    return info, profile


def job_size(session: Session, request: RunRequest, plan: Plan, profile: Profile | None) -> dict[str, Any]:
    """What a plan's job takes of a cluster: nodes, gpus_per_node, hours, gpu_hours (None where they are unknown), and
    `text`, a line that says so; "" for a job without GPUs, on this machine, or with nothing to do."""
    steps = [step for step in plan if step.cached is None and not step.earlier]
    if profile is None or profile.on_this_machine or not profile.gpus_per_node or not steps:
        return {"text": "", "gpu_hours": None}
    nodes, gpus, hours = profile.nodes, profile.gpus_per_node, profile.hours
    size = f"{nodes} node{'s' * (nodes > 1)} × {gpus} GPU{'s' * (gpus > 1)}"
    how, by = "up to", ""
    if hours is None:
        before = [_seconds_before(session, step) for step in steps]
        hours = None if None in before else sum(each[0] for each in before if each) / 3600
        how, by = "about", ", as in " + ", ".join(dict.fromkeys(each[1] for each in before[-2:] if each))
    if hours is None:
        settable = f": set time in [{request.profile}]" if "time" in type(profile).model_fields else ""
        total, text = None, f"{size}, hours unknown{settable}"
    else:
        total = hours * nodes * gpus
        shown = [f"{n:,.0f}" if n >= 100 else f"{n:.3g}" if n >= 0.1 else "under 0.1" for n in (hours, total)]
        text = f"{how} {size} × {shown[0]} h = {shown[1]} GPU-hours{by}"
    return {"nodes": nodes, "gpus_per_node": gpus, "hours": hours, "gpu_hours": total, "text": text}


def _seconds_before(session: Session, step: PlannedStep) -> tuple[float, str] | None:
    """How long a step would take by the newest run of it under its config: seconds a training step × steps."""
    import yaml

    from nemotron_steps.config.locations import read_json
    from nemotron_steps.runs.report.follow import training_steps
    from nemotron_steps.runs.run_folder import list_runs, read_events

    now = training_steps(step.config)
    for run in reversed(list_runs(session.store)):
        ran = {key: each.get("seconds") for key, each in run.steps.items() if each["state"] == "ran"}
        folder = session.store.backend.local(f"runs/{run.id}")
        planned = read_json(folder / "plan.json") if ran else None
        for each in planned["steps"] if isinstance(planned, dict) else ():
            key = each["key"]
            if key not in ran or (each["step"], each["config"]) != (step.step_id, step.config_name):
                continue
            times: dict[int, float] = {}
            for record in read_events(session.store, run.id, "metrics"):
                if record.get("step") == key:
                    times.setdefault(record["index"], record["time"])
            gaps = [(times[b] - times[a]) / (b - a) for a, b in pairwise(sorted(times))]
            if now is None or not gaps:
                return float(ran[key] or 0.0), run.id
            then = training_steps(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))[key])
            ended_early = max(times) < (then or 0)  # its data were used up
            return median(gaps) * (min(now, max(times)) if ended_early else now), run.id
    return None


def follow_attached(store: ArtifactStore, info: RunInfo, write: Callable[[str], None]) -> RunInfo:
    """Write a submitted run's log until it is over; Ctrl-C cancels the job. See `runs.launch.follow`."""
    from nemotron_steps.runs.launch import cancel, follow

    try:
        return follow(store, info.id, write)
    except KeyboardInterrupt:
        cancel(store, info)
        hints = (f"steps status {info.id}", f"steps run --resume {info.id}")
        what = "interrupted: the job was asked to stop; what it committed stays"
        raise InterruptedRunError(what, where=f"run {info.id}", hints=hints) from None


def checked_launch(
    session: Session,
    request: RunRequest,
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
    # The job plans again, and the same: it gets the variables that the plan's configs take values from, but those that
    # the profile sets itself, those of a login, and secrets, which no job's files may hold.
    read = set[str]().union(*(planned.variables for planned in plan)) - _OF_A_LOGIN - profile.env_vars.keys()
    given = {name: os.environ[name] for name in sorted(read)}
    secret = {name for name, value in given.items() if looks_random(value) or mask(name, value, {}) != value}
    variables = {name: value for name, value in given.items() if name not in secret}
    launch = Launch(
        run_id,
        session.store.backend.scratch / "runs" / run_id,
        ("--resume", run_id, "--home", session.store.backend.url),
        profile,
        Path.cwd(),
        {**variables, **profiles, JOB_VARIABLE: run_id},
        _paths(plan, request),
        attached,
        force_squash,
    )
    try:
        getattr(find_executor(profile.executor), "check", lambda launch: None)(launch)
    except RequestError as error:
        lines, name = load_environment().lines, request.profile or ""
        error.where = lines.get((name, error.where or "")) or lines.get((name, ""), error.where)
        raise
    return launch


def _paths(plan: Plan, request: RunRequest) -> tuple[Path, ...]:
    """What a request, its plan's inputs and configs name of this machine's files: a container has to see it."""
    from nemotron_steps.manifest.packs import PATH_VARIABLE
    from nemotron_steps.resolver.plan import SuppliedInput

    inputs = {source.ref for step in plan for source in step.inputs.values() if isinstance(source, SuppliedInput)}
    inputs |= {request.config or "", *request.targets, *os.environ.get(PATH_VARIABLE, "").split(os.pathsep)} - {""}
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
