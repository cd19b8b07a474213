"""`steps index`: one page with every run and artifact of the home."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nemotron_steps.cli.errors import print_json
from nemotron_steps.cli.request import Workbench
from nemotron_steps.cli.summary import shown_path
from nemotron_steps.cli.terminal import Terminal

if TYPE_CHECKING:
    import argparse


def index(arguments: argparse.Namespace) -> int:
    """`steps index [--out FILE]`: write the page and say where it is."""
    from nemotron_steps.errors import StorageError
    from nemotron_steps.runs.index_page import write_index

    store = Workbench(arguments.home).store
    out = Path(arguments.out).expanduser() if arguments.out is not None else None
    try:
        path = write_index(store, out)
    except OSError as error:
        raise StorageError(
            "the page cannot be written",
            where=str(out or store.backend.scratch),
            found=error.strerror or str(error),
            hints=("steps index --out FILE",),
        ) from error
    if arguments.as_json:
        print_json({"index": str(path)})
    else:
        Terminal.of().print(shown_path(path))
    return 0
