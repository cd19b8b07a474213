"""Processes that end with whoever started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

CHILD = "from nemotron_steps.engine.workers.lifetime import end_with_parent; end_with_parent(); import os, time\n"
CHILD += "print(os.getpid(), flush=True); time.sleep(60)"
PARENT = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {CHILD!r}]); time.sleep(60)"


def test_a_child_is_killed_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, 0)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.communicate()
    status = Path(f"/proc/{child}/stat")
    until = time.monotonic() + 20
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] not in "ZX" and time.monotonic() < until:
        time.sleep(0.01)
    assert time.monotonic() < until
