"""How long OpenMP's threads spin before they sleep. Nothing here may import torch: what is set counts when it loads."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

SPIN_COUNT = 2000
"""Iterations of libgomp: a few microseconds, about what lies between two small operations. Without spinning a tiny
model trains 1.6 times slower on two idle cores; with the default, 150 times as long, ten times slower where another
program wants a core."""


def bound_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set GOMP_SPINCOUNT in the environment of a process that has not loaded torch yet. What its user says, with that
    or OMP_WAIT_POLICY, stays."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
