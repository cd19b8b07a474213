"""Entry points of a group that installed distributions announce, in a few milliseconds where there are none.

`importlib.metadata` parses the metadata of every distribution, and is itself most of a quick command's time: it is
asked only where some `entry_points.txt` has the group's name in it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_METADATA = (".dist-info", ".egg-info")


def entry_points(group: str) -> tuple[EntryPoint, ...]:
    """As `importlib.metadata.entry_points(group=…)`."""
    if not _may_have(group):
        return ()
    from importlib import metadata

    return tuple(metadata.entry_points(group=group))


def _may_have(group: str) -> bool:
    """Whether a distribution on sys.path names the group, or is not a plain folder to look into."""
    for finder in sys.meta_path:  # other than Python's own, that know of distributions which are not on sys.path
        named = finder if isinstance(finder, type) else type(finder)
        if hasattr(finder, "find_distributions") and not named.__module__.startswith("_frozen_importlib"):
            return True
    wanted = group.encode()
    for entry in dict.fromkeys(sys.path):
        try:
            if entry.endswith(".egg") or any(wanted in text for text in _announcements(entry or ".")):
                return True
        except FileNotFoundError:
            continue
        except OSError:  # an archive, or a folder that cannot be listed
            return True
    return False


def _announcements(folder: str) -> Iterator[bytes]:
    """What the distributions of a folder announce."""
    with os.scandir(folder) as found:
        for each in found:
            if each.name.lower().endswith(_METADATA):
                with suppress(FileNotFoundError, NotADirectoryError):  # it announces nothing
                    yield Path(each.path, "entry_points.txt").read_bytes()
