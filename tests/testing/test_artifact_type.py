"""Every check of an artifact type can fail: what `steps new` writes, with one rule broken."""

from pathlib import Path

import pytest

from nemotron_steps.testing import artifact_type
from nemotron_steps.testing.suite import Examination
from tests.testing.scaffolds import CODE, Package, failed, made
from tests.testing.toy_packages import Change

TYPES = "types.toml"
NO_FILE, READS = "    if not file.is_file():", "    try:\n"
CUT = "b'PNG' not in file.read_bytes() and file.read_bytes()[-1:] not in (b'}', b'')"


def accepts(condition: str, before: str = READS) -> tuple[Change, ...]:
    """A validator that accepts a folder at once."""
    return ((CODE, before, f"    if {condition}:\n        return {{}}\n{before}"),)


TYPE: dict[str, tuple[Change, ...]] = {
    "is_declared": ((TYPES, "description =", 'is_a = ["no_such_type"]\ndescription ='),),
    "its_example_is_accepted": ((CODE, "(int, float)", "(int,)"),),
    "its_example_is_accepted: changed": (
        (CODE, "    lengths = set()\n", "    lengths = set()\n    (folder / 'seen').touch()\n"),
    ),
    "it_comes_back_from_a_home: a set": ((CODE, "lengths.pop()", "lengths"),),
    "it_is_what_its_parents_are: refused": ((TYPES, "description =", 'is_a = ["training_jsonl"]\ndescription ='),),
    "it_is_what_its_parents_are: other attributes": (
        (TYPES, "description =", 'is_a = ["eval_report"]\ndescription ='),
        (CODE, 'return {"rows"', 'return {"metrics": {"score": 0.25}, "rows"'),
    ),
    "what_it_is_not_is_refused: nothing": accepts("folder.is_dir() and not any(folder.iterdir())", NO_FILE),
    "what_it_is_not_is_refused: not said where": ((CODE, "where=str(folder)", "where=FILE"),),
    "what_it_is_not_is_refused: cut": accepts(CUT),
}


def written(folder: Path) -> None:
    (folder / "table.json").write_text('{"score": [0.5, 0.25, 1.5], "length": [12, 7, 5]}')
    (folder / "report.json").write_text('{"metrics": {"score": 0.5}}')  # what an eval_report has


def test_there_is_a_toy_for_every_check():
    assert {toy.partition(":")[0] for toy in TYPE} == set(artifact_type.SUITE.checks)


@pytest.mark.parametrize("toy", TYPE)
def test_a_broken_type_fails_the_check_that_is_about_it(tmp_path: Path, package: Package, toy: str):
    check = toy.partition(":")[0]
    subject = artifact_type.TypeSubject("toykit_thing", made(tmp_path, package, "type", TYPE[toy]), written)
    assert failed(Examination(artifact_type.SUITE, subject)) == [check]
