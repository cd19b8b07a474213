"""An error about a request says what to paste, and what it says to paste is a command that works."""

import ast
import subprocess
from pathlib import Path

import pytest

import nemotron_steps
from nemotron_steps.engine.rollouts.data import read_rows
from nemotron_steps.errors import DataError, show_line

ROOT = Path(nemotron_steps.__file__).parent


@pytest.mark.parametrize("layer", ["engine", "steps"])
def test_what_is_wrong_with_a_request_comes_with_a_hint(layer):
    without = []
    for file in sorted((ROOT / layer).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                named = {keyword.arg for keyword in node.keywords}
                request = node.func.id in ("ConfigError", "DataError", "UnsupportedError", "ArtifactError")
                if request and not named & {"hints", None}:
                    without.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not without


def test_no_command_of_a_hint_is_elided():
    elided = []
    for file in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and text.startswith("steps run ..."):
                elided.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not elided


def hint_works(hint: str) -> str:
    return subprocess.run(["bash", "-c", hint], capture_output=True, text=True, check=True).stdout


def test_a_row_at_fault_can_be_shown(tmp_path):
    file = tmp_path / "a folder" / "rows.jsonl"
    file.parent.mkdir()
    file.write_text('{"n": 1}\n[2]\n{"n": 3}\n')
    with pytest.raises(DataError, match="not a JSON object") as caught:
        read_rows(file)
    (hint,) = caught.value.hints
    assert hint_works(hint) == "[2]\n"
    assert show_line("row") == show_line("C:/x") == ()


def test_a_file_cut_off_in_its_last_line_can_be_read_without_it(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"n": 1}\n{"n": ')
    with pytest.raises(DataError, match="truncated") as caught:
        read_rows(file)
    hint_works(caught.value.hints[0])
    assert [row.row for row in read_rows(file)] == [{"n": 1}]
