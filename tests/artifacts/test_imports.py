"""What a user supplies is looked at once, remembered beside every home, and named after itself."""

import os
from pathlib import Path

import pytest

from nemotron_steps.artifacts import imports as module
from nemotron_steps.artifacts.imports import Imports, default_name
from nemotron_steps.artifacts.models import is_artifact_name
from nemotron_steps.errors import StorageError


@pytest.fixture
def imports(tmp_path: Path) -> Imports:
    return Imports(tmp_path / "cache")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "my data"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"v": 1}\n')
    return folder


def test_what_is_remembered_is_what_was_found(imports: Imports, data: Path, tmp_path: Path) -> None:
    for path in (data, data / "train.jsonl"):
        first, again = imports.identify(path), Imports(tmp_path / "cache").identify(path)
        assert again.attributes == first.attributes == {"rows": {"train": 1}}
        assert (again.type, again.digest, again.files) == (first.type, first.digest, first.files)
        assert [file.size for file in again.files] == [9]
        assert (again.path, again.source, again.location) == (path, str(path), str(path))
        assert imports.identify(path, name="mine").name == "mine" and first.name != "mine"


def test_a_change_of_size_or_of_the_smallest_time_is_noticed(imports: Imports, data: Path) -> None:
    file = data / "train.jsonl"
    os.utime(file, ns=(0, 1_000_000_000))
    found = {imports.identify(data).digest}
    file.write_text('{"v": 2}\n')
    os.utime(file, ns=(0, 1_000_000_001))
    found.add(imports.identify(data).digest)
    file.write_text('{"v": 20}\n')
    os.utime(file, ns=(0, 1_000_000_001))
    found.add(imports.identify(data).digest)
    file.write_text('{"v": 21}\n')
    os.utime(file, ns=(0, 1_000_000_001))
    found.add(imports.identify(data).digest)
    assert len(found) == 4


def test_only_what_was_supplied_may_be_read_also_where_nothing_can_be_remembered(
    imports: Imports, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not imports.allows(str(data))
    imports.identify(data)
    for one in (imports, Imports(tmp_path / "cache")):
        assert one.allows(str(data)) and not one.allows(str(tmp_path))
    (note,) = (tmp_path / "cache").iterdir()
    for broken in ("{", "[]", '{"path": "/elsewhere"}'):
        note.write_text(broken)
        assert not Imports(tmp_path / "cache").allows(str(data))
        assert imports.allows(str(data))
    for error in (StorageError("full"), OSError("read-only")):

        def fail(path: Path, content: bytes, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(module, "write_atomic", fail)
        elsewhere = Imports(tmp_path / "other")
        assert elsewhere.identify(data).path == data and elsewhere.allows(str(data))


@pytest.mark.parametrize(
    ("name", "folder", "expected"),
    [
        ("rows.v2.jsonl", False, "input/rows.v2"),
        ("my data", True, "input/my-data"),
        (".-x-.", True, "input/x"),
        ("…", True, "input/unnamed"),
        ("x" * 250, True, "input/" + "x" * 194),
    ],
)
def test_a_file_or_folder_gives_its_name(name: str, folder: bool, expected: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.mkdir() if folder else path.write_text("")
    assert default_name(path) == expected and is_artifact_name(expected)
