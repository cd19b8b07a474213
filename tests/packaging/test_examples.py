"""The examples, built as wheels and installed in a clean environment beside ours: their own tests are green there."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT
from tests.runs.executors import sdks

EXAMPLES = sorted(path.parent.name for path in (ROOT / "examples").glob("*/pyproject.toml"))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_its_tests_are_green_in_a_clean_environment(commands: Path, tmp_path: Path, name: str) -> None:
    copy = tmp_path / "source" / name  # building writes into the folder
    shutil.copytree(ROOT / "examples" / name, copy)
    pip = [str(commands / "python"), "-m", "pip"]
    wheels = tmp_path / "wheels"
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(wheels), str(copy)], check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    site = tmp_path / "site"
    command = [*pip, "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "STEPS"))}
    if sdks.WANTED:
        environment["CLOUD_SDKS"] = str(sdks.PYTHON)
    shutil.copytree(copy / "tests", tmp_path / "tests")
    done = subprocess.run(
        [str(commands / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "tests")],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(site), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr  # 5 where there are no tests
