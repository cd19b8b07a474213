"""A real notebook: cells that train, in a kernel whose event loop runs all the time."""

import os
import shutil
from pathlib import Path

import pytest

from tests.api.conftest import ROWS, TINY

CELLS = (
    """
import re

DIGIT = re.compile(r"\\d")
WEIGHT = 2.0


def of(text):
    return WEIGHT * len(DIGIT.findall(text))


def digits(completions, **columns):
    return [of(text) for text in completions]


def some(completions, **columns):
    return [0.1 for _ in completions]
""",
    f"""
from nemotron_steps import GRPO

training = GRPO("own-model", {ROWS}, [digits, some], config="cpu", **{TINY})
training.plan()
""",
    "result = training.run()\nresult",
    "import asyncio\n\nawait asyncio.sleep(0.01)\nresult.plot()",
)


@pytest.mark.slow
@pytest.mark.chain
def test_cells_train_and_show_what_came_out(model: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    shutil.copytree(model, workplace / "own-model")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.setenv("IPYTHONDIR", str(workplace / "ipython"))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    resources = {"metadata": {"path": str(workplace)}}
    nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3", resources=resources).execute()

    planned, trained, plotted = (cell.outputs for cell in notebook.cells[1:])
    assert "rl/nemo_rl/rlvr" in planned[0].data["text/html"]
    text = "".join(output.text for output in trained if output.output_type == "stream")
    assert "step 2: reward" in text and "done in" in text and "\r" not in text
    assert "· done ·" in trained[-1].data["text/html"] and "reward/mean" in trained[-1].data["text/html"]
    assert plotted[0].data["text/html"].count('<svg class="curve"') >= 2
