"""Mining: faults that a package's tests notice, each proven in the sandbox."""

import difflib
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from nemotron_steps.config.schema.swe_tasks import SweTasksConfig
from nemotron_steps.environments.swe.grading import Graded, Grader, HiddenTests, prepared, run_as_written
from nemotron_steps.environments.swe.harness import task_prompt
from nemotron_steps.environments.swe.working_copy import Changes, FilesCopy
from nemotron_steps.rows.lines import Row
from nemotron_steps.sandbox.base import MIB, Limits, Outcome
from nemotron_steps.sandbox.bubblewrap import BubblewrapSandbox
from nemotron_steps.sandbox.session import BubblewrapSession, SessionOverError
from nemotron_steps.steps.data_prep.swe.packages import Mutation, Package

AGENT = "swe_agent"
STEPS_AGENT = "swe_pivot_simple_agent"
_ERROR = re.compile(r"^(?:E\s+)?(\w*(?:Error|Exception|Exit|Interrupt)\b.*)$", re.MULTILINE)
NAMED = 5


@dataclass(frozen=True)
class Task:
    """A proven fault."""

    package: Package
    mutation: Mutation
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    error: str


class Miner:
    """Proves faults. `refused` counts those that make no task, by reason."""

    def __init__(self, config: SweTasksConfig) -> None:
        self._config = config
        read_only = config.packages.read_only if config.packages is not None else ()
        self._sandbox = BubblewrapSandbox(config.max_concurrency, read_only)
        self.refused: Counter[str] = Counter()

    async def passing(self, package: Package) -> frozenset[str]:
        """Tests of the package as it is that pass, as they are written and as they grade."""
        passed: list[frozenset[str]] = []
        for blinded in (False, True):
            graded = await self._run(package, package.files, blinded=blinded)
            ended = graded is not None and graded.outcome is Outcome.EXITED
            passed.append(graded.passed if graded is not None and ended else frozenset())
        if not passed[0] & passed[1]:
            self.refused["package_without_passing_tests"] += 1
        return passed[0] & passed[1]

    async def task(self, package: Package, mutation: Mutation, passing: frozenset[str]) -> Task | None:
        """The task that a fault makes, if the tests notice it and end."""
        graded = await self._run(package, {**package.files, mutation.path: mutation.source})
        if graded is None or graded.outcome is not Outcome.EXITED:
            self.refused["fault_without_end"] += 1
            return None
        failing = passing - graded.passed
        if not failing:
            self.refused["fault_unnoticed"] += 1
            return None
        return Task(
            package, mutation, tuple(sorted(failing)), tuple(sorted(passing & graded.passed)), _error(graded.output)
        )

    async def close(self) -> None:
        """Close the sandbox."""
        await self._sandbox.close()

    async def _run(self, package: Package, files: Mapping[str, str], *, blinded: bool = False) -> Graded | None:
        limits = Limits(
            wall_s=2 * self._config.tests_timeout_s + 60,
            cpu_s=int(2 * self._config.tests_timeout_s) + 60,
            memory_bytes=self._config.memory_mib * MIB,
            scratch_bytes=512 * MIB,
            processes=256,
        )
        tests = HiddenTests(package.test_command, package.test_files)
        session = partial(BubblewrapSession, self._sandbox, limits=limits)
        prepare = prepared(session, lambda entered: FilesCopy(entered, files, 0), Changes(), tests)
        try:
            if blinded:
                return await Grader().grade("", prepare, tests.shell, self._config.tests_timeout_s)
            return await run_as_written(prepare, tests.shell, self._config.tests_timeout_s)
        except SessionOverError:
            return None


def issue_of(mutation: Mutation, failing: tuple[str, ...], error: str, config: SweTasksConfig) -> str:
    """The issue of a fault, as the config words it."""
    return issue_text(
        failing, file=mutation.path if config.tell_file else None, error=error if config.tell_error else ""
    )


def issue_text(failing: Sequence[str], *, file: str | None, error: str = "") -> str:
    """An issue as the finder of a fault would report it."""
    more = f" and {len(failing) - NAMED} more" if len(failing) > NAMED else ""
    parts = [f"These tests fail: {', '.join(failing[:NAMED])}{more}."]
    if file is not None:
        parts.append(f"The fault is in {file}.")
    return " ".join(parts) + (f"\n\n{error}" if error else "")


def row_of(task: Task, config: SweTasksConfig) -> Row:
    """A task as a row of `swe_agent`, with SWE-bench's fields."""
    mutation, package = task.mutation, task.package
    files = {**package.files, mutation.path: mutation.source}
    issue = issue_of(mutation, task.fail_to_pass, task.error, config)
    name = hashlib.sha256(mutation.source.encode()).hexdigest()[:8]
    path, broken, correct = mutation.path, mutation.source, package.files[mutation.path]
    before, after = broken.splitlines(keepends=True), correct.splitlines(keepends=True)
    lines = difflib.unified_diff(before, after, f"a/{path}", f"b/{path}")
    patch = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return {
        "responses_create_params": {"input": [{"role": "user", "content": task_prompt(issue)}]},
        "agent_ref": {"type": "responses_api_agents", "name": AGENT},
        "instance_id": f"{package.name}-{package.digest[:8]}-{name}",
        "repo": package.name,
        "base_commit": package.digest[:40],
        "problem_statement": issue,
        "fault": mutation.kind,
        "patch": "".join(patch),
        "FAIL_TO_PASS": list(task.fail_to_pass),
        "PASS_TO_PASS": list(task.pass_to_pass),
        "files": files,
        "test_files": dict(package.test_files),
        "test_command": package.test_command,
    }


def _error(output: str) -> str:
    """The first error that a test run shows and that is not the one of the test that must fail."""
    found = _ERROR.search(output)
    return found[1].strip()[:500] if found else ""
