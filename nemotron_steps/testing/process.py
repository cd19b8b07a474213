"""A process of its own for commands of `steps`, with a step's function watched: `python -m …process REQUEST RESULT`.

The request is JSON: `commands`, each a list of words after `steps`; `step`, whose function is watched; the fields of
Watch; `at_return`: the process is killed when the function has returned, before anything is committed. The result is
JSON too: a command's exit code and output each, and what was seen.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any


def main(request_path: str, result_path: str) -> None:
    """Run the commands of a request, one after the other, and write the result."""
    from nemotron_steps.cli.main import steps
    from nemotron_steps.testing.watching import Watch

    request = json.loads(Path(request_path).read_text())
    watch = Watch(
        tuple(request["allowed"]),
        request["inside"],
        request["package"],
        request.get("at_write", 0),
        request.get("signal", signal.SIGKILL),
    )
    _watch_step(request["step"], watch, at_return=request.get("at_return", False))
    done: list[dict[str, Any]] = []
    for words in request["commands"]:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = steps(words)
        done.append({"code": code, "out": out.getvalue(), "err": err.getvalue()})
        # After each, so that what ended the process is told from what went before it.
        Path(result_path).write_text(json.dumps({"commands": done, "seen": watch.seen.to_dict()}))


def _watch_step(step_id: str, watch: Any, *, at_return: bool) -> None:
    """Put the watch around the function of one step, wherever the runner takes it from."""
    from nemotron_steps.runs import execute, step_entry

    find = step_entry.imported

    def watched(reference: str, planned: Any) -> Any:
        function = find(reference, planned)
        if planned.step_id != step_id:
            return function

        def run(context: Any) -> None:
            with watch.watching():
                function(context)
            if at_return:
                os.kill(os.getpid(), signal.SIGKILL)

        return run

    vars(execute)["imported"] = watched


if __name__ == "__main__":
    main(*sys.argv[1:])
