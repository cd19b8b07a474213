"""A pipeline under test: its file, its plans, and its runs in processes of their own, each made once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.cli.asked import Asked
from nemotron_steps.cli.request import Workbench
from nemotron_steps.errors import StepsError
from nemotron_steps.manifest.models import StepManifest
from nemotron_steps.manifest.packs import PATH_VARIABLE
from nemotron_steps.manifest.pipeline_models import PipelineManifest, Stage
from nemotron_steps.testing.step_subject import Ran, Source
from nemotron_steps.testing.suite import NotApplicable, Unmet

if TYPE_CHECKING:
    from nemotron_steps.resolver.plan import Plan


@dataclass
class PipelineSubject:
    """What the checks of a pipeline ask.

    Args:
        name: of the pipeline.
        folder: for homes.
        config: what runs are given as `-c`; None: it is planned, and not run.
        inputs: `PORT` or `STAGE.PORT` → what runs feed it.
        overrides: of runs, `STAGE.key=value`.
        seconds: the longest that a run may take.
    """

    name: str
    folder: Path
    config: str | None = None
    inputs: Mapping[str, Source] = field(default_factory=dict)
    overrides: Sequence[str] = ()
    seconds: float = 300.0

    @cached_property
    def bench(self) -> Workbench:
        """What commands plan with."""
        return Workbench(str(self.folder / "home"))

    @cached_property
    def manifest(self) -> PipelineManifest:
        """The pipeline's. Raises the error that it has, or that there is none."""
        return self.bench.registry.pipeline(self.name)

    def plan(self, config: str | None, overrides: Sequence[str] = ()) -> Plan:
        """Plan it without data. Unmet with the first mistake."""
        asked = Asked((self.manifest.name,), tuple(overrides), config)
        try:
            return self.bench.plan(asked, allow_unfilled=True)
        except StepsError as error:
            first = next(iter(getattr(error, "problems", ())), error)
            raise Unmet(
                f"under '{config or 'default'}': {first.what}",
                where=first.where,
                found=first.found,
                hint="; ".join(first.hints) or None,
            ) from error

    def step_of(self, stage: Stage, config: str | None = None) -> StepManifest:
        """A stage's step, under one of the pipeline's configs."""
        variant = self.manifest.configs.get(config or "", {}).get(stage.name)
        return self.bench.registry.step((variant.step if variant else None) or stage.step)

    def configs(self) -> Iterator[str | None]:
        """None for the stages as they are, then each config of the pipeline's."""
        yield None
        yield from self.manifest.configs

    # -- runs ------------------------------------------------------------------------------------------------

    def words(self, home: Path) -> list[str]:
        """A run's words after `steps`. NotApplicable where the kit was given no config to run."""
        if self.config is None:
            raise NotApplicable(f'pipeline_conformance("{self.name}", run="tiny") runs it as well')
        words = ["run", self.manifest.name, *self.overrides]
        words += ["-c", self.config] if self.config != "default" else []
        for port, path in self.fed.items():
            words += ["--input", f"{port}={path}"]
        return [*words, "--home", str(home), "--json"]

    @property
    def ran_plan(self) -> Plan:
        """The plan of what is run. Unmet with the first mistake."""
        return self.plan(None if self.config == "default" else self.config, self.overrides)

    @cached_property
    def fed(self) -> dict[str, Path]:
        """Port → what runs feed it."""
        fed = {}
        for port, source in self.inputs.items():
            folder = self.folder / "inputs" / port
            folder.mkdir(parents=True)
            fed[port] = (source(folder) if callable(source) else Path(source)).absolute()
        return fed

    @cached_property
    def first(self) -> Ran:
        """The pipeline run twice in one home."""
        home = self.folder / "first"
        return self.process("first", [self.words(home), self.words(home)], home)

    def process(self, name: str, commands: Sequence[Sequence[str]], home: Path, **watch: Any) -> Ran:
        """Run commands in a process of their own, in empty folders of their own.

        Args:
            watch: fields of the process's request (`step`, `at_write`).
        """
        place = self.folder / "processes" / name
        for folder in ("cwd", "tmp", "user"):
            (place / folder).mkdir(parents=True)
        packs = [str(pack.base) for pack in self.bench.registry.packs if pack.origin in _BY_PATH]
        request = {"commands": [list(words) for words in commands], "step": "", "package": "", "allowed": [], **watch}
        (place / "request.json").write_text(json.dumps({**request, "inside": str(home / "work")}))
        files = [str(place / "request.json"), str(place / "result.json")]
        with (place / "output.txt").open("w+b") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "nemotron_steps.testing.process", *files],
                cwd=place / "cwd",
                env={
                    **{name: value for name, value in os.environ.items() if not name.startswith("STEPS_")},
                    "HOME": str(self.folder / "user"),
                    "PYTHONUSERBASE": os.environ.get("PYTHONUSERBASE", str(Path.home() / ".local")),
                    "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
                    "TMPDIR": str(place / "tmp"),
                    "XDG_CACHE_HOME": str(self.folder / "cache"),
                    PATH_VARIABLE: os.pathsep.join(packs),
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout=60 + self.seconds * len(commands))
            except subprocess.TimeoutExpired:
                raise Unmet(
                    f"the pipeline did not end within {self.seconds:.0f} s",
                    hint=f'pipeline_conformance("{self.name}", …, seconds=…)',
                ) from None
            finally:
                with suppress(ProcessLookupError):  # nothing is left
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            text = output.read().decode("utf-8", "replace")
        result: dict[str, Any] = {"commands": [], "seen": {}}
        if (place / "result.json").is_file():
            result = json.loads((place / "result.json").read_text())
        return Ran(home, result["commands"], result["seen"], code, text)


_BY_PATH = (PATH_VARIABLE, "working directory")
