"""With CI set, nothing is skipped but what needs CUDA and what the host's kernel or processor lacks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

@pytest.mark.cuda
def test_cuda(): ...

@pytest.mark.cuda
@pytest.mark.skipif(True, reason="two GPUs")
def test_more_cuda(): ...

@pytest.mark.skipif(True, reason="this host's processor has no avx512vl")
def test_host(): ...

@pytest.mark.xfail
def test_expected(): assert False

@pytest.mark.skipif(True, reason="not today")
def test_mark(): ...

def test_package(): pytest.importorskip('no_such_package')

@pytest.fixture
def tool(): pytest.skip("no such tool")

def test_fixture(tool): ...
"""


@pytest.mark.parametrize(("ci", "failed", "skipped"), [("", 0, 7), ("true", 4, 3)])
def test_what_is_skipped_fails_in_ci(ci: str, failed: int, skipped: int, tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_none.py").write_text("import pytest\npytest.importorskip('no_such_package')\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    options = ["--continue-on-collection-errors", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    environment = {**os.environ, "CI": ci}
    done = subprocess.run(
        [*command, *options, str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (failed|errors|skipped|xfailed)", done.stdout)}
    assert counts.pop("failed", 0) + counts.pop("errors", 0) == failed, done.stdout
    assert counts == {"skipped": skipped, "xfailed": 1}
    assert bool(done.returncode) == bool(ci)
