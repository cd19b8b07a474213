"""An error across processes, its codes, and the commands that its hints are made of."""

import pickle

import pytest

import nemotron_steps.errors as module
from nemotron_steps.errors import DataError, PlanError, StepsError, first_line, show_line, without_line

HINTS = ("one", "two", "three", "four")


def test_an_error_keeps_everything_on_its_way_from_another_process() -> None:
    problems = (DataError("one", where="a:1"), DataError("two", hints=HINTS))
    found = pickle.loads(pickle.dumps(PlanError("several", problems=problems, expected="x")))
    assert type(found) is PlanError and found.render() == PlanError("several", problems=problems, expected="x").render()
    assert found.problems[1].hints == HINTS
    assert found.args == ("several",)


class OfAPack(DataError):
    def __init__(self, row: int, *, file: str) -> None:
        super().__init__(f"row {row} is bad", where=f"{file}:{row}")


def test_an_error_whose_constructor_wants_something_else_comes_from_another_process_as_well() -> None:
    found = pickle.loads(pickle.dumps(OfAPack(3, file="a")))
    assert (type(found), found.render()) == (OfAPack, OfAPack(3, file="a").render())


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


def test_what_a_library_says_is_a_line() -> None:
    assert [first_line(error) for error in (ValueError("\n one\ntwo"), KeyError())] == ["one", "KeyError"]


def test_codes_and_exit_codes_are_what_scripts_rely_on() -> None:
    public = {name: each for name, each in vars(module).items() if isinstance(each, type) and not name.startswith("_")}
    errors = {name: each for name, each in public.items() if issubclass(each, StepsError)}
    assert {name: (each.code, each.exit_code) for name, each in errors.items()} == CODES


@pytest.mark.parametrize(
    ("where", "shown", "dropped"),
    [
        ("rows.jsonl:3", "sed -n 3p rows.jsonl   # the row", "sed -i.bak 3d rows.jsonl   # takes it out; "),
        ("my rows.jsonl:3", "sed -n 3p 'my rows.jsonl'   # the row", "sed -i.bak 3d 'my rows.jsonl'   # "),
        ("http://h/r?a=1&b:3", "curl -sL 'http://h/r?a=1&b' | sed -n 3p   # the row", None),
        ("https://h/r:3", "curl -sL https://h/r | sed -n 3p   # the row", None),
        ("", None, None),
    ],
)
def test_a_row_is_shown_and_taken_out_by_its_line(where: str, shown: str | None, dropped: str | None) -> None:
    assert show_line(where) == ((shown,) if shown else ())
    if not where.startswith("http"):
        assert [hint[: len(dropped or "")] for hint in without_line(where)] == ([dropped] if dropped else [])
