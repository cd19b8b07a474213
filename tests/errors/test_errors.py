"""An error as text, as JSON and across processes, and the commands that its hints are made of."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import nemotron_steps.errors as module
from nemotron_steps.errors import (
    DataError,
    PlanError,
    StepsError,
    fetch_again,
    renamed_key,
    show_line,
    without_line,
)

HINTS = ("one", "two", "three", "four")


def test_an_error_is_told_with_all_that_it_has() -> None:
    full = DataError("it is wrong", where="a:1", expected="x", found="y", hints=HINTS)
    assert str(full).splitlines() == [
        "error[E410]: it is wrong",
        "  --> a:1",
        "  expected: x",
        "  found:    y",
        *(f"  hint: {hint}" for hint in HINTS),
    ]
    assert StepsError("bare").render() == "error[E000]: bare"
    assert full.to_dict() == {
        "code": "E410",
        "class": "DataError",
        "what": "it is wrong",
        "where": "a:1",
        "expected": "x",
        "found": "y",
        "hints": list(HINTS),
    }


def test_an_error_keeps_everything_on_its_way_from_another_process() -> None:
    problems = (DataError("one", where="a:1"), DataError("two", hints=HINTS))
    found = pickle.loads(pickle.dumps(PlanError("several", problems=problems, expected="x")))
    assert type(found) is PlanError and found.render() == PlanError("several", problems=problems, expected="x").render()
    assert found.problems[1].hints == HINTS
    assert found.args == ("several",)


CODES = {
    "StepsError": ("E000", 1),
    "RequestError": ("E010", 2),
    "ManifestError": ("E100", 2),
    "UnknownNameError": ("E110", 2),
    "ConfigError": ("E200", 2),
    "PlanError": ("E300", 2),
    "ArtifactError": ("E400", 2),
    "DataError": ("E410", 2),
    "UnsupportedError": ("E500", 2),
    "NonFiniteLossError": ("E600", 1),
    "StepFailedError": ("E601", 1),
    "StorageError": ("E610", 1),
    "EngineError": ("E620", 1),
    "SandboxError": ("E630", 1),
    "CheckFailedError": ("E640", 1),
    "JudgeUnavailableError": ("E700", 3),
    "RetryableError": ("E701", 3),
    "WorkerLostError": ("E710", 3),
    "StorageUnreachableError": ("E720", 3),
    "InterruptedRunError": ("E800", 130),
}


def test_codes_and_exit_codes_are_what_scripts_rely_on() -> None:
    public = {name: each for name, each in vars(module).items() if isinstance(each, type) and not name.startswith("_")}
    errors = {name: each for name, each in public.items() if issubclass(each, StepsError)}
    assert {name: (each.code, each.exit_code) for name, each in errors.items()} == CODES


@pytest.mark.parametrize(
    ("where", "shown", "dropped"),
    [
        ("rows.jsonl:3", "sed -n 3p rows.jsonl   # the row", "sed -i.bak 3d rows.jsonl   # takes it out; "),
        ("my rows.jsonl:3", "sed -n 3p 'my rows.jsonl'   # the row", "sed -i.bak 3d 'my rows.jsonl'   # "),
        ("a:b:12", "sed -n 12p a:b   # the row", "sed -i.bak 12d a:b   # "),
        ("http://h/r?a=1&b:3", "curl -sL 'http://h/r?a=1&b' | sed -n 3p   # the row", None),
        ("https://h/r:3", "curl -sL https://h/r | sed -n 3p   # the row", None),
        ("rows.jsonl", None, None),
        ("rows.jsonl:x", None, None),
        (":3", None, None),
        ("3", None, None),
        ("", None, None),
    ],
)
def test_a_row_is_shown_and_taken_out_by_its_line(where: str, shown: str | None, dropped: str | None) -> None:
    assert show_line(where) == ((shown,) if shown else ())
    if not where.startswith("http"):
        assert [hint[: len(dropped or "")] for hint in without_line(where)] == ([dropped] if dropped else [])


@pytest.mark.parametrize(
    ("where", "wrong", "right", "hint"),
    [
        ("my.toml:3", "nmae", "name", "sed -i '3s/\\bnmae\\b/name/' my.toml   # corrects the key"),
        ("a b.toml:3", "a-b", "a_b", "sed -i '3s/\\ba-b\\b/a_b/' 'a b.toml'   # corrects the key"),
        ("my.toml:3", "na.me", "name", None),
        ("my.toml:3", "a/b", "name", None),
        ("my.toml:3", "", "name", None),
        ("my.toml", "nmae", "name", None),
        (":3", "nmae", "name", None),
        (None, "nmae", "name", None),
    ],
)
def test_a_key_is_corrected_where_no_sign_of_it_means_more(
    where: str | None, wrong: str, right: str, hint: str | None
) -> None:
    assert renamed_key(where, wrong, right) == ((hint,) if hint else ())


@pytest.mark.parametrize(
    ("content", "by_git"),
    [
        (b"version https://git-lfs", True),
        (b"version https://git-lfs.github.com/spec/v1\n", True),
        (b"version http", False),
    ],
)
def test_a_pointer_is_fetched_by_git_and_anything_else_from_the_hub(
    content: bytes, by_git: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "w").write_bytes(content)
    (hint,) = fetch_again(folder, folder / "w")
    assert hint.startswith(f"git -C '{folder}' lfs pull" if by_git else f"hf download MODEL --local-dir '{folder}' ")
    for broken in (None, folder / "nothing", folder):
        assert fetch_again(folder, broken)[0].startswith("hf download")
