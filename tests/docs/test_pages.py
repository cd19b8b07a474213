"""docs/pages.md: each row of its tables, tried; and what the pages tell the reader to do by hand."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.cli.main import nemotron
from tests.cli.conftest import in_process
from tests.docs.pages import ROOT, blocks, read
from tests.runs.trackers.test_wandb import artifacts_of, logs

PAGE = read("pages.md")
LINES = [line for line in PAGE.splitlines() if line.startswith(("| `", "| its "))]
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in LINES]
CODE = re.compile(r"`([^`]+)`")
TESTS = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
QUESTION = "Solve it.\n\n3 + 4?\n\nSay a number."


def row(number: int, **fields: Any) -> dict[str, Any]:
    question = f"{number} + {number}?"
    return {
        "responses_create_params": {"input": [{"role": "user", "content": question}]},
        "question": question,
        "expected_answer": str(2 * number),
        "agent_ref": {"name": "math_with_judge_simple_agent"},
        "uuid": str(number),
        **fields,
    }


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's folder: the page's env.toml, and the blend as `hf download` leaves it, one row in it a placeholder."""
    folder = tmp_path / "reader"
    folder.mkdir()
    (folder / "env.toml").write_text(blocks(PAGE, "toml")[0])
    write(folder / "rows.jsonl", [row(n) for n in range(40)])
    pointer = {"row": 0, "question_template": {"prefix": "Q: ", "suffix": "!"}}
    rows = [row(n) for n in range(150)]
    rows[70] = {"_hf_placeholder": pointer, "dataset": "dapo", "agent_ref": rows[70]["agent_ref"], "uuid": "70"}
    write(folder / "data_with_placeholders" / "rlvr1.jsonl", rows)
    write(folder / "dapo.jsonl", [{"prompt": [{"content": QUESTION}], "reward_model": {"ground_truth": "7"}}])
    for name in ("train-split.jsonl", "val-split.jsonl"):
        write(folder / name, [row(n) for n in range(3)])
    monkeypatch.chdir(folder)
    monkeypatch.setenv("STEPS_HOME", str(folder / "home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    return folder


def tried(cells: list[str]) -> tuple[dict[str, str], list[str]]:
    """The variables and words of what a row tries."""
    said = CODE.findall(cells[0] if cells[2] in ("planned", "run") else cells[2])[0]
    words = shlex.split(said.removeprefix("uv run ").replace("\\", ""))
    given = dict(word.split("=", 1) for word in words if re.match("[A-Z_]+=", word))
    words = [word for word in words if not re.match("[A-Z_]+=", word)]
    if cells[2] == "planned" and "--dry-run" not in words:
        words.append("--dry-run")
    return given, words


@pytest.mark.parametrize("cells", [each for each in ROWS if each[3]], ids=lambda cells: cells[0][:90])
def test_a_line_of_the_pages_does_what_the_table_says(
    cells: list[str], folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, (program, *words) = tried(cells)
    assert program == "nemotron"
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = in_process(nemotron, capsys)(*words)
    assert (found.code != 0) == cells[3].startswith("refused"), found.err
    output = " ".join((found.err if found.code else found.out).split())
    assert [said for said in CODE.findall(cells[3]) if said not in output] == [], output


def test_every_line_is_tried() -> None:
    assert len(ROWS) > 55
    for cells in ROWS:
        assert len(cells) == 4, cells
        named = re.fullmatch(r"`(test_\w+)`", cells[2])
        assert cells[3] or "not needed" in cells[1] or (named and f"def {named[1]}(" in TESTS), cells


def test_data_prep_fills_and_splits_as_the_page_does_by_hand(folder: Path, capsys: Any) -> None:
    (loop,) = [said for cells in ROWS for said in CODE.findall(cells[0]) if said.startswith("for f in ")]
    content = {"input": [{"role": "user", "content": "Q: 3 + 4?!"}]}
    filled = row(70, responses_create_params=content, question="Q: 3 + 4?!", expected_answer="7", dataset="dapo")
    write(folder / "data_filled" / "rlvr1.jsonl", [filled if n == 70 else row(n) for n in range(150)])
    subprocess.run(["bash", "-c", loop], cwd=folder, check=True)
    (command,) = [cells for cells in ROWS if "placeholders.dapo" in cells[2]]
    found = in_process(nemotron, capsys)(*tried(command)[1][1:])
    made = Path(re.search(r"^ +(\S*objects/\w+)$", found.out, re.M)[1])  # type: ignore[index]
    for name in ("train-split.jsonl", "val-split.jsonl"):
        texts = [(each / name).read_text() for each in (folder / "data" / "rlvr1", made)]
        # What asks a share of the training prompts for low effort is data preparation's own.
        theirs, ours = (text.replace("\\n\\n{reasoning effort: low}", "").splitlines() for text in texts)
        assert list(map(json.loads, ours)) == list(map(json.loads, theirs))
        assert len(ours) == (50 if name.startswith("train") else 100)


def test_the_scripts_of_the_nano3_page(folder: Path) -> None:
    """As the page types them, in the recipe's folder; what they log to W&B has the page's name."""
    recipe = folder / "recipe"
    shutil.copytree(ROOT / "examples" / "nano3_stage2_rl", recipe)
    shutil.copy(folder / "env.toml", recipe)

    def typed(start: str, *more: str) -> subprocess.CompletedProcess[str]:
        (said,) = [
            code for cells in ROWS for code in CODE.findall(cells[0]) if code.startswith(f"uv run python {start}")
        ]
        words = [sys.executable, *said.split()[3:], *more]
        return subprocess.run(words, cwd=recipe, capture_output=True, text=True)

    tree = recipe / "output" / "nano3" / "stage2_rl"
    early = typed("train.py", "--input", "policy=none")
    assert early.returncode == 2 and "stage2_rl is made by: python data_prep.py" in early.stderr
    tree.mkdir(parents=True)  # as the recipe's own script leaves it
    for flag, said in (("--run=x", "nano3 data prep rl --config config/data_prep.yaml --run=x"), ("a=1", "mv ")):
        refused = typed("data_prep.py", flag)
        assert refused.returncode == 2 and said in refused.stderr
    tree.rmdir()
    made = typed("data_prep.py", "input_path=../rows.jsonl", "sample=20")
    assert made.returncode == 0, made.stderr
    manifest = json.loads((tree / "manifest.json").read_text())
    assert [manifest[split] for split in ("train", "val", "test")] == [
        f"{n}/data.jsonl" for n in ("train", "val", "test")
    ]
    assert len((tree / manifest["train"]).read_text().splitlines()) == 16
    (run,) = (path for path in (folder / "home" / "runs").iterdir() if path.name in made.stdout)
    assert ("DataBlendsArtifact-rl", "dataset") in artifacts_of(logs(run)["data_prep/rl_prep"])
    planned = typed("train.py", "--dry-run", "--run", "YOUR-CLUSTER")
    assert "prompts ← output/nano3/stage2_rl" in planned.stdout and "num_nodes: 32" in planned.stdout
    refused = typed("train.py", "grpo.num_iterations=200")
    assert refused.returncode == 2 and "error[E303]: " in refused.stderr and "'policy' of" in refused.stderr
