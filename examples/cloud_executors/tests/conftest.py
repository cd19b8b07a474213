from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.config.profiles import Profile
from nemotron_steps.runs.executors.base import Launch


@pytest.fixture
def launch_of(tmp_path: Path) -> Callable[[Profile], Launch]:
    """Profile → a launch of run r1 in the home tmp_path/home, submitted from tmp_path."""
    folder = tmp_path / "home/runs/r1"
    folder.mkdir(parents=True)
    words = ("--resume", "r1", "--home", str(tmp_path / "home"))
    return lambda profile: Launch("r1", folder, words, profile, tmp_path, {"STEPS_JOB": "r1"})


@pytest.fixture
def sdk() -> Callable[..., Any]:
    """(program, module that it needs, `request`) → what the program leaves in `answer`.

    It is run by the Python that CLOUD_SDKS names: the clouds' SDKs want other versions of packages than nemotron_steps
    has. Without CLOUD_SDKS by this one, and skipped if it has no such module.
    """
    python = os.environ.get("CLOUD_SDKS")

    def ran(program: str, module: str, request: Any) -> Any:
        if python is None and importlib.util.find_spec(module) is None:
            pytest.skip(f"no {module} is installed; CLOUD_SDKS=PYTHON names a Python that has it")
        lines = ["import json, sys", "request = json.load(sys.stdin)", program, "json.dump(answer, sys.stdout)"]
        done = subprocess.run(
            [python or sys.executable, "-c", "\n".join(lines)],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return ran
