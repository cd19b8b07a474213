"""swerl_gen: one-shot software engineering. `eval` rows ask for a patch: 1 if all the issue's tests pass and nothing
else breaks, 0.2 if some do, else 0. `repro-gen` rows ask for a test that fails before the known patch (exit code 2)
and passes after it.

Everything runs in the row's container image of the repository; this package ships none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from difflib import unified_diff
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from nemotron_steps.environments.base import (
    CannotJudgeError,
    Environment,
    EnvironmentConfig,
    Response,
    Row,
    RowError,
    Session,
    Verdict,
)
from nemotron_steps.environments.text.extraction import fenced_blocks
from nemotron_steps.sandbox import Limits, Outcome, SandboxResult
from nemotron_steps.sandbox.base import MIB
from nemotron_steps.sandbox.containers import ContainerSession, check_engine

if TYPE_CHECKING:
    from nemotron_steps.environments.judged.judges import Judge

TESTS_TIMEOUT = "tests_timeout"
"""Failure class: the repository's tests did not finish."""
PARTIAL = 0.2
TEST_FILE = "reproduce_issue.py"
REPOSITORY = "/testbed"

_EDIT = re.compile(
    r"^###\s*(?P<path>\S+)\s*\n<{5,9} SEARCH\n(?P<search>.*?)\n?={5,9}\n(?P<replace>.*?)\n?>{5,9} REPLACE",
    re.DOTALL | re.MULTILINE,
)
_RESULT = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\s+(\S.*?)(?: - .*)?$", re.MULTILINE)


class SwerlGenConfig(EnvironmentConfig):
    """Settings."""

    engine: Literal["docker", "podman"] = "docker"
    sandbox_timeout: float = Field(600.0, gt=0.0)
    memory_mib: int = Field(8192, gt=0)


class SwerlGen(Environment):
    """See the module docstring."""

    name: ClassVar[str] = "swerl_gen"
    required_fields: ClassVar[tuple[str, ...]] = ("instance", "metadata.image", "mode")
    config_class = SwerlGenConfig
    config: SwerlGenConfig

    def __init__(self, config: SwerlGenConfig, judges: Mapping[str, Judge]) -> None:
        super().__init__(config, judges)

    async def start(self) -> None:
        """Check the container engine."""
        await check_engine(self.config.engine)

    def check_values(self, row: Row) -> None:
        """The mode is known and what it needs is there."""
        if row["mode"] not in ("eval", "repro-gen"):
            raise RowError("mode", "eval or repro-gen", repr(row["mode"]))
        needed = ["patch"] if row["mode"] == "repro-gen" else ["FAIL_TO_PASS", "PASS_TO_PASS", "test_script"]
        for key in needed:
            if not row["instance"].get(key):
                raise RowError(f"instance.{key}", "a value", "nothing")
        if row["mode"] == "eval":
            try:
                files_of(row)
                tests_in(row, "FAIL_TO_PASS")
            except (KeyError, ValueError, TypeError) as error:
                raise RowError("metadata.relevant_file_contents", "JSON, as the tests' names", repr(error)) from error

    async def verify(self, row: Row, response: Response, session: Session) -> Verdict:
        """See the module docstring. What cannot be extracted or applied scores 0."""
        if row["mode"] == "repro-gen":
            return await self._reproduction(row, response.text)
        patch = make_patch(files_of(row), response.text)
        if patch is None:
            return Verdict(0.0, {"extracted": 0.0})
        instance = row["instance"]
        async with self._container(row) as container:
            await self._setup(container, instance, patch)
            result = await self._run(container, ["/bin/bash", "-c", str(instance["test_script"])])
        passed = passed_tests(result.stdout + result.stderr)
        reward = resolution(passed, tests_in(row, "FAIL_TO_PASS"), tests_in(row, "PASS_TO_PASS"))
        return Verdict(reward, {"extracted": 1.0}, details={"patch": patch})

    async def _reproduction(self, row: Row, text: str) -> Verdict:
        blocks = [content for info, content in fenced_blocks(text) if info.lower() in ("", "python")]
        if not blocks:
            return Verdict(0.0, {"extracted": 0.0})
        codes: list[int | None] = []
        for patch in (None, str(row["instance"]["patch"])):
            async with self._container(row) as container:
                await self._setup(container, row["instance"], patch)
                await container.write(f"{REPOSITORY}/{TEST_FILE}", blocks[-1])
                script = f"source /opt/miniconda3/bin/activate && conda activate testbed && python {TEST_FILE}"
                result = await self._run(container, ["/bin/bash", "-c", script])
                codes.append(result.exit_code)
        return Verdict(float(codes == [2, 0]), {"extracted": 1.0}, details={"exit_codes": codes})

    def _container(self, row: Row) -> ContainerSession:
        limits = Limits(
            wall_s=self.config.sandbox_timeout,
            cpu_s=int(self.config.sandbox_timeout) * 8,
            memory_bytes=self.config.memory_mib * MIB,
            processes=1024,
            file_bytes=1024 * MIB,
            output_bytes=32 * MIB,
            open_files=4096,
        )
        return ContainerSession(self.config.engine, str(row["metadata"]["image"]), limits=limits)

    async def _setup(self, container: ContainerSession, instance: dict[str, Any], patch: str | None) -> None:
        if instance.get("setup_script"):
            await self._run(container, ["/bin/bash", "-c", str(instance["setup_script"])])
        if patch is not None:
            await container.write("/tmp/answer.patch", patch)
            applied = await self._run(container, ["git", "apply", "--whitespace=nowarn", "/tmp/answer.patch"])
            if not applied.ok:
                raise CannotJudgeError("patch_not_applicable", applied.stderr[-300:])

    async def _run(self, container: ContainerSession, argv: Sequence[str]) -> SandboxResult:
        result = await container.run(argv, cwd=REPOSITORY)
        if result.outcome is not Outcome.EXITED:
            raise CannotJudgeError(TESTS_TIMEOUT, result.outcome.value)
        return result


def files_of(row: Row) -> dict[str, str]:
    """Path → content of the files a row's prompt shows."""
    contents = row["metadata"]["relevant_file_contents"]
    files = json.loads(contents) if isinstance(contents, str) else contents
    return {str(path): str(text) for path, text in files.items()}


def tests_in(row: Row, key: str) -> set[str]:
    """Test names of FAIL_TO_PASS or PASS_TO_PASS, a list or a JSON list."""
    value = row["instance"].get(key) or []
    return set(json.loads(value) if isinstance(value, str) else value)


def make_patch(files: Mapping[str, str], text: str) -> str | None:
    """The answer's SEARCH/REPLACE edits as one unified diff.

    None when there are none, one names another file, a search text is not there exactly once, or nothing changes.
    """
    _, opened, rest = text.partition("<solution>")
    body = rest.partition("</solution>")[0] if opened else text
    changed = dict(files)
    edits = list(_EDIT.finditer(body))
    for edit in edits:
        path, search = edit["path"], edit["search"]
        if path not in changed or not search or changed[path].count(search) != 1:
            return None
        changed[path] = changed[path].replace(search, edit["replace"])
    pieces = []
    for path, new in changed.items():
        if new != files[path]:
            lines = unified_diff(
                files[path].splitlines(keepends=True), new.splitlines(keepends=True), f"a/{path}", f"b/{path}"
            )
            for line in lines:
                pieces.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(pieces) or None


def passed_tests(output: str) -> set[str]:
    """Tests that a `pytest -rA` summary reports as passed, and never otherwise."""
    found = _RESULT.findall(output)
    good = {name for status, name in found if status in ("PASSED", "XFAIL")}
    return good - {name for status, name in found if status in ("FAILED", "ERROR")}


def resolution(passed: set[str], fail_to_pass: set[str], pass_to_pass: set[str]) -> float:
    """1 if all of both pass, 0.2 if all of pass_to_pass and some of fail_to_pass do, else 0."""
    if not pass_to_pass <= passed:
        return 0.0
    if fail_to_pass <= passed:
        return 1.0
    return PARTIAL if fail_to_pass & passed else 0.0
