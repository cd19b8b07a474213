"""Environment variables of this process, changed for a while."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_LAUNCHER = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE))|NODE_RANK|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|(TORCHELASTIC|OMPI_COMM_WORLD|MV2_COMM_WORLD|PMI|PMIX)_.*|MPI_LOCAL(RANKID|NRANKS)"
)
"""Names of the variables by which torchrun and MPI tell a process which of several ranks it is."""


def of_launcher() -> dict[str, None]:
    """Those of a launcher that this process inherited, for `variables_set`: a run makes its own groups of ranks."""
    return {name: None for name in os.environ if _LAUNCHER.fullmatch(name)}


@contextmanager
def variables_set(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables within, or unset them (None); afterwards each is what it was before, or gone."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
