"""swerl_gen: one-shot software engineering. `eval` rows ask for a patch: 1 if all the issue's tests pass and nothing
else breaks, 0.2 if some do, else 0. `repro-gen` rows ask for a test that fails before the known patch (exit code 2)
and passes after it; a comment does not make it pass. Tests that do not finish in time score 0, as failing ones do: the
answer made them so. Tests are graded as those of `swe_agent` (swe/grading.py).

Everything runs in the row's container image of the repository; this package ships none.
"""

import asyncio
import difflib
import hashlib
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Literal

from pydantic import Field

from nemotron_steps.environments.base import Environment, EnvironmentConfig, GradeResult, Response, Row, Session
from nemotron_steps.environments.failures import CannotJudgeError, RowError
from nemotron_steps.environments.swe.grading import Grader, Ready, test_modules
from nemotron_steps.environments.swe.harness import tests_of
from nemotron_steps.environments.text.extraction import fenced_blocks
from nemotron_steps.sandbox import Limits, Outcome, SandboxResult
from nemotron_steps.sandbox.base import MIB
from nemotron_steps.sandbox.containers import check_engine
from nemotron_steps.sandbox.session import ContainerSession, SessionOverError

SETUP_FAILED = "setup_failed"
PATCH_NOT_APPLICABLE = "patch_not_applicable"
"""Failure class: the row's files, changed as the answer asks, are not the image's."""
PARTIAL = 0.2
TEST_FILE = "reproduce_issue.py"
REPRODUCED = {"as it is": 2, "mended": 0}
REPOSITORY = "/testbed"

MAX_EDITS = 200

_PATCHED = re.compile(r"^\+\+\+ b/(\S+\.py)$", re.MULTILINE)
_PATH = re.compile(r"###\s*(\S+)\s*")
_SEARCH, _DIVIDER, _REPLACE = (re.compile(mark) for mark in (r"<{5,9} SEARCH", r"={5,9}", r">{5,9} REPLACE"))


class SwerlGenConfig(EnvironmentConfig):
    """Settings."""

    engine: Literal["docker", "podman"] = "docker"
    """What starts the containers."""
    sandbox_timeout: float = Field(600.0, gt=0.0)
    """Seconds that the tests of one answer may take."""
    memory_mib: int = Field(8192, gt=0)
    """Of one container."""
    relaxed_formatting: bool = False
    """True: edits count without `<solution>` tags around them."""


class SwerlGen(Environment):
    """See the module docstring.

    A row has `mode` (eval or repro-gen), `metadata` (image, files shown) and `instance` (tests, patch).
    """

    name: ClassVar[str] = "swerl_gen"
    required_fields: ClassVar[tuple[str, ...]] = ("instance", "metadata.image", "mode")
    config_class = SwerlGenConfig
    config: SwerlGenConfig

    @classmethod
    def needs(cls, config: Any, row: Row | None = None) -> tuple[str, ...]:
        return (config.engine,)

    def _setup(self) -> None:
        self._grader = Grader()

    async def start(self) -> None:
        await check_engine(self.config.engine)

    def check_values(self, row: Row) -> None:
        needed = {"eval": ("FAIL_TO_PASS", "PASS_TO_PASS", "test_script"), "repro-gen": ("patch",)}
        if row["mode"] not in needed:
            raise RowError("mode", "eval or repro-gen", repr(row["mode"]))
        key = "metadata.relevant_file_contents"
        try:
            if row["mode"] == "eval":
                files_of(row)
            for name in needed[row["mode"]]:
                key = f"instance.{name}"
                if not row["instance"].get(name):
                    raise RowError(key, "a value", "nothing")
                if name.endswith("TO_PASS"):
                    tests_of(row["instance"], name)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            if isinstance(error, RowError):
                raise
            raise RowError(key, "an object or a list of tests, perhaps as JSON", repr(error)) from error

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        if row["mode"] == "repro-gen":
            return await self._reproduction(row, response.text)
        body = solution_of(response.text, relaxed=self.config.relaxed_formatting)
        strip = 1 if row["metadata"].get("remove_repo_name") else 0
        # In a helper, as difflib takes quadratic time.
        patch = None if body is None else await self.in_helper(make_patch, files_of(row), body, strip)
        if patch is None:
            return GradeResult(0.0, {"extracted": 0.0})
        instance = row["instance"]
        asked, kept = tests_of(instance, "FAIL_TO_PASS"), tests_of(instance, "PASS_TO_PASS")
        modules = test_modules(name.split("::")[0] for name in asked | kept)

        @asynccontextmanager
        async def prepare(solved: bool) -> AsyncIterator[Ready | None]:
            async with self._container(row) as container:
                changes = instance.get("patch") if solved else patch
                await self._lay_patch(container, instance, changes)
                yield Ready(container, REPOSITORY, modules) if changes else None

        task = hashlib.sha256(json.dumps([row["metadata"]["image"], instance], sort_keys=True).encode()).hexdigest()
        try:
            graded = await self._grader.grade(task, prepare, str(instance["test_script"]), None)
        except SessionOverError as error:
            return GradeResult(0.0, {"extracted": 1.0}, details={"patch": patch, "outcome": error.outcome.value})
        finished = graded.outcome is Outcome.EXITED
        proved = len(asked & graded.proved) / len(asked)
        components = {"extracted": 1.0, "finished": float(finished), "proved": proved}
        reward = resolution(graded.passed, asked, kept) if finished else 0.0
        return GradeResult(reward, components, details={"patch": patch, "outcome": graded.outcome.value})

    async def _reproduction(self, row: Row, text: str) -> GradeResult:
        blocks = [content for info, content in fenced_blocks(text) if info.lower() in ("", "python")]
        if not blocks:
            return GradeResult(0.0, {"extracted": 0.0})
        known = str(row["instance"]["patch"])
        patches = {"as it is": "", "mended": known}
        codes = {name: await self._exit_code(row, blocks[-1], patch) for name, patch in patches.items()}
        if codes == REPRODUCED:
            # A script that only looks whether something has been changed calls this mended, too.
            codes["with a comment"] = await self._exit_code(row, blocks[-1], "", commented=_PATCHED.findall(known))
        reproduced = codes == {**REPRODUCED, "with a comment": 2}
        return GradeResult(float(reproduced), {"extracted": 1.0}, details={"exit_codes": codes})

    async def _exit_code(self, row: Row, test: str, patch: str, commented: Sequence[str] = ()) -> int | str:
        """Of a reproduction in a repository with a patch and comments at the end of files, or how it ended without."""
        async with self._container(row) as container:
            await self._lay_patch(container, row["instance"], patch or None)
            if commented:
                script = 'for path; do [ ! -f "$path" ] || printf "\\n# .\\n" >> "$path"; done'
                await self._prepare(container, ["/bin/sh", "-c", script, "sh", *commented])
            await container.write({f"{REPOSITORY}/{TEST_FILE}": test})
            script = f"source /opt/miniconda3/bin/activate && conda activate testbed && python {TEST_FILE}"
            try:
                result = await container.run(["/bin/bash", "-c", script], cwd=REPOSITORY)
            except SessionOverError as error:
                return f"session over: {error.outcome.value}"
        return result.outcome.value if result.exit_code is None else result.exit_code

    def _container(self, row: Row) -> ContainerSession:
        limits = Limits(
            wall_s=10 * self.config.sandbox_timeout,
            cpu_s=int(self.config.sandbox_timeout) * 8,
            memory_bytes=self.config.memory_mib * MIB,
            processes=1024,
            file_bytes=1024 * MIB,
            output_bytes=32 * MIB,
            open_files=4096,
        )
        engine, image, alone = self.config.engine, str(row["metadata"]["image"]), asyncio.Semaphore(1)
        return ContainerSession(engine, image, alone, limits=limits, command_s=self.config.sandbox_timeout)

    async def _lay_patch(self, container: ContainerSession, instance: dict[str, Any], patch: str | None) -> None:
        if instance.get("setup_script"):
            await self._prepare(container, ["/bin/bash", "-c", str(instance["setup_script"])])
        if patch is not None:
            await container.write({"/tmp/answer.patch": patch})
            applied = await self._prepare(container, ["git", "apply", "--whitespace=nowarn", "/tmp/answer.patch"])
            if not applied.ok:
                raise CannotJudgeError(PATCH_NOT_APPLICABLE, applied.stderr[-300:])

    async def _prepare(self, container: ContainerSession, argv: Sequence[str]) -> SandboxResult:
        try:
            result = await container.run(argv, cwd=REPOSITORY)
        except SessionOverError as error:  # no code of the answer's has run yet
            raise CannotJudgeError(SETUP_FAILED, str(error)) from error
        if result.outcome is not Outcome.EXITED:
            raise CannotJudgeError(SETUP_FAILED, result.outcome.value)
        return result


def files_of(row: Row) -> dict[str, str]:
    """Path → content of the files a row's prompt shows."""
    contents = row["metadata"]["relevant_file_contents"]
    files = json.loads(contents) if isinstance(contents, str) else contents
    return {str(path): str(text) for path, text in files.items()}


def solution_of(text: str, *, relaxed: bool) -> str | None:
    """What stands between the first <solution> tags. Without both of them None, or the whole text where relaxed."""
    _, opened, rest = text.partition("<solution>")
    body, closed, _ = rest.partition("</solution>")
    if opened and closed:
        return body
    return text if relaxed else None


def edits_in(body: str) -> list[tuple[str, str, str]] | None:
    """(path, search text, replacement) of every complete SEARCH/REPLACE edit, in order; None for over MAX_EDITS."""
    edits: list[tuple[str, str, str]] = []
    path: str | None = None
    parts: list[list[str]] = []
    for line in body.split("\n"):
        mark = line.rstrip()
        if not parts:
            if found := _PATH.fullmatch(line):
                path = found.group(1)
            elif path is not None and _SEARCH.fullmatch(mark):
                parts = [[]]
            elif mark:
                path = None
        elif len(parts) == 1 and _DIVIDER.fullmatch(mark):
            parts.append([])
        elif len(parts) == 2 and _REPLACE.fullmatch(mark):
            assert path is not None
            edits.append((path, "\n".join(parts[0]), "\n".join(parts[1])))
            path, parts = None, []
            if len(edits) > MAX_EDITS:
                return None
        else:
            parts[-1].append(line)
    return edits


def make_patch(files: Mapping[str, str], body: str, strip: int = 0) -> str | None:
    """SEARCH/REPLACE edits as one unified diff, None where it changes nothing or names what is not there.

    The first place counts where a search text begins a line; all are looked for in the files as they were.
    """
    edits = edits_in(body)
    if not edits:
        return None
    places: dict[str, list[tuple[int, int, str]]] = {}
    for path, search, replacement in dict.fromkeys(edits):
        begin = ("\n" + files.get(path, "")).find("\n" + search)
        if path not in files or not search or begin == -1 or search == replacement:
            return None
        places.setdefault(path, []).append((begin, begin + len(search), replacement))
    pieces: list[str] = []
    for path, found in places.items():
        changed = files[path]
        for begin, end, replacement in sorted(found, reverse=True):
            changed = changed[:begin] + replacement + changed[end:]
        name = "/".join(path.split("/")[strip:])
        old, new = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in (files[path], changed))
        pieces += difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", n=3)
    return "".join(p if p.endswith("\n") else f"{p}\n\\ No newline at end of file\n" for p in pieces) or None


def resolution(passed: Set[str], fail_to_pass: Set[str], pass_to_pass: Set[str]) -> float:
    """1 if all of both pass, 0.2 if all of pass_to_pass and some of fail_to_pass do, else 0."""
    if not pass_to_pass <= passed:
        return 0.0
    if fail_to_pass <= passed:
        return 1.0
    return PARTIAL if fail_to_pass & passed else 0.0
