"""The start-up probe: a hostile program (`attempts.py`) that tries to get out, and a host that knows what it must not
have reached. It fails closed: what was reached, what could not be tried and a report that is not there all refuse."""

import asyncio
import json
import os
import secrets
import socket
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from nemotron_steps.errors import SandboxError
from nemotron_steps.sandbox.base import CANARY, MIB, Limits, Outcome, Sandbox, SandboxResult
from nemotron_steps.sandbox.seccomp import (
    ATTRIBUTES,
    DANGEROUS,
    NETWORK,
    SHARING,
    allowed,
    architecture,
    calls,
    refusals,
)

HOST_PATHS = ("/etc/shadow", "/etc/passwd", "/etc/ssh", "/root/.ssh", "/home", "/var", "/run", "/sys", "/boot")
"""Host paths that a sandbox without an image of its own must not show at all."""

SMALL = Limits(wall_s=30.0, memory_bytes=256 * MIB, processes=24, scratch_bytes=4 * MIB, output_bytes=MIB // 4)


async def probe(
    sandbox: Sandbox, *, host_paths: tuple[str, ...] = (), hidden_memory: bool = True, limits: Limits = SMALL
) -> None:
    """Run the attempts; SandboxError naming what got through. `host_paths` must not exist inside."""
    machine, secret = architecture(), secrets.token_hex(16)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind("\0" + secret)
        abstract.listen()
        folders = (Path(tempfile.gettempdir()), Path.cwd(), Path.home())
        files = [_canary_file(stack, folder) for folder in folders if os.access(folder, os.W_OK)]
        os.environ["SANDBOX_PROBE_CANARY"] = secret
        stack.callback(os.environ.pop, "SANDBOX_PROBE_CANARY", None)
        known = calls(machine, NETWORK, ATTRIBUTES, SHARING, DANGEROUS)
        host = {
            "port": listener.getsockname()[1],
            "files": files,
            "paths": list(host_paths),
            "secret": secret,
            "pid": os.getpid(),
            "cmdline": Path("/proc/self/cmdline").read_text(errors="replace"),
            "scratch_mib": limits.scratch_bytes // MIB,
            "memory": limits.memory_bytes * 2,
            "hidden_memory": hidden_memory,
            "processes": limits.processes,
            "machine": machine,
            "clone": allowed(machine)["clone"],
            "allowed": sorted(allowed(machine).values()),
            "keyctl": known["keyctl"],
            "answers": refusals(machine),
            "names": {str(number): name for name, number in known.items()},
        }
        alone, together = await asyncio.gather(
            _run(sandbox, host, secret, limits),
            _run(sandbox, {"together": limits.memory_bytes // 5 * 2}, secret, limits),
        )
    through = _reached(alone, secret)
    if together.outcome is not Outcome.MEMORY_LIMIT and together.stdout not in ("1\n", "2\n"):
        said = together.stdout.strip() or together.outcome.value
        through["memory: several processes"] = f"three with two fifths of the limit each: {said}"
    left = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if secret.encode() in (folder / "cmdline").read_bytes():
                left.append(int(folder.name))
    if left:
        through["left behind"] = f"processes {left}"
    if through:
        raise SandboxError(
            "the sandbox lets model-written code out; refusing to run any",
            expected="no network, no host files, no privileges, few system calls, bounded processes and memory",
            found="; ".join(f"{name} ({how})" for name, how in sorted(through.items())),
        )


async def _run(sandbox: Sandbox, host: dict[str, Any], secret: str, limits: Limits) -> SandboxResult:
    source = Path(__file__).with_name("attempts.py").read_bytes()
    argv = [sandbox.python, "-I", "-B", "probe.py", secret]
    return await sandbox.execute(argv, json.dumps(host).encode(), {"probe.py": source}, limits)


def _reached(result: SandboxResult, secret: str) -> dict[str, str]:
    """Attempt → what it reached, from a report that must be whole."""
    try:
        report = json.loads(result.stdout) if result.ok else {}
    except ValueError:
        report = {}
    if report.get("secret") != secret:
        raise SandboxError(
            "the sandbox's start-up probe did not run to its end",
            found=f"{result.outcome.value}, exit code {result.exit_code}: {(result.stderr or result.stdout)[-400:]}",
        )
    return {name: how for name, how in report["results"].items() if how is not None}


def _canary_file(stack: ExitStack, folder: Path) -> str:
    path = folder / f"{CANARY}{secrets.token_hex(8)}"
    path.write_text("canary")
    stack.callback(path.unlink, missing_ok=True)
    path.chmod(0o644)
    return str(path)
