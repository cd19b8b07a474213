"""`plan` and `run`: what `steps plan` and `steps run` do, as values that can be looked at.

Python values become the request that the command line would make of them, overrides in Hydra's grammar.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from html import escape
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from nemotron_steps.api.result import Result, model_ports
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.cli.plans import plan_fields, show_plan
from nemotron_steps.cli.run import show_job, show_result, show_to_submit, shown, write_log
from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.config.locations import variables_set
from nemotron_steps.config.profiles import Profile
from nemotron_steps.config.secrets import redact
from nemotron_steps.errors import RequestError
from nemotron_steps.session.pipelines import quoted
from nemotron_steps.session.run import plan_run, request_of_run, run_here
from nemotron_steps.session.run_request import RunRequest
from nemotron_steps.session.session import Session
from nemotron_steps.session.submit import follow_attached, submit

if TYPE_CHECKING:
    from nemotron_steps.resolver.plan import Plan

Overrides = Iterable[str] | Mapping[str, Any]
Over = Iterable[str] | Mapping[str, Iterable[Any]]
Target = str | Iterable[str]
Input: TypeAlias = "str | os.PathLike[str] | Artifact | Result"

_BARE = re.compile(r"[A-Za-z/][\w./:-]*", re.ASCII)
_WORDS = frozenset({"null", "true", "false", "inf", "nan"})


def request_for(
    target: Target,
    *,
    config: str | os.PathLike[str] | None = None,
    inputs: Mapping[str, Input] | None = None,
    overrides: Overrides = (),
    profile: str | None = None,
    first: str | None = None,
    until: str | None = None,
    over: Over = (),
    ignore_checks: str | Iterable[str] = (),
    name: str | None = None,
    **sections: Any,
) -> RunRequest:
    """A request. Its arguments are those of `plan` and `run` as well.

    Args:
        target: a step, a pipeline, or a list of steps to be chained.
        config: the name of a config (`-c`), or the path of a file.
        inputs: port → path, `NAME:VERSION` or artifact (`--input`).
        overrides: texts in Hydra's grammar, or dotted keys and values.
        profile: of env.toml (`-r`): where it runs, and what the plan is checked against.
        first, until: stages of a pipeline (`--from`, `--until`).
        over: what to fan out over (`--over`): `{"grpo.seed": [42, 43]}` runs the step once for each value; a
            pipeline's keys are STAGE.KEY.
        ignore_checks: stages of a pipeline whose failed checks block nothing (`--ignore-checks`).
        name: what the run goes by beside its id (`--name`).
        sections: keys of the config: `grpo={"max_num_steps": 2}` is `grpo.max_num_steps=2`.

    Raises RequestError for what no command line could say.
    """
    targets = (target,) if isinstance(target, str) else tuple(target)
    if not targets or not all(isinstance(each, str) and each for each in targets):
        raise RequestError("name a step or a pipeline", found=repr(target), hints=("run('rl/nemo_rl/rlvr')",))
    return RunRequest(
        targets,
        (*override_list(overrides), *override_texts(sections)),
        None if config is None else os.fspath(config),
        {port: reference(given) for port, given in (inputs or {}).items()},
        profile,
        first=first,
        until=until,
        over=tuple(over_texts(over)),
        ignore_checks=(ignore_checks,) if isinstance(ignore_checks, str) else tuple(ignore_checks),
        name=name,
    )


def reference(given: Input) -> str:
    """An input as the command line names it; of a run, the one model that its last step made. RequestError for what has
    no name there, such as a loaded model."""
    if isinstance(given, Result):
        made = given.outputs
        models = model_ports(made)
        port = models[0] if len(models) == 1 else "model"
        if port not in made:
            hints = [f"result.outputs[{name!r}]" for name in made] or [f"steps status {given.id}"]
            what = f"run '{given.id}' has made {'several models' if models else 'no model'}"
            found = f"{given.status}: {', '.join(models or made) or 'no outputs'}"
            raise RequestError(what, found=found, hints=hints)
        given = made[port]
    if isinstance(given, Artifact):
        return given.ref
    if isinstance(given, str | os.PathLike):
        return os.fspath(given)
    hints = ("model.save_pretrained('my-model')   # and the tokenizer; then 'my-model'",)
    raise RequestError("an input is a folder, a file or an artifact", found=type(given).__name__, hints=hints)


def over_texts(over: Over) -> list[str]:
    """`KEY=V1,V2,…` for every key. RequestError for values that are not a list of some."""
    if not isinstance(over, Mapping):
        return override_list(over)
    texts = []
    for key, given in over.items():
        values = [] if isinstance(given, str | Mapping) or not isinstance(given, Iterable) else list(given)
        if not values:
            hints = (f"over={{{key!r}: [V1, V2]}}",)
            raise RequestError("a step is fanned out over a list of values", found=repr(given), hints=hints)
        named = (reference(each) if isinstance(each, Artifact) else each for each in values)
        texts.append(f"{key}={','.join(map(override_value, named))}")
    return texts


def override_list(overrides: Overrides) -> list[str]:
    """Overrides as texts; a text alone is one."""
    if isinstance(overrides, str):
        return [overrides]
    return override_texts(overrides) if isinstance(overrides, Mapping) else [str(each) for each in overrides]


def override_texts(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`key=value` for every leaf of nested mappings."""
    texts = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            texts += override_texts(value, f"{prefix}{name}.")
        else:
            texts.append(f"{prefix}{name}={override_value(value)}")
    return texts


def override_value(value: Any) -> str:
    """A value in Hydra's grammar. RequestError for one that it has no form for."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return repr(float(value)) if math.isfinite(value) else str(float(value))
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)  # bare where it reads the same
        return text if _BARE.fullmatch(text) and text.lower() not in _WORDS else quoted(text)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}: {override_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(override_value, value)) + "]"
    found = f"{value!r} ({type(value).__name__})"
    raise RequestError("a config holds numbers, texts, lists and mappings", found=found)


class Runnable:
    """A request with the home that it is run in."""

    _session: Session
    _request: RunRequest

    @property
    def command(self) -> str:
        """The same on the command line, after `steps run`."""
        return self._request.redacted().typed

    def run(
        self,
        *,
        force: bool = False,
        resume: str | None = None,
        wait: bool = True,
        progress: bool = True,
        name: str | None = None,
    ) -> Result:
        """Run it; see `nemotron_steps.run`. What is there already is not made again."""
        asked = replace(self._request, name=name or self._request.name)
        return run_request(self._session, asked, force=force, resume=resume, wait=wait, progress=progress)


class Planned(Runnable):
    """A request that type-checks: steps in order, where each input comes from, and what is already there.

    Attributes:
        plan: the resolver's plan.
        command: the same request on the command line, after `steps run`.
    """

    def __init__(self, session: Session, request: RunRequest) -> None:
        self._session = session
        self._request = session.settled(request)
        with variables_of(session.profile_of(self._request)):
            self.plan: Plan = plan_run(session, self._request)

    @property
    def steps(self) -> list[str]:
        """Keys of the steps, in the order in which they run."""
        return [step.key for step in self.plan.steps]

    @property
    def cached(self) -> bool:
        """Whether nothing is left to run."""
        return all(step.cached is not None for step in self.plan.steps)

    def config(self, step: str | None = None) -> dict[str, Any]:
        """The merged config of a step, redacted; default: the last one's. KeyError if there is no such step."""
        redacted: dict[str, Any] = redact(dict(self.plan.step(step or self.plan.goals[-1]).config))
        return redacted

    def to_dict(self) -> dict[str, Any]:
        """As `steps plan --json`."""
        return plan_fields(self.plan)

    def __str__(self) -> str:
        text = io.StringIO()
        show_plan(self.plan, self._request, Terminal(text, color=False, width=120))
        return text.getvalue()

    def __repr__(self) -> str:
        return f"<Planned {self.command}: {len(self.plan.steps)} steps>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def plan(target: Target, *, home: str | os.PathLike[str] | None = None, **request: Any) -> Planned:
    """Type-check a request, as `steps plan`. Nothing runs.

    Args:
        request: config, inputs, overrides, profile, first, until, over, ignore_checks, name, and keys of the config;
            see `nemotron_steps.api.planned.request_for`.
        home: where artifacts and runs are; None for STEPS_HOME, or `.steps`.

    Raises:
        PlanError: with every problem found, each with its code, place and hints.
        RequestError: the request itself makes no sense.
    """
    return Planned(session_of(home), request_for(target, **request))


def session_of(home: str | os.PathLike[str] | None) -> Session:
    """What requests are planned with."""
    return Session(None if home is None else os.fspath(home))


def variables_of(profile: Profile | None) -> AbstractContextManager[None]:
    """Set a local profile's `env_vars`, which configs read, for a while: the next request may have another profile."""
    return variables_set(profile.variables_here if profile is not None else {})


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
        request: config, inputs, overrides, profile, first, until, over, ignore_checks, name, and keys of the config;
            see `nemotron_steps.api.planned.request_for`.
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
        changed = [f"{name}={value!r}" for name, value in request.items() if value not in (None, (), [], {})]
        if changed:
            what = "resume alone goes on with what that run was asked for; name the steps to change it"
            raise RequestError(what, found=", ".join(changed), hints=(f"run('STEP', ..., resume={resume!r})",))
        ignored = (ignored,) if isinstance(ignored, str) else tuple(ignored)
        wanted = request_of_run(session, resume, profile=profile, ignore_checks=ignored)
    return run_request(session, wanted, force=force, resume=resume, wait=wait, progress=progress)


def run_request(
    session: Session, request: RunRequest, *, force: bool, resume: str | None, wait: bool, progress: bool
) -> Result:
    """Run a request; see `run`."""
    request = session.settled(request, resume)
    profile = session.profile_of(request)
    terminal = Terminal.of() if progress else None
    if profile is None and not wait:
        what = "a run without a profile works in this process, which has to wait for it"
        raise RequestError(what, where="wait=False", hints=("run(..., profile='PROFILE', wait=False)", "wait=True"))
    if profile is not None and not (wait and profile.runs_here):
        with outside_event_loop():
            with variables_of(profile):
                show = partial(show_to_submit, session, request, terminal) if terminal is not None else lambda *_: None
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
