"""What providers' own SDKs make of a request. They want other versions of common packages than this project has, so
`make setup-test` gives them an environment of their own (requirements/sdks.txt)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PYTHON = Path(sys.prefix) / "sdks" / "bin" / "python"
WANTED = PYTHON.exists() or bool(os.environ.get("CI"))

needs_sdks = pytest.mark.skipif(not WANTED, reason="the providers' SDKs are not installed: make setup-test")


def asked(program: str, request: Any = None) -> Any:
    """What a program, with `request` at hand, leaves in `answer`. Its refusal fails the test."""
    lines = ["import json, sys", "request = json.load(sys.stdin)", program, "json.dump(answer, sys.stdout)"]
    done = subprocess.run(
        [str(PYTHON), "-c", "\n".join(lines)], input=json.dumps(request), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
