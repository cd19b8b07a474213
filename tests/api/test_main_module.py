"""A script without a guard runs steps that start processes, and runs once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
print("the program runs")
from nemotron_steps import run
result = run("data_prep/import_prompts", inputs={"dataset": "rows"}, num_workers=2, progress=False)
print(result.status, result.summary["train_prompts"], __import__("__main__").__file__)
"""


@pytest.mark.slow
def test_a_script_without_a_guard_runs_once(workplace: Path) -> None:
    (workplace / "rows").mkdir()
    for part in range(3):
        rows = [json.dumps({"prompt": f"{part} + {n}?", "answer": str(part + n)}) for n in range(5)]
        (workplace / "rows" / f"part-{part}.jsonl").write_text("\n".join(rows) + "\n")
    (workplace / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == f"the program runs\ndone 15 {workplace / 'script.py'}\n"
