"""Child processes that end when whoever started them does, however that ends. Linux."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """From now on the kernel kills this process when the thread that started it ends. Does nothing elsewhere."""
    parent = os.getppid()
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):  # no Linux
        return
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended in between
        os.kill(os.getpid(), signal.SIGKILL)
