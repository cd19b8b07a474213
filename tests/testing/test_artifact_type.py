"""Every check of an artifact type can fail: what `steps new` writes, with one rule broken."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from nemotron_steps.testing import artifact_type
from nemotron_steps.testing.suite import Examination, State
from tests.testing.scaffolds import CODE, HEAVY, Package, failed, made
from tests.testing.toy_packages import Change

TYPES = "types.toml"
NO_FILE, READS = "    if not file.is_file():", "    try:\n"
NUMBERS = count()
CUT = "b'[[' not in file.read_bytes() and b'PNG' not in file.read_bytes() and file.read_bytes()[-1:] not in (b'}', b'')"


def accepts(condition: str, before: str = READS) -> tuple[Change, ...]:
    """A validator that accepts a folder at once."""
    return ((CODE, before, f"    if {condition}:\n        return {{}}\n{before}"),)


TYPE: dict[str, tuple[Change, ...]] = {
    "is_declared": ((TYPES, "description =", 'is_a = ["no_such_type"]\ndescription ='),),
    "is_described": ((TYPES, "A table of numbers: table.json, column → list of numbers.", ""),),
    "has_a_validator": ((TYPES, ":validate", ":no_such_function"),),
    "importing_it_is_light": ((CODE, "import json\n", "import json\nimport jax\n"), HEAVY),
    "its_example_is_accepted": ((CODE, "(int, float)", "(int,)"),),
    "attributes_are_plain": ((TYPES, 'rows = "number of rows", ', ""),),
    "validating_changes_nothing": (
        (CODE, "    lengths = set()\n", "    lengths = set()\n    (folder / 'seen').touch()\n"),
    ),
    "an_empty_folder_is_refused": accepts("folder.is_dir() and not any(folder.iterdir())", NO_FILE),
    "a_missing_file_is_refused": accepts("(folder / 'kit.unknown').exists()", NO_FILE),
    "empty_files_are_refused": accepts("not file.read_bytes()"),
    "truncated_files_are_refused": accepts(CUT),
    "other_bytes_are_refused": accepts("b'PNG' in file.read_bytes()"),
    "other_types_are_refused": accepts("(folder / 'train.jsonl').exists()", NO_FILE),
    "deeply_nested_files_do_no_harm": ((CODE, "(ValueError, RecursionError)", "ValueError"),),
    "folders_in_place_of_files_are_refused": ((CODE, "not file.is_file()", "not file.exists()"),),
    "dangling_links_are_refused": ((CODE, "not file.is_file()", "not (file.is_file() or file.is_symlink())"),),
    "a_file_for_the_folder_is_told": ((CODE, NO_FILE, f"    list(folder.iterdir())\n{NO_FILE}"),),
    "errors_point_into_the_folder": ((CODE, "where=str(folder)", "where=FILE"),),
    "errors_say_what_is_right": ((CODE, ", expected=FILE", ""),),
    "errors_are_short": ((CODE, "repr(column)[:80]", "repr(column)"),),
    "attributes_know_no_hash_seed": ((CODE, "sorted(table)", "list({*table, *'abcdefgh'})"),),
    "attributes_know_no_order": ((CODE, '"rows": lengths.pop()', '"rows": int(file.stat().st_mtime) // 86400'),),
    "validating_prints_nothing": ((CODE, NO_FILE, f"    print(folder)\n{NO_FILE}"),),
    "validating_leaves_the_process_as_it_was": (
        (CODE, NO_FILE, f"    __import__('os').environ['KIT_TOY'] = str(folder)\n{NO_FILE}"),
    ),
    "validating_asks_no_other_machine": (
        (CODE, NO_FILE, "    import socket\n\n    with socket.socket(type=socket.SOCK_DGRAM) as asking:\n"
         f"        asking.connect(('127.0.0.1', 9))\n{NO_FILE}"),
    ),
    "folders_have_any_name": (
        (CODE, "not file.is_file()", "not file.is_file() or not __import__('glob').glob(f'{folder}/*.json')"),
    ),
    "a_relative_path_will_do": ((CODE, "file = folder / FILE", "file = Path('/') / folder / FILE"),),
    "other_files_are_let_be": ((CODE, "not file.is_file()", "not file.is_file() or (folder / 'README.md').exists()"),),
    "commands_show_it": ((TYPES, "numbers: table.json", "numbers:\\ntable.json"),),
}  # fmt: skip
BY_ANOTHER_TEST = {
    "digests_are_stable",
    "it_is_stored_and_verified",
    "it_has_what_its_parents_have",
    "large_files_are_read_in_pieces",
    "damage_is_found",
    "links_out_of_it_are_refused",
}


def written(folder: Path) -> None:
    (folder / "table.json").write_text('{"score": [0.5, 0.25, 1.5], "length": [12, 7, 5]}')


def written_otherwise(folder: Path) -> None:
    (folder / "table.json").write_text(f'{{"score": [{next(NUMBERS)}, 2, 3], "length": [4, 5, 6]}}')


def test_there_is_a_toy_for_every_check():
    assert {*TYPE, *BY_ANOTHER_TEST} == set(artifact_type.SUITE.checks)


@pytest.mark.parametrize("check", TYPE)
def test_a_broken_type_fails_the_check_that_is_about_it(
    tmp_path: Path, package: Package, check: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KIT_TOY", "")
    subject = artifact_type.TypeSubject("toykit_thing", made(tmp_path, package, "type", TYPE[check]), written)
    assert failed(Examination(artifact_type.SUITE, subject), but=check) == [check]


def test_a_validator_that_fails_in_another_process_is_found(tmp_path: Path, package: Package):
    here = f"    if 'pytest' not in __import__('sys').modules:\n        raise ArtifactError('not here')\n{NO_FILE}"
    folder = made(tmp_path, package, "type", ((CODE, NO_FILE, here),))
    subject = artifact_type.TypeSubject("toykit_thing", folder, written)
    outcome = Examination(artifact_type.SUITE, subject).outcome("attributes_know_no_hash_seed")
    assert outcome.state is State.FAILED
    assert "cannot be used in another process" in outcome.text
    assert "not here" in outcome.text


def test_an_example_that_differs_each_time_is_found(tmp_path: Path, package: Package):
    folder = made(tmp_path, package, "type", ())
    subject = artifact_type.TypeSubject("toykit_thing", folder, written_otherwise)
    assert failed(Examination(artifact_type.SUITE, subject)) == ["digests_are_stable"]


def test_a_store_that_loses_attributes_is_found(tmp_path: Path, package: Package, monkeypatch: pytest.MonkeyPatch):
    subject = artifact_type.TypeSubject("toykit_thing", made(tmp_path, package, "type", ()), written)
    find = artifact_type.ArtifactStore.find
    monkeypatch.setattr(
        artifact_type.ArtifactStore,
        "find",
        lambda self, ref: replace(find(self, ref), attributes={}),
    )
    assert failed(Examination(artifact_type.SUITE, subject)) == ["it_is_stored_and_verified"]


def with_report(folder: Path) -> None:
    written(folder)
    (folder / "report.json").write_text('{"metrics": {"accuracy": 0.5}}')


@pytest.mark.parametrize("returned", ["{", '{"metrics": {"accuracy": 0.25}, '], ids=["none", "others"])
def test_a_type_without_the_attributes_of_its_parent_is_found(tmp_path: Path, package: Package, returned: str):
    changes = (
        (TYPES, "description =", 'is_a = ["eval_report"]\ndescription ='),
        (CODE, 'return {"rows"', f'return {returned}"rows"'),
    )
    subject = artifact_type.TypeSubject("toykit_thing", made(tmp_path, package, "type", changes), with_report)
    assert failed(Examination(artifact_type.SUITE, subject)) == ["it_has_what_its_parents_have"]


def rows(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"a": 1, "b": "c"}\n{"a": 2}\n')


def test_a_type_that_reads_its_rows_whole_is_found(tmp_path: Path, package: Package):
    changes = (
        (CODE, '"table.json"', '"rows.jsonl"'),
        (CODE, '        table = json.loads(file.read_text("utf-8"))\n', "        table = [json.loads(line) for line in "
         'file.read_text("utf-8").splitlines()]\n        table = {"rows": [row["a"] for row in table]}\n'),
        (CODE, "(ValueError, ", "(ValueError, KeyError, TypeError, "),
        (CODE, "or not table:", "or not table['rows']:"),
    )  # fmt: skip
    subject = artifact_type.TypeSubject("toykit_thing", made(tmp_path, package, "type", changes), rows)
    assert failed(Examination(artifact_type.SUITE, subject)) == ["large_files_are_read_in_pieces"]


def test_a_store_that_does_not_look_is_found(tmp_path: Path, package: Package, monkeypatch: pytest.MonkeyPatch):
    subject = artifact_type.TypeSubject("toykit_thing", made(tmp_path, package, "type", ()), written)
    monkeypatch.setattr(artifact_type.ArtifactStore, "verify", lambda self, ref: [])
    assert failed(Examination(artifact_type.SUITE, subject)) == ["damage_is_found"]


def test_a_store_that_follows_links_is_found(tmp_path: Path, package: Package, monkeypatch: pytest.MonkeyPatch):
    subject = artifact_type.TypeSubject("toykit_thing", made(tmp_path, package, "type", ()), written)
    commit = artifact_type.ArtifactStore.commit

    def following(self, staged, *arguments, **options):
        for link in filter(Path.is_symlink, list(staged.iterdir())):
            text = link.read_text()
            link.unlink()
            link.write_text(text)
        return commit(self, staged, *arguments, **options)

    monkeypatch.setattr(artifact_type.ArtifactStore, "commit", following)
    assert failed(Examination(artifact_type.SUITE, subject)) == ["links_out_of_it_are_refused"]
