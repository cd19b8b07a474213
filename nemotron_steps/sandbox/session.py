"""Sandbox sessions: a sandbox that stays, in which commands see each other's changes to the files. A command that
fails, loops or floods is a result, and the session goes on; one that is over says so to every later command."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from nemotron_steps.errors import SandboxError
from nemotron_steps.sandbox.base import Limits, Outcome, SandboxResult
from nemotron_steps.sandbox.bubblewrap import WORK, BubblewrapSandbox
from nemotron_steps.sandbox.command_server import COMMAND_SERVER
from nemotron_steps.sandbox.containers import ENGINE_TIMEOUT_S, Engine, check_engine, isolation, remove
from nemotron_steps.sandbox.process import Rest, gone, let_go
from nemotron_steps.sandbox.seccomp import container_profile

GRACE_S = 10.0
"""For the server to answer once a command's time is over. Later than that, it has been stopped."""
WRITING_S = 60.0
LINE_BYTES = 256 << 20
STDERR_CHARACTERS = 4096
KILLED = 137


class SessionOverError(Exception):
    """The session takes no further command. EXITED: what ran in it has ended it."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"the sandbox session is over: {outcome.value}")
        self.outcome = outcome


class ServedSession(ABC):
    """A session whose commands a server inside runs (command_server.py), one at a time; `limits.wall_s` is its total
    time.

    A command is of the same user as the server, so it can kill it: the session is then over, which is the command's own
    loss and nobody else's. `slots`: held while a command runs. `work` and `command_s`: where, and for how many seconds,
    commands run that are not told.
    """

    def __init__(self, limits: Limits, slots: asyncio.Semaphore, work: str, command_s: float | None) -> None:
        self.limits = limits
        self._slots = slots
        self._starting: AbstractAsyncContextManager[object] = slots
        """Held until the session's first answer."""
        self._image: str | None = None
        self._hints: tuple[str, ...] = ()
        self._work = work
        self._command_s = limits.wall_s if command_s is None else command_s
        self._whole: asyncio.Future[SandboxResult] | None = None
        """How the session ended, once it has."""
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._one_at_a_time = asyncio.Lock()
        self._owed = 0
        """Answers to come, those to commands that were given up included."""

    @abstractmethod
    async def _begin(self) -> None:
        """Start the server: `_whole` first, then `_reader` and `_writer`."""

    async def __aenter__(self) -> Self:
        try:
            async with self._starting:
                await self._begin()
                # It is there once it has answered.
                job = {"argv": ["true"], "cwd": "/", "stdin": "", "wall_s": 60.0, "output_bytes": 1}
                await self._ask(job, ENGINE_TIMEOUT_S + GRACE_S)
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            if isinstance(error, SessionOverError):
                said = "" if self._whole is None or self._whole.cancelled() else self._whole.result().stderr[-500:]
                what = "a sandbox session ended before its first command"
                raise SandboxError(what, where=self._image, found=said, hints=self._hints) from error
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._whole is not None and not self._whole.done():
            self._whole.cancel()
            await asyncio.wait([self._whole])

    async def run(
        self, argv: Sequence[str], *, cwd: str | None = None, stdin: str = "", wall_s: float | None = None
    ) -> SandboxResult:
        """Run a command to its end, or SessionOverError. `wall_s`: until it is killed with what it started."""
        wall = self._command_s if wall_s is None else wall_s
        job: dict[str, object] = {"argv": list(argv), "cwd": cwd or self._work, "stdin": stdin}
        job |= {"wall_s": wall, "output_bytes": self.limits.output_bytes}
        async with self._one_at_a_time, self._slots:
            return await self._ask(job, wall + GRACE_S)

    async def write(self, files: Mapping[str, str]) -> None:
        """Write files, absolute path → text, and their folders. SandboxError if one could not be; SessionOverError."""
        async with self._one_at_a_time:
            result = await self._ask({"files": dict(files)}, WRITING_S)
        if not result.ok:
            raise SandboxError("could not write files in the sandbox", found=result.stderr[-500:])

    async def _ask(self, job: dict[str, object], wall_s: float) -> SandboxResult:
        if self._reader is None or self._writer is None or self._whole is None:
            raise RuntimeError("the session was not entered")
        if self._whole.done():
            raise self._over()
        line = b""
        self._writer.write(json.dumps(job).encode() + b"\n")
        self._owed += 1
        try:
            with suppress(ConnectionError, TimeoutError, ValueError):
                async with asyncio.timeout(wall_s):
                    await self._writer.drain()
                    while True:  # the last of those that are owed
                        line = await self._reader.readline()
                        self._owed -= 1
                        if not (line and self._owed):
                            break
        except asyncio.CancelledError:
            self._writer.write(b"\n")  # nobody waits for it any more: the server kills it
            raise
        if not line.endswith(b"\n"):
            # A server that was stopped holds the session; one that is gone ends it presently.
            gone_too = self._reader.at_eof()
            await asyncio.wait([self._whole], timeout=ENGINE_TIMEOUT_S if gone_too else 1.0)
            if not self._whole.done():
                self._whole.cancel()
                await asyncio.wait([self._whole])
            raise self._over()
        answer = json.loads(line)
        outcome = Outcome(answer["outcome"])
        code = answer["code"] if outcome is Outcome.EXITED else None
        return SandboxResult(outcome, code, answer["out"], answer["err"], answer["wall_s"])

    def _over(self) -> SessionOverError:
        assert self._whole is not None and self._whole.done(), "asked of a session that has ended"
        if self._whole.cancelled():
            return SessionOverError(Outcome.EXITED)
        return SessionOverError(self._whole.result().outcome)


class BubblewrapSession(ServedSession):
    """One set of namespaces and one folder in memory over many commands, with the bounds of one run."""

    def __init__(
        self, sandbox: BubblewrapSandbox, *, limits: Limits | None = None, command_s: float | None = None
    ) -> None:
        super().__init__(limits or Limits(), sandbox.slots, WORK, command_s)
        self._sandbox = sandbox
        self._given: tuple[int, ...] = ()
        self._rest: Rest | None = None

    async def __aenter__(self) -> BubblewrapSession:
        await self._sandbox.start()
        try:
            return await super().__aenter__()
        finally:
            # The other end, which had to stay open until there was somebody inside to hold it.
            for descriptor in self._given:
                os.close(descriptor)
            self._given = ()

    async def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        # Two numbers, because a file object that reads and writes would have to seek.
        other = os.dup(theirs.fileno())
        self._given = (theirs.detach(), other)
        ours.setblocking(False)
        argv = [self._sandbox.python, "-I", "-S", "-B", "-c", COMMAND_SERVER, *map(str, self._given), "alone"]
        self._rest = rest = Rest()
        whole = self._sandbox.execute_with(argv, b"", {}, self.limits, self._given, rest)
        self._whole = asyncio.ensure_future(whole)
        self._whole.add_done_callback(lambda _: rest.close())
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=LINE_BYTES)

    async def _ask(self, job: dict[str, object], wall_s: float) -> SandboxResult:
        if self._rest is None:
            raise RuntimeError("the session was not entered")
        self._rest.end()
        result = await super()._ask(job, wall_s)
        # The server has killed whatever the command left running. Whoever is cancelled does not know that.
        self._rest.begin()
        return result


class ContainerSession(ServedSession):
    """A container of an image (for Apptainer a .sif path or a URL) that stays: one program of the engine's over many
    commands, its server on the program's own input and output.

    The server is the container's first process, of the image's own user like its commands: nothing in the container can
    kill it, and it ends, and with it the container, when its input does, be this process killed. The image needs a
    Python (`python3`) for it. The probe of the sandbox is not passed: a repository's tests are freer."""

    _clock: asyncio.Timeout
    """Of the engine's own start, then of the session's time."""

    def __init__(
        self,
        engine: Engine,
        image: str,
        slots: asyncio.Semaphore,
        *,
        limits: Limits | None = None,
        command_s: float | None = None,
    ) -> None:
        # Where the image works; Apptainer would work where this process does.
        super().__init__(limits or Limits(), slots, "/" if engine == "apptainer" else ".", command_s)
        if engine != "apptainer":
            self._starting = nullcontext()  # it may wait for an image, and takes no core of this process's
            self._hints = (f"{engine} pull {image}",)
        self.engine = engine
        self.image = self._image = image
        self.name = f"steps-session-{secrets.token_hex(8)}"
        self._ending: asyncio.Future[None] | None = None

    def arguments(self, profile: str) -> list[str]:
        """The full command line."""
        limits = self.limits
        server = ("-I", "-c", COMMAND_SERVER, "0", "1")
        if self.engine != "apptainer":
            return [
                *(self.engine, "run", "--rm", "--interactive", "--name", self.name),
                *isolation(self.engine, limits, profile),
                *("--entrypoint", "python3", self.image, *server, "alone"),
            ]
        return [
            *("apptainer", "--quiet", "exec", "--containall", "--cleanenv", "--no-home", "--no-privs"),
            *("--security", f"seccomp:{profile}", "--net", "--network", "none", "--writable-tmpfs"),
            *("--memory", str(limits.memory_bytes), "--pids-limit", str(limits.processes)),
            # Ends it where this process is killed and its input stays open.
            *(self.image, "timeout", "-s", "KILL", str(limits.wall_s + ENGINE_TIMEOUT_S)),
            *("python3", *server, "together"),
        ]

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        # An image may have to be fetched and unpacked: the session's time begins with its first answer.
        with suppress(RuntimeError):  # it is over already
            self._clock.reschedule(asyncio.get_running_loop().time() + self.limits.wall_s)
        return self

    async def _begin(self) -> None:
        await check_engine(self.engine)
        folder, pipe = tempfile.TemporaryDirectory(prefix="session-"), asyncio.subprocess.PIPE
        profile = Path(folder.name, "seccomp.json")
        profile.write_text(json.dumps(container_profile(session=True)))
        with Path(folder.name, "stderr").open("wb") as said:
            process = await asyncio.create_subprocess_exec(
                *self.arguments(str(profile)),
                stdin=pipe,
                stdout=pipe,
                stderr=said,
                limit=LINE_BYTES,
                start_new_session=True,
                cwd=folder.name,  # Podman's monitor leaves a file `oom` there
            )
        self._reader, self._writer = process.stdout, process.stdin
        self._clock = asyncio.timeout(ENGINE_TIMEOUT_S)
        self._whole = asyncio.ensure_future(self._hold(process, folder))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        if self._ending is not None:
            await asyncio.wait([self._ending])

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """All of it: what the engine has started need not end with the process that was started here."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if self.engine != "apptainer":
            await remove(self.engine, self.name)
        await gone(process)
        await let_go(process)

    async def _hold(
        self, process: asyncio.subprocess.Process, folder: tempfile.TemporaryDirectory[str]
    ) -> SandboxResult:
        begun = asyncio.get_running_loop().time()
        with folder:
            outcome = Outcome.EXITED
            try:
                async with self._clock:
                    code = await gone(process)
                outcome = Outcome.MEMORY_LIMIT if code in (KILLED, -9) else Outcome.EXITED
            except TimeoutError:
                outcome = Outcome.TIMEOUT
            finally:
                # Whoever cancels a second time leaves neither the container nor the engine's program behind.
                self._ending = asyncio.ensure_future(self._end(process))
                await asyncio.shield(self._ending)
            text = Path(folder.name, "stderr").read_text(errors="replace")[-STDERR_CHARACTERS:]
        seconds = asyncio.get_running_loop().time() - begun
        return SandboxResult(outcome, process.returncode if outcome is Outcome.EXITED else None, "", text, seconds)
