"""What of a folder is a package, its modules and its tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_steps.steps.data_prep.swe.packages import Package, packages_in

COMMAND = "python -m pytest {tests}"


def written(folder: Path, **files: str) -> Path:
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def read(folder: Path) -> Package:
    (package,), refused = packages_in(str(folder), COMMAND, 1 << 20)
    assert refused == {}
    return package


def test_files_and_tests_are_apart_and_what_no_text_is_or_hidden_or_a_link_is_left_out(tmp_path: Path) -> None:
    names = (
        "kit_a/b.py",
        "kit_a/data.txt",
        "kit_a/test_b.py",
        "setup.py",
        "conftest.py",
        "tests/help.txt",
        "tests/test_c.py",
    )
    hidden = (".git/config", "kit_a/__pycache__/b.py", ".venv/lib/c.py")
    folder = written(tmp_path / "kit", **{name: f"# {name}\n" for name in (*names, *hidden)})
    (folder / "kit_a/picture.bin").write_bytes(b"\xff\xfe\x00")
    (folder / "kit_a/link.py").symlink_to(folder / "kit_a/b.py")
    package = read(folder)
    assert set(package.files) == {"kit_a/b.py", "kit_a/data.txt", "setup.py", "conftest.py"}
    assert set(package.test_files) == {"kit_a/test_b.py", "tests/help.txt", "tests/test_c.py"}
    assert package.modules == ["kit_a/b.py", "setup.py"]  # what steers the tests is not broken
    assert (package.name, package.test_command) == ("kit", COMMAND)


@pytest.mark.parametrize(
    ("files", "why"),
    [({"tests/test_a.py": ""}, "no Python files"), ({"kit_a.py": "", "tests/test_a.py": "x" * 99}, "99 bytes, over")],
)
def test_a_folder_that_is_no_package_is_told_beside_one_that_is(
    files: dict[str, str], why: str, tmp_path: Path
) -> None:
    written(tmp_path / "all" / "one", **files)
    written(tmp_path / "all" / "two", **{"kit_b.py": "", "test_b.py": ""})
    packages, refused = packages_in(str(tmp_path / "all"), COMMAND, 98)
    assert [package.name for package in packages] == ["two"]
    assert list(refused) == ["one"] and refused["one"].startswith(why)
