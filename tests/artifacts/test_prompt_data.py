"""Who speaks in a user's prompts, told from the first rows of every known layout."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.artifacts.prompt_data import looks_like, names_no_agent, roles_in
from nemotron_steps.rows.layouts import QUESTIONS

USER, SYSTEM = {"role": "user", "content": "x"}, {"role": "system", "content": "y"}
SAID, RESULT = {"role": "assistant", "content": "z"}, {"role": "tool", "content": "w"}


@pytest.mark.parametrize(
    ("row", "roles"),
    [
        ({"prompt": "x"}, ("user",)),
        ({"prompt": [SYSTEM, USER]}, ("system", "user")),
        ({"messages": [USER, SAID, USER]}, ("user", "assistant")),
        ({"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]}, ("user",)),
        ({"responses_create_params": {"input": "x", "instructions": "y"}}, ("system", "user")),
        (
            {"responses_create_params": {"input": [USER, SAID, {"type": "function_call_output", "output": "1"}]}},
            ("user", "assistant", "tool"),
        ),
        ({"prompt": "", "conversations": []}, ()),
        ({"prompt": "x", "tools": [{"name": "add"}]}, ("user", "tools")),
        ({"responses_create_params": {"input": "x", "tools": [{"name": "add"}]}}, ("user", "tools")),
    ],
)
def test_roles_of_a_row(row: dict[str, Any], roles: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert roles_in(tmp_path / "rows.jsonl") == roles == roles_in(tmp_path)


@pytest.mark.parametrize("column", QUESTIONS)
def test_every_column_that_is_imported_is_known_to_the_plan(column: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({column: "x", "answer": "y"}) + "\n")
    assert looks_like("prompt_data", tmp_path / "rows.jsonl")


NAMED = {"prompt": "x", "agent_ref": {"name": "mcqa"}}


@pytest.mark.parametrize(("row", "none"), [({"prompt": "x"}, True), (NAMED, False)])
def test_rows_that_name_no_agent_are_seen_at_a_glance(row: dict[str, Any], none: bool, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "rows.csv").write_text(",".join(row) + "\nx,{}\n")
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    for name in ("rows.jsonl", "rows.csv", "rows.parquet"):
        assert names_no_agent(tmp_path / name) is none
        (tmp_path / f"of {name}").mkdir()
        (tmp_path / name).rename(tmp_path / f"of {name}" / name)
        assert names_no_agent(tmp_path / f"of {name}") is none


@pytest.mark.parametrize(
    ("files", "none"),
    [
        ({"pass_rates.csv": "prompt,rate\nx,1\n", "train.jsonl": '{"agent_ref": {}}\n'}, False),
        ({"heldout.jsonl": "{}\n", "train.jsonl": '{"agent_ref": {}}\n'}, False),
        ({"heldout.jsonl": "", "pass_rates.csv": "agent_ref\nx\n", "train.jsonl": "{}\n"}, True),
        ({"a.csv": "prompt\nx\n", "b.csv": "prompt,agent_ref\nx,\n"}, False),
    ],
    ids=["a report beside", "held-out rows graded otherwise", "an empty split", "tables"],
)
def test_a_folder_names_no_agent_if_none_of_its_files_of_rows_does(
    files: dict[str, str], none: bool, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert names_no_agent(tmp_path) is none


@pytest.mark.parametrize(
    ("name", "content", "some"),
    [
        ("ROWS.TSV", "a", True),
        ("rows.jsonl.gz", "x", True),
        ("rows.csv", "", False),
        ("rows.txt", "x", False),
        ("rows.jsonl", '{"prompt": "x", "chosen": "y"}', True),
        ("rows.jsonl", '{"prompt": "x", "chosen": "y", "rejected": "z"}', False),
        ("of/dataset_info.json", "{}", True),
        ("of/deep/rows.parquet", "PAR1", True),
        ("of/deep/rows.jsonl", '{"prompt": "x"}', True),
    ],
)
def test_what_may_be_imported_is_told_at_a_glance(name: str, content: str, some: bool, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    assert looks_like("prompt_data", tmp_path / name.split("/")[0]) == some
