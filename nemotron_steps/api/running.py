"""`run`: what `steps run` does, in this process, with a result instead of an exit code."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nemotron_steps.api.asking import Input, Overrides, Target, asked_for
from nemotron_steps.api.event_loop import outside_event_loop
from nemotron_steps.api.main_module import without_main_module
from nemotron_steps.api.planned import bench_of
from nemotron_steps.api.result import Result
from nemotron_steps.cli.request import Asked, Workbench
from nemotron_steps.cli.running import asked_before, run_here
from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.errors import RequestError, UnsupportedError


def run(
    target: Target | None = None,
    *,
    config: str | os.PathLike[str] | None = None,
    inputs: Mapping[str, Input] | None = None,
    overrides: Overrides = (),
    home: str | os.PathLike[str] | None = None,
    profile: str | None = None,
    first: str | None = None,
    until: str | None = None,
    force: bool = False,
    resume: str | None = None,
    progress: bool = True,
    **sections: Any,
) -> Result:
    """Plan a request and run what of it is not already there, in this process.

    Args:
        target: see `plan`, as the others; None with `resume`: what that run was asked for.
        profile: of env.toml, with the executor `local`.
        force: run the steps asked for even if they are cached.
        resume: the id of an earlier run, or `latest`: its folder is continued.
        progress: show the plan, the progress and the result, as the command line does.

    Raises:
        PlanError: the request does not type-check; nothing ran.
        StepsError: the first step that failed. What was committed stays: the same call goes on from there.
        InterruptedRunError: Ctrl-C, or the notebook's stop button. Pressed again, what is still unwinding is cut short,
            and this process goes on.
    """
    bench = bench_of(home)
    if target is not None:
        asked = asked_for(
            target,
            config=config,
            inputs=inputs,
            overrides=overrides,
            sections=sections,
            profile=profile,
            first=first,
            until=until,
        )
    elif resume is None:
        raise RequestError("name a step or a pipeline", hints=("run('rl/nemo_rl/rlvr')", "run(resume='latest')"))
    elif config or inputs or overrides or first or until or sections:
        raise RequestError(
            "resume alone goes on with what that run was asked for; name the steps to change it",
            hints=(f"run('STEP', ..., resume={resume!r})",),
        )
    else:
        asked = asked_before(bench, resume)
    return run_asked(bench, asked, force=force, resume=resume, progress=progress)


def run_asked(bench: Workbench, asked: Asked, *, force: bool, resume: str | None, progress: bool) -> Result:
    """Run a request; see `run`."""
    asked = bench.settled(asked)
    environment = _environment(bench, asked)
    terminal = Terminal.of() if progress else None
    with _variables(environment), outside_event_loop(), without_main_module():
        result, plan = run_here(bench, asked, force=force, resume=resume, terminal=terminal, ends_process=False)
        if terminal is not None:
            from nemotron_steps.cli.summary import show_result

            show_result(result, plan, bench.registry, terminal)
    return Result(bench.store, result.id)


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process for a while: the next run may have another profile, or none."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _environment(bench: Workbench, asked: Asked) -> Mapping[str, str]:
    """Variables of the request's profile. UnsupportedError for one that works elsewhere."""
    profile = bench.profile(asked.profile)
    if profile is None:
        return {}
    if profile.executor != "local" or profile.setup_lines:
        raise UnsupportedError(
            f"profile '{asked.profile}' does not run in this process",
            expected='executor = "local", without lines to set it up',
            found=f"executor = {profile.executor!r}",
            hints=(f"steps run {asked.redacted().command} -r {asked.profile}",),
        )
    return profile.env_vars
