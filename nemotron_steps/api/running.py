"""`run`: what `steps run` does, with a result instead of an exit code."""

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import signature
from types import ModuleType
from typing import Any

from nemotron_steps.api.planned import Target, arguments_of, request_for, session_of, variables_of
from nemotron_steps.api.result import Result
from nemotron_steps.cli.run import show_job, show_result, show_to_submit, shown, write_log
from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.errors import RequestError
from nemotron_steps.session.run import request_of_run, run_here
from nemotron_steps.session.run_request import RunRequest
from nemotron_steps.session.session import Session
from nemotron_steps.session.submit import follow_attached, submit


@arguments_of(request_for)
def run(
    target: Target | None = None,
    *,
    home: str | os.PathLike[str] | None = None,
    force: bool = False,
    resume: str | None = None,
    wait: bool = True,
    progress: bool = True,
    **request: Any,
) -> Result:
    """Plan a request and run what of it is not already there: in this process, or where its profile says.

    Args:
        request: see `nemotron_steps.api.planned.request_for`.
        home: where artifacts and runs are; None for STEPS_HOME, or `.steps`.
        force: run the steps asked for even if they are cached.
        resume: the id or name of an earlier run, or `latest`: its folder is continued. Without a target it goes on with
            what that run was asked for, under its profile or the one given here.
        wait: False submits the run to the profile's executor and returns at once (`-b`); see `Result.wait`.
        progress: show the plan, the progress (a job's log) and the result, as the command line does.

    Raises:
        PlanError: the request does not type-check; nothing ran.
        StepsError: the first step that failed. What was committed stays: the same call goes on from there.
        InterruptedRunError: Ctrl-C, or the notebook's stop button; a job is cancelled. Pressed again, what is still
            unwinding is cut short, and this process goes on.
    """
    session = session_of(home)
    if target is not None:
        wanted = request_for(target, **request)
    elif resume is None:
        raise RequestError("name a step or a pipeline", hints=("run('rl/nemo_rl/rlvr')", "run(resume='latest')"))
    else:
        profile, ignored = request.pop("profile", None), request.pop("ignore_checks", ())
        known = [name for name, each in signature(request_for).parameters.items() if each.kind is each.KEYWORD_ONLY]
        # Another name is a key of the config where steps are named; without any, it is a mistake whatever its value.
        changed = {n: value for n, value in request.items() if n not in known or value not in (None, (), [], {})}
        if changed:
            raise RequestError(
                "resume alone goes on with what that run was asked for; name the steps to change it",
                found=", ".join(f"{name}={value!r}" for name, value in changed.items()),
                hints=(f"run('STEP', ..., resume={resume!r})",),
            )
        ignored = (ignored,) if isinstance(ignored, str) else tuple(ignored)
        wanted = request_of_run(session, resume, profile=profile, ignore_checks=ignored)
    return run_request(session, wanted, force=force, resume=resume, wait=wait, progress=progress)


def run_request(
    session: Session,
    request: RunRequest,
    *,
    force: bool,
    resume: str | None,
    wait: bool,
    progress: bool,
    name: str | None = None,
) -> Result:
    """Run a request; see `run`."""
    request = session.settled(replace(request, name=name or request.name), resume)
    profile = session.profile_of(request)
    terminal = Terminal.of() if progress else None
    if profile is None and not wait:
        raise RequestError(
            "a run without a profile works in this process, which has to wait for it",
            where="wait=False",
            expected="a profile of env.toml",
            hints=("run(..., profile='PROFILE', wait=False)", "wait=True"),
        )
    if profile is not None and not (wait and profile.runs_here):
        with outside_event_loop():
            with variables_of(profile):
                show = partial(show_to_submit, request, terminal) if terminal is not None else lambda plan: None
                info, profile = submit(session, request, profile, force=force, resume=resume, attached=wait, show=show)
            if terminal is not None:
                show_job(info, profile, terminal)
            if wait:
                follow_attached(session.store, info, write_log if progress else lambda text: None)
        return Result(session.store, info.id)
    with variables_of(profile), outside_event_loop(), without_main_module():
        display = partial(shown, request, terminal)
        result, plan = run_here(session, request, force=force, resume=resume, display=display, ends_process=False)
        if terminal is not None:
            show_result(result, plan, terminal)
    return Result(session.store, result.id)


@contextmanager
def without_main_module() -> Iterator[None]:
    """Processes that multiprocessing starts within do not import this program, which may be a script without
    `if __name__ == "__main__":`, and so do not run its steps again. They need nothing of it."""
    program = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program


@contextmanager
def outside_event_loop() -> Iterator[None]:
    """No event loop is running within, and the one before is again afterwards: a notebook's cell is a task of one, and
    steps run loops of their own (docs/decisions/runs-in-notebooks.md)."""
    loop = asyncio._get_running_loop()
    if loop is None:
        yield
        return
    task = asyncio.current_task()
    # asyncio documents these for schedulers and tasks of one's own (Extending).
    if task is not None:
        asyncio.tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        # A runner that ends leaves the thread without one.
        asyncio.set_event_loop(loop)
        asyncio._set_running_loop(loop)
        if task is not None:
            asyncio.tasks._enter_task(loop, task)
