"""What a watched function is seen to write: its own files, and not the canaries of a sandbox's probe."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

WATCHED = """
import json, sys
from contextlib import ExitStack
from pathlib import Path
from nemotron_steps.sandbox.probe import _canary_file
from nemotron_steps.testing.watching import Watch

watch = Watch((), "work", "package")
with watch.watching(), ExitStack() as stack:
    exec(sys.argv[1])
print(json.dumps(watch.seen.written))
"""


@pytest.mark.parametrize(
    ("code", "written"), [("Path('mine').touch()", ["mine"]), ("_canary_file(stack, Path.cwd())", [])]
)
def test_a_sandbox_may_look_whether_the_folders_of_its_user_are_hidden(
    code: str, written: list[str], tmp_path: Path
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WATCHED, code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(ran.stdout) == [str(tmp_path / name) for name in written]
    assert [file.name for file in tmp_path.iterdir()] == written
