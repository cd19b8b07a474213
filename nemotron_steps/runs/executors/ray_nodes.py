"""The script of a job whose every node runs the same: Ray over all of them, the run on the first."""

from __future__ import annotations

import shlex
from pathlib import Path

_RAY_PORT = 26379
"""Not Ray's usual one, which SkyPilot's own Ray may have."""


def on_every_node(command: str, nodes: int, *, folder: Path, head: str, rank: str) -> str:
    """A shell script: the first node runs the command, the others Ray until the first one's ends.

    Args:
        command: the run, quoted.
        folder: where to be, if the node sees it.
        head: shell word for the first node's address.
        rank: shell word for a node's number, from 0.
    """
    enter = f"[ ! -d {shlex.quote(str(folder))} ] || cd {shlex.quote(str(folder))}"
    if nodes == 1:
        return f"{enter}\nexec {command}"
    ray = "env -u RAY_ADDRESS ray start --disable-usage-stats"
    return "\n".join(
        [
            enter,
            f"head={head}",
            f'export RAY_ADDRESS="$head:{_RAY_PORT}"',
            f'if [ "{rank}" -eq 0 ]; then',
            f"    {ray} --head --port={_RAY_PORT} --include-dashboard=false",
            f"    exec {command}",
            "fi",
            f"until (exec 3<>/dev/tcp/$head/{_RAY_PORT}) 2>/dev/null; do sleep 1; done",
            f'{ray} --address="$RAY_ADDRESS"',
            f"while (exec 3<>/dev/tcp/$head/{_RAY_PORT}) 2>/dev/null; do sleep 5; done",
        ]
    )
