"""What a step's own code raises, as an error that says where to look."""

import errno
from pathlib import Path

import pytest

from nemotron_steps.errors import DataError, StepFailedError, StepsError, StorageError, UnsupportedError
from nemotron_steps.resolver.plan import PlannedStep
from nemotron_steps.runs import step_workdir
from nemotron_steps.runs.step_workdir import ENGINE, as_steps_error, imported
from tests.runs.runner_toy_plan import make_plan

STEP: PlannedStep = make_plan().steps[1]


def told(error: Exception, work: Path) -> StepsError:
    """The error as it comes out of a step, with the lines that it came through."""

    def deep() -> None:
        raise error

    try:
        deep()
    except Exception as raised:
        return as_steps_error(raised, STEP, work, "r1")
    raise AssertionError


def test_an_error_of_this_package_stays_as_it_is_and_any_other_names_its_innermost_line(tmp_path: Path) -> None:
    ours = DataError("no rows")
    assert told(ours, tmp_path) is ours
    failed = told(KeyError("x"), tmp_path)
    assert type(failed) is StepFailedError and failed.hints == ("steps logs r1   # has the traceback",)
    place, _, line = (failed.where or "").rpartition(":")
    source = Path(place).read_text().splitlines()
    assert source[int(line) - 1].strip() == "raise error"


@pytest.mark.parametrize("name", ["torch", "torch.nn", "megatron.core"])
@pytest.mark.parametrize("through", [False, True])
def test_a_package_of_the_engine_that_is_not_there_says_how_to_have_it(
    name: str, through: bool, tmp_path: Path
) -> None:
    error: Exception = ModuleNotFoundError(f"No module named '{name}'", name=name)
    if through:
        outer = ImportError("a module of the step's cannot be imported")
        outer.__cause__ = error
        error = outer
    found = told(error, tmp_path)
    assert isinstance(found, UnsupportedError) and found.hints == (ENGINE,)


def test_a_disk_that_is_full_is_told_of_any_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = StorageError("the checkpoint could not be written")
    bare.__cause__ = OSError(errno.ENOSPC, "full")
    assert "the disk is full" in told(bare, tmp_path).what
    monkeypatch.setattr(step_workdir, "free_bytes", lambda path: (1 << 20) - 1)
    full = told(RuntimeError("the writer gave up"), tmp_path)
    assert isinstance(full, StorageError) and full.where == str(tmp_path) and full.found == "1048575 bytes free"
    monkeypatch.setattr(step_workdir, "free_bytes", lambda path: 1 << 20)
    assert type(told(RuntimeError("the writer gave up"), tmp_path)) is StepFailedError


def test_a_function_that_cannot_be_imported_is_told_by_the_line_that_breaks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_entry_step.py").write_text("x = 1\nimport a_package_of_nobodys\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UnsupportedError, match="cannot be imported") as caught:
        imported("broken_entry_step:run", STEP)
    assert caught.value.where == f"{tmp_path}/broken_entry_step.py:2"
    assert (caught.value.found, caught.value.hints) == ("broken_entry_step:run", ("steps doctor",))
    with pytest.raises(UnsupportedError, match="does not exist") as caught:
        imported("tests.runs.runner_toy_steps:nothing", STEP)
    assert caught.value.expected == "a function 'nothing' in tests.runs.runner_toy_steps"
