"""Checks of a step that feed it what is broken: it says so with a code, or copes; it never raises what has none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemotron_steps.errors import StepFailedError
from nemotron_steps.testing.samples import PICTURE, cut
from nemotron_steps.testing.step_runs import SUITE as RUNS
from nemotron_steps.testing.step_subject import Ran, StepSubject, copied
from nemotron_steps.testing.suite import NotApplicable, Suite, Unmet

SUITE: Suite[StepSubject] = Suite(RUNS)


@dataclass(frozen=True)
class Case:
    """One broken input. `check`: whose it is; `must_fail`: no step can cope with it."""

    check: str
    port: str
    path: Path
    kind: str
    must_fail: bool = False


@SUITE.check("outputs_validate")
def a_missing_input_is_told(step: StepSubject) -> None:
    """An input that is a folder without the files it should have is an error with a code."""
    _expect_told(step, "a_missing_input_is_told")


@SUITE.check("outputs_validate")
def a_wrong_type_is_told(step: StepSubject) -> None:
    """An input that is something else is an error with a code."""
    _expect_told(step, "a_wrong_type_is_told")


@SUITE.check("outputs_validate")
def a_truncated_file_is_told(step: StepSubject) -> None:
    """An input whose files were cut in the middle is an error with a code, or the step copes."""
    _expect_told(step, "a_truncated_file_is_told")


@SUITE.check("outputs_validate")
def a_broken_row_is_told(step: StepSubject) -> None:
    """A row without fields, or with null in them, is an error with a code, or the step copes."""
    _expect_told(step, "a_broken_row_is_told")


def _expect_told(step: StepSubject, check: str) -> None:
    if not step.fed:
        raise NotApplicable("the step is fed no input")
    cases, ran = step.remember("bad input", _run_all)
    own = [(index, case) for index, case in enumerate(cases) if case.check == check]
    if not own:
        raise NotApplicable("the step is fed no rows")
    for index, case in own:
        _judge(case, ran, index)


def _run_all(step: StepSubject) -> tuple[list[Case], Ran]:
    """Every case, in one process: it says after each what came out."""
    cases = list(_cases(step))
    folder = step.folder / "bad"
    homes = [folder / f"home-{index}" for index in range(len(cases))]
    commands = [
        step.words(home, inputs={**step.fed, case.port: case.path}) for home, case in zip(homes, cases, strict=True)
    ]
    return cases, step.process("bad", commands, home=folder)


def _cases(step: StepSubject) -> Iterator[Case]:
    for port, path in step.fed.items():
        folder = step.folder / "bad" / port
        missing = folder / "missing"
        missing.mkdir(parents=True)
        (missing / "kit.unknown").write_text("another file\n")
        yield Case("a_missing_input_is_told", port, missing, "a folder without its files", must_fail=True)
        pictures = _changed(path, folder / "pictures", lambda data: PICTURE)
        yield Case("a_wrong_type_is_told", port, pictures, "files that are pictures", must_fail=True)
        yield Case("a_truncated_file_is_told", port, _changed(path, folder / "cut", cut), "a truncated file")
        rows = [file for file in _files(path) if file.suffix == ".jsonl"]
        if rows:
            row = json.loads(rows[0].read_text("utf-8").splitlines()[0])
            for kind, broken in (("without fields", {}), ("with null in every field", dict.fromkeys(row))):
                changed = _changed(path, folder / kind.replace(" ", "-"), _with_second_line(broken))
                yield Case("a_broken_row_is_told", port, changed, f"a row {kind}")


def _changed(path: Path, folder: Path, change: Callable[[bytes], bytes]) -> Path:
    copy = copied(path, folder)
    for file in _files(copy):
        file.write_bytes(change(file.read_bytes()))
    return copy


def _with_second_line(row: Mapping[str, Any]) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        first, newline, others = data.partition(b"\n")
        return first + newline + json.dumps(row).encode() + b"\n" + others

    return change


def _files(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]


def _judge(case: Case, ran: Ran, index: int) -> None:
    given = f"given {case.kind} as '{case.port}', "
    if index >= len(ran.commands):
        raise Unmet(f"{given}the process of the step died", found=ran.output[-400:])
    error = ran.error(index)
    if error is None and case.must_fail:
        raise Unmet(
            f"{given}the step says nothing",
            hint="a validator of the type, or a check of the step's, raises DataError or ArtifactError",
        )
    if error is not None and _has_no_code(error):
        raise Unmet(
            f"{given}the step raises an exception without a code",
            where=error["where"],
            found=error["what"],
            hint="raise DataError(what, where=f'{file}:{line}', expected=…, found=…)",
        )


def _has_no_code(error: Mapping[str, Any]) -> bool:
    """Whether an error is what the runner or the command line made of an exception of no class of this project."""
    if error.get("code") is None:
        return True
    return error["code"] == StepFailedError.code and "' failed: " in error["what"]
