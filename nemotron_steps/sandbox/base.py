"""What a sandbox is: run one program on given files under limits, and say how it ended.

A program that fails, loops, or is killed is a result; a sandbox that cannot run or lets something through is a
SandboxError. Nothing a program wrote survives it except its output.
"""

import asyncio
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any

from nemotron_steps.errors import ConfigError

MIB = 1024 * 1024
PAGE = os.sysconf("SC_PAGE_SIZE")
CANARY = ".sandbox-probe-"
"""How the names of files begin that a sandbox may not see: while its probe works they lie in HOME, in the working
directory and in TMPDIR."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one run. Memory holds for each process's address space and for what the whole tree holds, its files in
    the working and temporary folders included."""

    wall_s: float = 10.0
    cpu_s: int = 60
    memory_bytes: int = 2048 * MIB
    processes: int = 64
    file_bytes: int = 64 * MIB
    scratch_bytes: int = 256 * MIB
    output_bytes: int = 1 * MIB
    open_files: int = 256


class Outcome(StrEnum):
    """How a run ended."""

    EXITED = "exited"
    """By itself; see exit_code (128 + n: signal n killed it, or it says so: the two cannot be told apart)."""
    TIMEOUT = "timeout"
    """wall_s or cpu_s was used up."""
    OUTPUT_LIMIT = "output_limit"
    """It wrote more than output_bytes and was stopped."""
    MEMORY_LIMIT = "memory_limit"
    """The tree's memory passed memory_bytes and was stopped."""
    FILES_LIMIT = "files_limit"
    """Its files were larger than scratch_bytes or file_bytes; it did not begin."""


@dataclass(frozen=True)
class SandboxResult:
    """How one run ended and what it wrote. Outputs are cut at Limits.output_bytes, invalid UTF-8 replaced."""

    outcome: Outcome
    exit_code: int | None
    stdout: str
    stderr: str
    wall_s: float

    @property
    def ok(self) -> bool:
        """Ended by itself with exit code 0."""
        return self.outcome is Outcome.EXITED and self.exit_code == 0


class Sandbox(ABC):
    """A place to run programs. `start` must have succeeded before `run`; runs may be concurrent."""

    def __init__(self, max_concurrency: int | None = None) -> None:
        self.slots = asyncio.Semaphore(max_concurrency or os.cpu_count() or 1)
        """Held while a program runs."""
        self.python = sys.executable
        """The interpreter inside the sandbox."""
        self._started = False
        self._start_lock = asyncio.Lock()

    async def start(self) -> None:
        """Probe the sandbox, once. UnsupportedError: what it is made of is absent; SandboxError: the probe got out."""
        async with self._start_lock:
            if not self._started:
                await self.probe()
                self._started = True

    @abstractmethod
    async def probe(self) -> None:
        """Try to break out; raise SandboxError naming what got through."""

    async def run(
        self,
        argv: Sequence[str] | None = None,
        *,
        code: str | None = None,
        stdin: str = "",
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits | None = None,
    ) -> SandboxResult:
        """Run a program, or Python source; exactly one of argv and code. `files`: relative path → content.

        Whatever a model wrote goes into `code`, `stdin` or the content of `files`: any text will do there. SandboxError
        where the sandbox itself failed, which no program can bring about.
        """
        if (argv is None) == (code is None):
            raise ValueError("give exactly one of argv and code")
        await self.start()
        limits = limits or Limits()
        laid = {path: encoded(content) for path, content in (files or {}).items()}
        for path in map(PurePosixPath, laid):
            if path.is_absolute() or ".." in path.parts or not path.parts:
                raise ValueError(f"sandbox files need relative paths inside the working folder, found {str(path)!r}")
        if code is not None:
            laid["__main__.py"] = encoded(code)
            argv = [self.python, "-I", "-B", "__main__.py"]
        assert argv is not None
        pages = sum(-(-len(content) // PAGE) for content in laid.values())
        if pages * PAGE > limits.scratch_bytes or any(len(content) > limits.file_bytes for content in laid.values()):
            return SandboxResult(Outcome.FILES_LIMIT, None, "", "", 0.0)
        async with self.slots:
            return await self.execute(list(argv), encoded(stdin), laid, limits)

    @abstractmethod
    async def execute(self, argv: list[str], stdin: bytes, files: Mapping[str, bytes], limits: Limits) -> SandboxResult:
        """Backend's part of run."""

    async def close(self) -> None:  # noqa: B027  an optional hook
        """Release what the backend holds."""


def create_sandbox(backend: str = "bubblewrap", **options: Any) -> Sandbox:
    """A sandbox by backend name: bubblewrap (default), docker, podman or apptainer (these need `image`)."""
    if backend == "bubblewrap":
        from nemotron_steps.sandbox.bubblewrap import BubblewrapSandbox

        return BubblewrapSandbox(**options)
    from nemotron_steps.sandbox.containers import ENGINES, ContainerSandbox

    for engine in ENGINES:
        if backend == engine:
            return ContainerSandbox(engine, **options)
    raise ConfigError(
        f"no sandbox backend is named `{backend}`", expected=f"bubblewrap, {', '.join(ENGINES)}", found=backend
    )


def encoded(text: str | bytes) -> bytes:
    """UTF-8. A lone surrogate, which a tokenizer can give, becomes bytes that the reader finds invalid, as they are."""
    return text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
