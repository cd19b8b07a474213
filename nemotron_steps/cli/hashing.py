"""A bar on the terminal while a large folder of the user's is hashed. It goes away when that is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemotron_steps.artifacts.files import Progress
from nemotron_steps.cli.terminal import printable


@contextmanager
def hashing_bar(path: Path, size: int) -> Iterator[Progress]:
    """See ShowHashing."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(f"hashing {escape(printable(path.name))}, once", total=size)
        yield lambda done, total: bars.update(task, completed=done, total=total)
