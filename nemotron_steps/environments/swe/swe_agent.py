"""swe_agent (SWE 2): an agent with a shell, a viewer and an editor in an isolated copy of a repository. 1 if the
issue's tests pass on its changes and nothing that passed before breaks, else 0.

The harness is ours (harness.py, docs/swe.md). Time and memory used up by the agent or by the tests are failures to
judge (`agent_timeout`, `agent_out_of_memory`, `tests_timeout`, `tests_out_of_memory`), masked and never scored. An
agent that ends its own working copy has changed nothing: 0.

A row has SWE-bench's fields (instance_id, repo, base_commit, patch, test_patch, FAIL_TO_PASS, PASS_TO_PASS) and either
`image`, the container image with the repository, or `files` and `test_files` (path → text), for bubblewrap.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any, ClassVar, Literal

from pydantic import Field

from nemotron_steps.environments.base import Environment, EnvironmentConfig, GradeResult, Response, Row, Session
from nemotron_steps.environments.failures import CannotJudgeError, RowError
from nemotron_steps.environments.swe.expectations import RECORD_BYTES
from nemotron_steps.environments.swe.grading import Graded, Grader, HiddenTests, prepared
from nemotron_steps.environments.swe.harness import GONE, TOOLS, tests_of
from nemotron_steps.environments.swe.working_copy import Changes, FilesCopy, ImageCopy, WorkingCopy
from nemotron_steps.sandbox.base import MIB, Limits, Outcome
from nemotron_steps.sandbox.bubblewrap import BubblewrapSandbox
from nemotron_steps.sandbox.session import BubblewrapSession, ContainerSession, ServedSession, SessionOverError

AGENT_TIMEOUT = "agent_timeout"
AGENT_OUT_OF_MEMORY = "agent_out_of_memory"
TESTS_TIMEOUT = "tests_timeout"
TESTS_OUT_OF_MEMORY = "tests_out_of_memory"
NO_WORKING_COPY = "no_working_copy"


class SweAgentConfig(EnvironmentConfig):
    """Settings."""

    engine: Literal["docker", "podman", "apptainer"] = "docker"
    """Of rows with an image."""
    repository: str = "/testbed"
    """Where an image has the repository."""
    image: str | None = None
    """Image of rows that have none, with {instance_id} in it; None: such a row needs `files`."""
    test_command: str = (
        "source /opt/miniconda3/bin/activate testbed && python -m pytest -rA -p no:cacheprovider {tests}"
    )
    """Of rows with an image that have none. {tests} stands for the test files."""
    command_timeout_s: float = Field(300.0, gt=0.0)
    """Of one command; the agent is told, and goes on."""
    agent_timeout_s: float = Field(1800.0, gt=0.0)
    """Of the whole rollout from the first tool call on, what the policy takes to answer included."""
    tests_timeout_s: float = Field(1200.0, gt=0.0)
    """Of the issue's tests after a rollout."""
    memory_mib: int = Field(4096, gt=0)
    """Of a working copy's processes and files together."""
    disk_mib: int = Field(1024, gt=0)
    """Of a working copy's files."""
    processes: int = Field(256, gt=0)
    """Of a working copy at once."""
    shown_characters: int = Field(20_000, ge=100)
    """Of a tool's output."""
    read_only: tuple[str, ...] = ()
    """Host folders that rows with files see besides the system's and Python's, read-only: libraries of the tests."""
    max_concurrency: int | None = Field(None, ge=1)
    """Commands and test runs at once; None: one a core. Agents that wait for the policy take none."""


@dataclass
class _Agent:
    """One rollout's state."""

    row: Row
    copy: WorkingCopy | None = None
    lost: Outcome | None = None
    """How its working copy ended, if it has."""
    calls: int = 0


class SweAgent(Environment):
    """See the module docstring."""

    name: ClassVar[str] = "swe_agent"
    required_fields: ClassVar[tuple[str, ...]] = ("instance_id", "FAIL_TO_PASS")
    config_class = SweAgentConfig
    config: SweAgentConfig

    @classmethod
    def needs(cls, config: Any, row: Row | None = None) -> tuple[str, ...]:
        """What copies of repositories are made of: bubblewrap of files, a container engine of images."""
        return (config.engine if (row.get("files") is None if row else config.image) else "bubblewrap",)

    def _setup(self) -> None:
        self._bubblewrap = BubblewrapSandbox(self.config.max_concurrency, self.config.read_only)
        self._grader = Grader()

    def check_values(self, row: Row) -> None:
        for key in ("FAIL_TO_PASS", "PASS_TO_PASS"):
            try:
                found = tests_of(row, key)
            except ValueError as error:
                raise RowError(key, "a list of tests, or one as JSON", repr(row.get(key))[:80]) from error
            if key == "FAIL_TO_PASS" and not found:
                raise RowError(key, "at least one test", "none")
        if row.get("files") is None:
            if not self._image(row):
                raise RowError("image", "a container image, or `files`", "neither")
            if not row.get("test_patch") and not row.get("test_command"):
                raise RowError("test_patch", "the hidden tests", "nothing")
            return
        for key in ("files", "test_files"):
            value = row.get(key)
            if not isinstance(value, Mapping) or not value:
                raise RowError(key, "an object of path → text", repr(value)[:80])
            for path, text in value.items():
                pure = PurePosixPath(path)
                if not isinstance(text, str) or pure.is_absolute() or ".." in pure.parts:
                    raise RowError(key, "relative paths and texts", repr(path)[:80])

    async def close(self) -> None:
        await self._bubblewrap.close()

    async def seed(self, row: Row) -> Session:
        return Session(tools=self.tools_of(row), state=_Agent(row))

    def tools_of(self, row: Row) -> list[dict[str, Any]]:
        return [dict(tool) for tool in TOOLS]

    async def seed_recorded(self, row: Row) -> Session:
        """No working copy: what was changed elsewhere is not known here, and `verify` says so."""
        return Session()

    async def call_tool(self, session: Session, name: str, arguments: dict[str, Any]) -> str:
        """Run one tool. CannotJudgeError ends the rollout when the agent's time or memory is used up."""
        agent: _Agent = session.state
        agent.calls += 1
        if agent.lost is not None:
            return GONE
        tool = next((tool for tool in TOOLS if tool["name"] == name), None)
        if tool is None:
            return f"error: no tool is named {name!r}; there are {', '.join(tool['name'] for tool in TOOLS)}"
        for key in tool["parameters"]["required"]:
            if not isinstance(arguments.get(key), str) or "\0" in arguments[key]:
                return f"error: the argument `{key}` must be a string without null characters"
        try:
            if agent.copy is None:
                entered = self._session(agent.row, self.config.agent_timeout_s)
                await entered.__aenter__()
                agent.copy = self._copy_in(agent.row, entered)
                await agent.copy.lay()
            if name == "bash":
                return await agent.copy.bash(arguments["command"], self.config.command_timeout_s)
            if name == "view":
                return await agent.copy.view(arguments["path"], arguments.get("view_range"))
            return await agent.copy.edit(arguments["path"], arguments["old_str"], arguments["new_str"])
        except SessionOverError as error:
            agent.lost = error.outcome
            self._refuse_used_up(error.outcome)
            return GONE

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        agent: _Agent | None = session.state
        if agent is None:
            raise CannotJudgeError(NO_WORKING_COPY, "a rollout of another place has left no changed files here")
        components = {"tool_calls": float(agent.calls), "changed_files": 0.0}
        changes = Changes()
        if agent.copy is not None and agent.lost is None:
            try:
                changes = await agent.copy.changes()
            except SessionOverError as error:
                self._refuse_used_up(error.outcome)
        await self.release(session)
        components["changed_files"] = float(len(changes.files) or changes.patch.count("diff --git "))
        details: dict[str, Any] = {"left_out": list(changes.left_out)}
        if changes.unread:
            details["unread"] = changes.unread
        if not changes:
            return GradeResult(0.0, components, details=details)
        graded = await self._graded(row, changes)
        if graded is None:
            details["tests"] = "the code under test ended the sandbox"
            return GradeResult(0.0, components, details=details)
        asked = tests_of(row, "FAIL_TO_PASS")
        failed = (asked | tests_of(row, "PASS_TO_PASS")) - graded.passed
        components["proved"] = len(asked & graded.proved) / len(asked)
        details["not_passed"] = sorted(failed)[:20]
        return GradeResult(float(not failed and graded.applied), components, details=details)

    async def release(self, session: Session) -> None:
        agent: _Agent | None = session.state
        if agent is not None and agent.copy is not None:
            copy, agent.copy = agent.copy, None
            await copy.session.__aexit__(None, None, None)

    async def _graded(self, row: Row, changes: Changes) -> Graded | None:
        """How the tests go; None where the code under test ended their sandbox."""
        task = hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()
        tests = HiddenTests.of(row, self.config.test_command)
        wall_s = self.config.tests_timeout_s + self.config.command_timeout_s
        session = partial(self._session, row, wall_s, output_bytes=2 * RECORD_BYTES)
        prepare = prepared(session, partial(self._copy_in, row), changes, tests)
        try:
            graded = await self._grader.grade(task, prepare, tests.shell, self.config.tests_timeout_s)
        except SessionOverError as error:
            if error.outcome is Outcome.MEMORY_LIMIT:
                raise CannotJudgeError(TESTS_OUT_OF_MEMORY, "while the tests ran") from error
            if error.outcome is Outcome.TIMEOUT:
                raise CannotJudgeError(TESTS_TIMEOUT, "while the tests ran") from error
            return None
        if graded.outcome is Outcome.TIMEOUT:
            raise CannotJudgeError(TESTS_TIMEOUT, f"after {self.config.tests_timeout_s:.0f} s")
        return graded

    def _copy_in(self, row: Row, session: ServedSession) -> WorkingCopy:
        shown = self.config.shown_characters
        if row.get("files") is not None:
            return FilesCopy(session, row["files"], shown)
        return ImageCopy(session, self.config.repository, str(row.get("base_commit") or ""), shown)

    def _session(self, row: Row, wall_s: float, output_bytes: int = MIB) -> ServedSession:
        limits = Limits(
            wall_s=wall_s,
            cpu_s=int(wall_s) + 1,
            memory_bytes=self.config.memory_mib * MIB,
            processes=self.config.processes,
            file_bytes=self.config.disk_mib * MIB,
            scratch_bytes=self.config.disk_mib * MIB,
            output_bytes=output_bytes,
        )
        command_s, slots = self.config.command_timeout_s, self._bubblewrap.slots
        if row.get("files") is not None:
            return BubblewrapSession(self._bubblewrap, limits=limits, command_s=command_s)
        return ContainerSession(self.config.engine, self._image(row), slots, limits=limits, command_s=command_s)

    def _image(self, row: Row) -> str:
        own = row.get("image") or row.get("image_name") or row.get("docker_image")
        return str(own or (self.config.image or "").replace("{instance_id}", str(row["instance_id"])))

    @staticmethod
    def _refuse_used_up(outcome: Outcome) -> None:
        if outcome is Outcome.TIMEOUT:
            raise CannotJudgeError(AGENT_TIMEOUT, "the agent's total time is used up")
        if outcome is Outcome.MEMORY_LIMIT:
            raise CannotJudgeError(AGENT_OUT_OF_MEMORY, "the working copy's memory is used up")
