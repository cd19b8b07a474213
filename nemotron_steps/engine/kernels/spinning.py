"""How long OpenMP's threads spin before they sleep; to be set before torch loads."""

import os
from collections.abc import MutableMapping

SPIN_COUNT = 2000
"""Iterations of libgomp: without, a tiny model trains 1.6 times slower."""


def bound_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set GOMP_SPINCOUNT, before torch is loaded, unless the user has set it or OMP_WAIT_POLICY."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
