"""SWE-RL's two kinds of rows judged in real containers of Docker and Podman."""

import asyncio
import json
from typing import Any

import pytest

from nemotron_steps.environments.base import GradeResult, Response, Session
from nemotron_steps.environments.code.swerl_gen import make_patch
from nemotron_steps.environments.registry import create
from tests.containers.engines import Engines
from tests.environments.swe.tasks import CALC, TESTS

pytestmark = pytest.mark.containers

FILES = {"pkg/calc.py": CALC}
FIX = """### pkg/calc.py
<<<<<<< SEARCH
def add(a, b):
    return a - b
=======
def add(a, b):
    return a + b
>>>>>>> REPLACE
"""
NAMES = "tests/test_calc.py::TestCalc::{}"
CONDA = "mkdir -p /opt/miniconda3/bin && echo 'conda() { true; }' > /opt/miniconda3/bin/activate"
"""What an image of the benchmark has, and the tests' has not."""
REPRODUCTION = """```python
import sys
from pkg.calc import add
sys.exit(0 if add(2, 3) == 5 else 2)
```"""


LOOKS = """```python
import subprocess, sys
sys.exit(0 if subprocess.run(["git", "diff", "--quiet"]).returncode else 2)
```"""


def judged(engine: str, image: str, mode: str, answer: str) -> GradeResult:
    instance = {
        "FAIL_TO_PASS": [NAMES.format("test_add")],
        "PASS_TO_PASS": [NAMES.format("test_sub")],
        "setup_script": f"{CONDA}\nmkdir tests && cat > tests/test_calc.py <<'END'\n{TESTS}END",
        "test_script": "python -m pytest -rA tests",
        "patch": make_patch(FILES, FIX),
    }
    row: dict[str, Any] = {
        "responses_create_params": {"input": "Fix."},
        "metadata": {"image": image, "relevant_file_contents": json.dumps(FILES)},
        "instance": instance,
        "mode": mode,
    }
    environment = create("swerl_gen", {"engine": engine, "sandbox_timeout": 60.0})
    return asyncio.run(environment.verify(row, Response(answer), Session()))


PRINTED = """\
import glob, os, re
names = [(f, n) for f in glob.glob('tests/test_*.py') for n in re.findall(r'def (test_\\w+)', open(f).read())]
lines = ''.join(f'\\nPASSED {f}::TestCalc::{n}' for f, n in names) + '\\n'
for descriptor in range(1, 20):
    try:
        os.write(descriptor, lines.encode())
    except OSError:
        pass
"""


def forged(text: str, operator: str) -> str:
    """A forgery above the function, with its fault (-) or the fix (+)."""
    edit = FIX.replace("def add(a, b):\n    return a + b", f"{text}def add(a, b):\n    return a {operator} b")
    return f"<solution>{edit}</solution>"


@pytest.mark.parametrize(
    ("mode", "answer", "reward"),
    [
        ("eval", f"<solution>{FIX}</solution>", 1.0),
        ("eval", f"<solution>{FIX.replace('a + b', 'b - a')}</solution>", 0.0),
        ("eval", forged(PRINTED, "-"), 0.0),
        ("eval", forged(PRINTED, "+"), 1.0),
        ("repro-gen", REPRODUCTION, 1.0),
        ("repro-gen", LOOKS, 0.0),
    ],
    ids=["a fix", "no fix", "lines printed", "and a fix", "a reproduction", "a look at git"],
)
def test_an_answer_is_judged_in_a_container(
    real_engine: str, container_engines: Engines, mode: str, answer: str, reward: float
) -> None:
    verdict = judged(real_engine, container_engines.image, mode, answer)
    assert verdict.reward == reward, verdict
    assert container_engines.names(real_engine) == []
