"""What `steps new` writes, changed so that it breaks a rule, and the checks that notice."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemotron_steps.cli.scaffold import write
from nemotron_steps.testing.suite import Examination, State
from tests.testing.toy_packages import Change

CODE = "toykit_new/toykit_thing.py"

Package = Callable[..., Path]


def made(
    tmp_path: Path, package: Package, kind: str, changes: tuple[Change, ...], points: dict[str, str] | None = None
) -> Path:
    """What `steps new` writes, changed, as if it were installed; returns a folder for the kit."""
    root = tmp_path / "toykit_new"
    write(root, kind, "toykit_thing")
    files = {
        path.relative_to(root).as_posix(): path.read_text()
        for path in (root / "toykit_new").rglob("*")
        if path.is_file()
    }
    package(files, changes, points=points)
    (tmp_path / "kit").mkdir()
    return tmp_path / "kit"


def failed(examination: Examination[Any]) -> list[str]:
    """The checks that fail."""
    return [name for name, outcome in examination.outcomes().items() if outcome.state is State.FAILED]
