"""Config of `data_prep/swe_tasks`: where repositories come from, what is broken in them, how tasks are proven."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from nemotron_steps.config.schema.base import OPERATIONAL, OnlyIf, Rule, Section
from nemotron_steps.config.schema.data_prep import (
    MUTATION_KINDS,
    JsonlSource,
    MadeUpPackages,
    MutationKind,
    SplitRows,
    broken_source_rules,
)


class PackageSource(Section):
    """`packages.*`: folders of pure-Python packages with their tests."""

    path: str
    """A folder with a package and its tests, or a folder of such folders."""
    test_command: str = "PYTHONPATH=src:. python -m pytest -rA -p no:cacheprovider {tests}"
    """Run in the package's folder; {tests} stands for the test files."""
    mutations: tuple[MutationKind, ...] = Field(MUTATION_KINDS, min_length=1)
    max_tasks: PositiveInt = 50
    """Tasks of one package."""
    max_bytes: PositiveInt = 2 * 1024 * 1024
    """Of a package's files: every row has them all. A larger package is left out, and counted."""
    read_only: tuple[str, ...] = ()
    """Host folders that the tests see besides the system's and Python's: libraries that they need."""
    seed: int = 42


class SweTasksConfig(Section):
    """The whole config of `data_prep/swe_tasks`."""

    made_up: MadeUpPackages | None = None
    packages: PackageSource | None = None
    jsonl: JsonlSource | None = None
    """Rows in the shape of SWE-bench or SWE-Gym."""
    kind: Annotated[Literal["agent", "steps"], OnlyIf("jsonl", None)] = "agent"
    """Tasks for an agent (SWE 2), or single steps of recorded trajectories that solve them (SWE 1): of mined tasks, for
    rows of jsonl have none."""
    rows: SplitRows = SplitRows()
    sample: Annotated[PositiveInt | None, OnlyIf("packages", None)] = None
    """Rows read at most (jsonl only); packages have max_tasks."""
    max_refused_share: float = Field(0.0, ge=0, le=1)
    """Share of unusable rows that is left out, each one named and counted (jsonl only)."""
    num_workers: Annotated[PositiveInt | None, OPERATIONAL] = None
    """Processes that prepare the rows of jsonl. None: one for each processor."""
    tell_file: bool = True
    """Whether the issue of a mined task says which file has the fault."""
    tell_error: bool = True
    """Whether it shows the first failing test's error."""
    tests_timeout_s: PositiveFloat = 60.0
    """Of a test run. A fault that makes the tests run longer makes no task."""
    memory_mib: PositiveInt = 2048
    """Of a test run."""
    max_concurrency: Annotated[PositiveInt | None, OPERATIONAL] = None
    """Test runs at once. None: one a core."""

    def _broken_rules(self) -> Iterator[Rule]:
        own = {"jsonl": self.jsonl is not None, "packages": self.packages is not None}
        return broken_source_rules("made_up", self.made_up is not None, own, self.rows.train, self.sample)
