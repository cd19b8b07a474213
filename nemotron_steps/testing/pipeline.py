"""A pipeline under test, and checks of its file and of its plans."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nemotron_steps.errors import StepsError
from nemotron_steps.session.run_request import RunRequest
from nemotron_steps.session.session import Session
from nemotron_steps.testing.suite import Suite, Unmet, told


@dataclass(frozen=True)
class PipelineSubject:
    """What the checks of a pipeline ask; `folder` is for a home that has nothing in it."""

    name: str
    folder: Path

    @cached_property
    def bench(self) -> Session:
        """What commands plan with."""
        return Session(str(self.folder / "home"))


SUITE: Suite[PipelineSubject] = Suite()


@SUITE.check()
def manifest_loads(subject: PipelineSubject) -> None:
    """The file is found, and strict; no step, and no pipeline of an earlier pack, has its plain name."""
    try:
        manifest = subject.bench.registry.pipeline(subject.name)
    except StepsError as error:
        raise told(error) from error
    if manifest.hidden:
        name = manifest.pipeline.name
        where = manifest.where("pipeline", "name")
        raise Unmet(f"'{name}' is something else's name already", where=where, hint=f'name = "{name}_mine"')


@SUITE.check("manifest_loads")
def it_plans(subject: PipelineSubject) -> None:
    """With each `-c` and without, before there is data: steps, ports and types fit, and configs compose."""
    manifest = subject.bench.registry.pipeline(subject.name)
    for config in (None, *manifest.configs):
        try:
            subject.bench.plan(RunRequest((manifest.name,), (), config), allow_unfilled=True)
        except StepsError as error:
            first = next(iter(getattr(error, "problems", ())), error)
            raise told(first, f"under '{config or 'default'}': ") from error
