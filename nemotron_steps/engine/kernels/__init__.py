"""Kernels: in Triton for GPUs, in C for float32 on CPU."""

import os
from collections.abc import MutableMapping

SPIN_COUNT = 2000
"""Iterations of libgomp before a thread sleeps: without, a tiny model trains 1.6 times slower."""


def bound_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set GOMP_SPINCOUNT, before torch is loaded, unless the user has set it or OMP_WAIT_POLICY."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
