"""A program that runs steps without `if __name__ == "__main__":`, as scripts of ten lines are written.

Processes that steps start anew import the program that started them, and would run it, and with it the steps, again.
They need nothing of it: what they call lies in this package, and reward functions go by file or module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def without_main_module() -> Iterator[None]:
    """Processes that multiprocessing starts within do not import this program."""
    program = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program
