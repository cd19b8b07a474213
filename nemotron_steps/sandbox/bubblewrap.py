"""The default sandbox: bubblewrap with its own namespaces, on a host of which only the system folders and the Python
installation can be seen, read-only (docs/sandbox.md). A launcher inside tells on a channel, which the program does not
have, that it was reached."""

import fcntl
import itertools
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nemotron_steps.errors import SandboxError, UnsupportedError
from nemotron_steps.sandbox.base import Limits, Outcome, Sandbox, SandboxResult
from nemotron_steps.sandbox.memory import MemoryGroup
from nemotron_steps.sandbox.probe import HOST_PATHS, probe
from nemotron_steps.sandbox.process import READY, Rest, Watch, run_process
from nemotron_steps.sandbox.seccomp import architecture, filter_program

WORK = "/scratch"
TEMPORARY = "/tmp"
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime")
DEVICES = ("null", "full", "random", "urandom")
"""Not zero: shared mappings of it are memory that nobody counts."""
HIDDEN = ("keys", "key-users", "kcore", "kallsyms", "kmsg", "kpagecount", "kpageflags", "sched_debug", "timer_list")

ONES = dict.fromkeys(("PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""One thread each: thread pools would eat the process limit and the address space."""

_NAMESPACES = (
    "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0   # as root, where the host forbids user namespaces",
    "sysctl -w kernel.unprivileged_userns_clone=1               # the same on other distributions",
)

FIRST_UID = 0x4000_0000
"""User ids from here on belong to no one: each concurrent run as root takes its own."""
UIDS_PER_PROCESS = 4096
_uids = itertools.cycle(range(UIDS_PER_PROCESS))
LOWEST_CHANNEL = 10
"""The shell's own descriptors, of which the launcher takes one, are below."""

# On the host: joins the cgroup if there is one and opens the channel, whose number $0 bubblewrap closes inside, as 3.
_OUTER = 'exec 3>"/proc/self/fd/$0" && if [ -n "$1" ]; then echo 0 > "$1"; fi && shift && exec "$@"'
# Inside. Where the parent is dead, the channel has no reader and nothing begins.
_LAUNCH = f'echo {READY.decode()} >&3 || exit 1; exec 3>&-; exec "$@"'


@dataclass(frozen=True)
class Descriptors:
    """Open files that bubblewrap is given: it reads or writes them itself and closes them inside."""

    channel: int
    seccomp: int
    files: Mapping[str, int]


class BubblewrapSandbox(Sandbox):
    """See the module docstring. `read_only`: further host folders to show, read-only, at the same path."""

    def __init__(self, max_concurrency: int | None = None, read_only: tuple[str, ...] = ()) -> None:
        super().__init__(max_concurrency)
        self._read_only = tuple(read_only)

    async def probe(self) -> None:
        """See Sandbox.probe; the attempts are in sandbox.probe."""
        packages = {"bwrap": "bubblewrap", **dict.fromkeys(("prlimit", "setsid", "setpriv"), "util-linux")}
        for program, package in packages.items():
            if shutil.which(program) is None:
                raise UnsupportedError(
                    f"running model-written code needs `{program}`, which is not installed",
                    found=f"no `{program}` on PATH",
                    hints=(f"apt-get install -y {package}",),
                )
        await probe(self, host_paths=HOST_PATHS)

    async def execute(self, argv: list[str], stdin: bytes, files: Mapping[str, bytes], limits: Limits) -> SandboxResult:
        """See Sandbox.execute."""
        return await self.execute_with(argv, stdin, files, limits)

    async def execute_with(
        self,
        argv: list[str],
        stdin: bytes,
        files: Mapping[str, bytes],
        limits: Limits,
        kept_open: Sequence[int] = (),
        rest: Rest | None = None,
    ) -> SandboxResult:
        """execute, for a program that also gets descriptors of this process, under the same numbers, and may `rest`."""
        with ExitStack() as stack:
            status, descriptors = stack.enter_context(self._open(files))
            group = stack.enter_context(MemoryGroup.try_to_make(limits.memory_bytes))
            ended = await run_process(
                self.command(argv, limits, descriptors, group),
                stdin,
                wall_s=limits.wall_s,
                output_bytes=limits.output_bytes,
                environment={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
                pass_fds=[descriptors.channel, descriptors.seccomp, *descriptors.files.values(), *kept_open],
                watch=Watch(status, None if group else limits.memory_bytes, (WORK, TEMPORARY), rest),
            )
            if not ended.ready and ended.outcome is not Outcome.MEMORY_LIMIT:
                raise SandboxError(
                    "the sandbox could not be set up",
                    found=f"{ended.outcome.value}, exit code {ended.exit_code}: {ended.stderr[:500]}",
                    hints=() if os.geteuid() == 0 else _NAMESPACES,
                )
            if group is not None and group.was_full():
                return ended.result(Outcome.MEMORY_LIMIT)
        return ended.result(Outcome.TIMEOUT if ended.spent_processor_time(limits) else None)

    @contextmanager
    def _open(self, files: Mapping[str, bytes]) -> Iterator[tuple[int, Descriptors]]:
        with ExitStack() as stack:

            def held(descriptor: int) -> int:
                moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, LOWEST_CHANNEL)
                os.close(descriptor)
                stack.callback(os.close, moved)
                return moved

            def content(data: bytes) -> int:
                descriptor = held(os.memfd_create("sandbox"))
                with open(descriptor, "wb", closefd=False) as handle:
                    handle.write(data)
                os.lseek(descriptor, 0, os.SEEK_SET)
                return descriptor

            status, channel = map(held, os.pipe())
            program = content(self.filter_program())
            yield status, Descriptors(channel, program, {path: content(data) for path, data in files.items()})

    def filter_program(self) -> bytes:
        """The system call filter."""
        return filter_program(architecture())

    def command(
        self, argv: Sequence[str], limits: Limits, given: Descriptors, group: MemoryGroup | None = None
    ) -> list[str]:
        """The full command line."""
        root = os.geteuid() == 0
        command = ["prlimit", "--core=1:1", "--", "/bin/sh", "-c", _OUTER]
        command += [str(given.channel), group.procs if group else ""]
        command += [*self._bubblewrap(limits, given, root), "--"]
        command += ["prlimit", f"--as={limits.memory_bytes}", f"--nproc={limits.processes}"]
        command += [f"--fsize={limits.file_bytes}", f"--nofile={limits.open_files}"]
        # SIGXCPU at the first, SIGKILL at the second.
        command += [f"--cpu={limits.cpu_s}:{limits.cpu_s + 1}", "--"]
        # The program cannot signal the group, which is also that of bubblewrap on the host.
        command += ["setsid"]
        if root:
            uid = str(FIRST_UID + (os.getpid() % 65536) * UIDS_PER_PROCESS + next(_uids))
            command += ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups", "--no-new-privs"]
            command += ["--inh-caps=-all", "--bounding-set=-all", "--"]
        return [*command, "/bin/sh", "-c", _LAUNCH, "sh", *argv]

    def _bubblewrap(self, limits: Limits, given: Descriptors, root: bool) -> list[str]:
        # Not --new-session: until its first process has asked to die with its parent, only the process group has it.
        command = ["bwrap", "--die-with-parent", "--clearenv", "--cap-drop", "ALL"]
        command += ["--hostname", "sandbox", "--json-status-fd", str(given.channel), "--seccomp", str(given.seccomp)]
        if root:
            # No user namespace, because setpriv below needs real user ids; it drops these capabilities as well.
            command += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
            command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
        else:
            command += ["--unshare-all", "--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534"]
        folders = [os.path.dirname(sys.executable), "/usr/local/bin", "/usr/bin", "/bin"]
        variables = {"PATH": os.pathsep.join(folders), "HOME": WORK, "TMPDIR": WORK, "LANG": "C.UTF-8"}
        for name, value in (variables | ONES).items():
            command += ["--setenv", name, value]
        for folder in SYSTEM_FOLDERS:
            if os.path.islink(folder):
                command += ["--symlink", os.readlink(folder), folder]
            elif os.path.isdir(folder):
                command += ["--ro-bind", folder, folder]
        scratch = ["--perms", "1777", "--size", str(limits.scratch_bytes), "--tmpfs"]
        # Before the read-only folders, which may themselves lie under the temporary folder.
        command += [*scratch, TEMPORARY]
        # Where this interpreter lives, unless the system folders hold it already.
        homes = {sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent.parent)}
        python = sorted(home for home in homes if not home.startswith(("/usr/", "/bin")) and home != "/usr")
        shown = [path for path in (*SYSTEM_FILES, *python, *self._read_only) if os.path.exists(path)]
        # bubblewrap would make missing parents accessible to root alone.
        for parent in _parents(shown, but=("/", TEMPORARY)):
            command += ["--perms", "0755", "--dir", parent]
        for path in shown:
            command += ["--ro-bind", path, path]
        command += ["--proc", "/proc"]
        for name in HIDDEN:
            if os.path.exists(f"/proc/{name}"):
                command += ["--ro-bind", "/dev/null", f"/proc/{name}"]
        command += ["--perms", "0755", "--dir", "/dev"]
        for name in DEVICES:
            command += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            command += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
        command += ["--symlink", "/proc/self/fd", "/dev/fd", *scratch, WORK]
        # Whoever the program runs as may change what was laid for it.
        for folder in _parents(given.files, but=(".",)):
            command += ["--perms", "0777", "--dir", f"{WORK}/{folder}"]
        for path, descriptor in given.files.items():
            command += ["--perms", "0666", "--file", str(descriptor), f"{WORK}/{path}"]
        return [*command, "--remount-ro", "/", "--chdir", WORK]


def _parents(paths: Iterable[str], *, but: tuple[str, ...]) -> list[str]:
    return sorted({str(parent) for path in paths for parent in PurePosixPath(path).parents} - set(but))
