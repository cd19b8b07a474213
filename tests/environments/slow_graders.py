"""A grader that does what it is told."""

import ctypes
import os
import signal
import time
from typing import Any


def answer(request: Any) -> Any:
    match request:
        case "spin":
            while True:
                pass
        case "one long operation":  # holds the interpreter's lock
            return len(str(3 ** (10**9)))
        case "grow":  # bytes of nothing take address space, not memory
            return len([bytes(2**28) for _ in range(100)])
        case "die":
            os._exit(7)
        case "crash":
            ctypes.string_at(0)
        case "be killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sleep":
            time.sleep(600)
        case "raise":
            raise KeyError("gold")
        case "print":
            print("not an answer")
    return request
