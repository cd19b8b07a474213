"""`--input PORT=PATH` of data that is no artifact: told by the plan, with commands that make one of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

ROW = {"responses_create_params": {"input": "1 + 1?"}, "agent_ref": {"name": "math_with_judge_simple_agent"}}


def given(folder: Path, kind: str) -> Path:
    """Data of one kind below `folder`."""
    path = folder / kind
    if kind == "folder_of_parquet":
        path.mkdir()
        (path / "train-00000.parquet").write_bytes(b"PAR1")
        (path / "README.md").write_text("A data set's card.\n")
    elif kind == "saved":
        path.mkdir()
        (path / "dataset_info.json").write_text("{}")
        (path / "data-00000-of-00001.arrow").write_bytes(b"ARROW1")
    elif kind == "saved_with_splits":
        (path / "train").mkdir(parents=True)
        (path / "dataset_dict.json").write_text("{}")
        (path / "train" / "data.arrow").write_bytes(b"ARROW1")
    elif kind == "nothing":
        path.mkdir()
    else:
        text = {
            "rows.csv": "question,answer\n1+1,2\n",
            "rows.tsv": "question\tanswer\n1+1\t2\n",
            "rows.json": json.dumps([ROW, ROW]),
            "rows.parquet": "PAR1",
            "rows.txt": json.dumps(ROW) + "\n",
            "rows.jsonl.gz": "x",
            "rows.jsonl.zst": "x",
            "empty.jsonl": "",
            "notes.md": "some notes\n",
        }[kind]
        path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("kind", "said", "command"),
    [
        ("rows.txt", "JSON Lines in a file whose name does not end in .jsonl", "cp rows.txt rows.jsonl"),
        ("rows.jsonl.zst", "a compressed file (.zst)", "zstd -dc "),
        ("empty.jsonl", "an empty file", None),
        ("nothing", "an empty folder", None),
        ("notes.md", "a file of another kind (.md)", None),
    ],
)
def test_data_that_no_import_reads_is_refused_by_the_plan(
    cli: Cli, workplace: Path, kind: str, said: str, command: str | None
) -> None:
    path = given(workplace, kind)
    refused = cli("plan", "sft/automodel", "-c", "tiny", "--input", f"chats=./{path.name}", "--json")
    assert refused.code == 2
    (problem,) = refused.json["error"]["problems"]
    assert problem["what"] == f"'./{path.name}' is {said}, not sft_chats"
    assert problem["where"] == f"--input chats=./{path.name}"
    assert '"messages"' in problem["expected"]
    assert command is None or problem["hints"][0].startswith(command)


def test_supplied_rows_stand_in_place_of_the_source_that_the_config_names(cli: Cli, workplace: Path) -> None:
    (workplace / "mine.jsonl").write_text((json.dumps(ROW) + "\n") * 3)
    given = ("-c", "super3_rlvr1", "--input", "source=mine.jsonl", "check_environments=false", "rows.validation=1")
    ran = cli("run", "data_prep/rl_prep", *given, "num_workers=1", "--json")
    assert ran.code == 0, ran.err
    (made,) = (workplace / "home" / "artifacts").glob("**/train-split.jsonl")
    assert made.read_text() == (json.dumps(ROW) + "\n") * 2
    assert cli("run", "data_prep/rl_prep", *given, "num_workers=1").out.count("cached") >= 1


GRADER = ("env.should_use_nemo_gym=false", "env.environment=genrm_compare")
DOORS = {
    "prompts": ("rl/nemo_rl/rlhf", GRADER, "data_prep/import_prompts"),
    "chats": ("sft/automodel", (), "data_prep/import_chats"),
    "preferences": ("rl/nemo_rl/dpo", (), "data_prep/import_pairs"),
}


@pytest.mark.parametrize("port", DOORS)
@pytest.mark.parametrize(
    "kind", ["rows.csv", "rows.tsv", "rows.json", "rows.parquet", "folder_of_parquet", "saved", "rows.jsonl.gz"]
)
def test_a_table_is_imported(cli: Cli, workplace: Path, port: str, kind: str) -> None:
    path = given(workplace, kind)
    step, options, importer = DOORS[port]
    planned = cli("plan", step, "-c", "tiny", "--input", f"{port}=./{path.name}", *options, "--json")
    assert planned.code == 0, planned.err
    assert (importer, True) in [(each["step"], each["inserted"]) for each in planned.json["steps"]]


@pytest.mark.parametrize(
    ("port", "row", "imported"),
    [
        ("chats", {"conversations": [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2"}]}, True),
        ("chats", {"instruction": "1", "output": "2"}, True),
        ("chats", {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}, False),
        ("preferences", {"context": [{"role": "user", "content": "1"}], "response1": "2", "response2": "3",
                         "overall_preference": 2}, True),
        ("preferences", {"prompt": "1", "chosen": "2", "rejected": "3"}, False),
        ("prompts", {"question": "1"}, True),
    ],
)  # fmt: skip
def test_rows_of_another_layout_are_imported(
    cli: Cli, workplace: Path, port: str, row: dict[str, object], imported: bool
) -> None:
    (workplace / "rows.jsonl").write_text(json.dumps(row) + "\n")
    step, options, importer = DOORS[port]
    planned = cli("plan", step, "-c", "tiny", "--input", f"{port}=rows.jsonl", *options, "--json")
    assert planned.code == 0, planned.out
    assert (importer in [each["step"] for each in planned.json["steps"]]) == imported


@pytest.mark.parametrize("step", ["rlvr", "rlhf", "swe", "opd"])
def test_prompts_to_validate_on_can_be_given_to_every_step_that_samples(cli: Cli, workplace: Path, step: str) -> None:
    row = {"responses_create_params": {"input": "A or B?"}, "agent_ref": {"name": "mcqa"}}
    (workplace / "held.jsonl").write_text(json.dumps(row) + "\n")
    given = ("-c", "tiny", "--input", "validation=./held.jsonl", "grpo.val_period=1")
    planned = cli("plan", f"rl/nemo_rl/{step}", *given, "--json")
    assert planned.code == 0, planned.out
    assert planned.json["steps"][-1]["inputs"]["validation"]["ref"] == "./held.jsonl"


def test_a_message_about_a_row_names_the_users_file(cli: Cli, workplace: Path) -> None:
    rows = workplace / "mine.jsonl"
    rows.write_text('{"number": 1}\n')
    refused = cli("run", "toy/train", "end=row", "--input", "rows=./mine.jsonl", "--json")
    assert refused.code == 2
    error = refused.json["error"]
    assert error["where"] == f"{rows}:1" and f"sed -n 1p {rows}   # the row" in error["hints"]
    assert cli("status", "latest", "--json").json["error"]["where"] == f"{rows}:1"
    # Where the user's file is another one by now, the copy that the step read is named.
    added = cli("artifacts", "add", "mine.jsonl", "--type", "toy_rows", "--name", "mine")
    assert added.code == 0
    rows.write_text('{"number": 2}\n')
    changed = cli("run", "toy/train", "end=row", "--input", "rows=mine:v1", "--json").json["error"]
    assert "/home/artifacts/" in changed["where"]


def test_resume_is_suggested_where_something_is_there_to_go_on_from(cli: Cli, workplace: Path) -> None:
    (workplace / "mine.jsonl").write_text('{"number": 1}\n')
    alone = cli("run", "toy/train", "end=row", "--input", "rows=./mine.jsonl")
    assert alone.code == 2 and "--resume" not in alone.err and "steps logs" in alone.err
    assert "--resume" not in cli("status").out
    # Here the step before it has committed its rows.
    after = cli("run", "toy/train", "-c", "tiny", "end=row")
    assert after.code == 2 and "steps run --resume" in after.err
    assert "--resume" in cli("status").out
    retry = cli("run", "toy/train", "-c", "tiny", "end=judge")
    assert retry.code == 3 and "steps run --resume" in retry.err
