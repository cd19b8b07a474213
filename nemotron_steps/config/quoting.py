"""Texts as values of an override, in Hydra's grammar."""

from __future__ import annotations

import re


def quoted(text: str) -> str:
    """A text in quotes that Hydra reads as it is: a backslash counts double only before a quote."""
    escaped = re.sub(r"(\\*)'", lambda found: found[1] * 2 + r"\'", text)
    tail = len(escaped) - len(escaped.rstrip("\\"))
    return "'" + escaped + "\\" * tail + "'"
