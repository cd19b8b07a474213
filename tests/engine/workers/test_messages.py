"""What is said of workers, without Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.engine.workers import workers
from nemotron_steps.engine.workers.workers import Worker, places


def test_a_lost_worker_is_told_with_the_last_lines_of_what_it_said(tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    log.with_suffix(".out").write_text(":actor_name:x\nsaid first\n\n")
    log.write_text("".join(f":job_id:1\nline {n}\n" for n in range(20)))
    worker = Worker("rank 0", None, 7, "here", log=str(log), devices=("GPU-1", "GPU-2"))
    error = worker.lost("it died")
    assert str(error.found).splitlines() == [
        "it died; its last log lines:",
        *(f"    line {n}" for n in range(20 - workers._LOG_LINES, 20)),
    ]
    assert error.where == f"process 7 on here, log {log}"
    log.write_text("only\n")
    assert str(worker.lost("it died").found).endswith("\n    said first\n    only")
    bare = Worker("rank 1", None, 8, "there", log="")
    assert (bare.lost("it died").found, bare.lost("x").where) == ("it died", "process 8 on there")
    assert (worker.device, bare.device) == ("GPU-1", None)
    assert places([worker, bare]) == {"rank 0": "process 7 on here, GPU-1, GPU-2", "rank 1": "process 8 on there"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("The actor died.\n  exit detail: OOM Some common causes include: (1) x", "exit detail: OOM"),
        (
            "The actor died because of an error in its creation task, y\n  File z\nImportError: no ray ",
            "ImportError: no ray",
        ),
        ("plain\nmore", "plain"),
    ],
)
def test_of_what_ray_says_the_line_that_says_why_is_kept(text: str, said: str) -> None:
    assert workers._said(RuntimeError(text)) == said
