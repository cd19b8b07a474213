"""`plan`: what `steps plan` shows, as a value that can be looked at and run."""

from __future__ import annotations

import io
import os
from contextlib import AbstractContextManager
from html import escape
from typing import TYPE_CHECKING, Any

from nemotron_steps.api.asking import Target, arguments_of, asked_for
from nemotron_steps.cli.asked import Asked
from nemotron_steps.cli.planning import plan_fields, show_plan, with_cached
from nemotron_steps.cli.request import Workbench
from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.config.process_variables import variables_set
from nemotron_steps.config.profiles import Profile

if TYPE_CHECKING:
    from nemotron_steps.api.result import Result
    from nemotron_steps.resolver.plan import Plan

_COLUMNS = 120


class Planned:
    """A request that type-checks: steps in order, where each input comes from, and what is already there.

    Attributes:
        plan: the resolver's plan.
        command: the same request on the command line, after `steps run`.
    """

    def __init__(self, bench: Workbench, asked: Asked) -> None:
        self._bench = bench
        self._asked = bench.settled(asked)
        with variables_of(bench.profile_of(self._asked)):
            self.plan: Plan = with_cached(bench, bench.plan(self._asked))
        self.command = self._asked.redacted().typed

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
        from nemotron_steps.config.redaction import redact

        redacted: dict[str, Any] = redact(dict(self.plan.step(step or self.plan.goals[-1]).config))
        return redacted

    def to_dict(self) -> dict[str, Any]:
        """As `steps plan --json`."""
        return plan_fields(self.plan)

    def run(
        self, *, force: bool = False, resume: str | None = None, wait: bool = True, progress: bool = True
    ) -> Result:
        """Run it; see `nemotron_steps.run`."""
        from nemotron_steps.api.running import run_asked

        return run_asked(self._bench, self._asked, force=force, resume=resume, wait=wait, progress=progress)

    def __str__(self) -> str:
        text = io.StringIO()
        show_plan(self.plan, Terminal(text, color=False, width=_COLUMNS), self._asked)
        return text.getvalue()

    def __repr__(self) -> str:
        return f"<Planned {self.command}: {len(self.plan.steps)} steps>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


@arguments_of(asked_for)
def plan(target: Target, *, home: str | os.PathLike[str] | None = None, **request: Any) -> Planned:
    """Type-check a request, as `steps plan`. Nothing runs.

    Args:
        request: see `nemotron_steps.api.asking.asked_for`.
        home: where artifacts and runs are; None for STEPS_HOME, or `.steps`.

    Raises:
        PlanError: with every problem found, each with its code, place and hints.
        RequestError: the request itself makes no sense.
    """
    return Planned(bench_of(home), asked_for(target, **request))


def bench_of(home: str | os.PathLike[str] | None) -> Workbench:
    """What requests are planned with."""
    return Workbench(None if home is None else os.fspath(home))


def variables_of(profile: Profile | None) -> AbstractContextManager[None]:
    """Set a local profile's `env_vars` for a while: the next request may have another profile, or none.

    Configs read them (`${oc.env:NAME}`), so a plan made without them is not what the run does.
    """
    return variables_set(profile.variables_here if profile is not None else {})
