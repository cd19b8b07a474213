"""Packages that faults are put into: files and tests, apart, since an agent never gets the tests."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nemotron_steps.environments.swe.working_copy import HIDDEN_FOLDERS, STEERING, is_test
from nemotron_steps.errors import DataError


@dataclass(frozen=True)
class Package:
    """A package with its tests.

    Attributes:
        name: of the folder.
        files: path → text, without the tests.
        test_files: path → text: tests and what only they need.
        test_command: see HiddenTests.
    """

    name: str
    files: Mapping[str, str]
    test_files: Mapping[str, str]
    test_command: str

    @cached_property
    def digest(self) -> str:
        """The same for the same texts."""
        parts = [
            self.test_command,
            *(f"{p}\0{t}" for files in (self.files, self.test_files) for p, t in sorted(files.items())),
        ]
        return hashlib.sha256("\0\0".join(parts).encode()).hexdigest()

    @property
    def modules(self) -> list[str]:
        """Files that faults may be put into."""
        return sorted(path for path in self.files if path.endswith(".py") and path.rsplit("/", 1)[-1] not in STEERING)


def packages_in(path: str, test_command: str, max_bytes: int) -> tuple[list[Package], dict[str, str]]:
    """The packages of a folder: the folder itself if it holds Python files and tests, else each of its folders.

    Args:
        max_bytes: of one package's texts.

    Returns:
        The packages by name, and name → why it is none, for the others.

    Raises:
        DataError: there is no package.
    """
    root = Path(path)
    folders = [root] if _has_tests(root) else sorted(f for f in root.iterdir() if f.is_dir()) if root.is_dir() else []
    packages, refused = [], {}
    for folder in folders:
        package = _read(folder, test_command)
        problem = _problem(package, max_bytes)
        if problem is None:
            packages.append(package)
        else:
            refused[folder.name] = problem
    if not packages:
        raise DataError(
            "there is no package with tests at the given path",
            where="packages.path",
            expected="a folder with Python files and tests (tests/ or test_*.py), or a folder of such folders",
            found="; ".join(f"{name}: {why}" for name, why in list(refused.items())[:5]) or path,
            hints=("packages.path=FOLDER_OF_A_PACKAGE",),
        )
    return packages, refused


def _has_tests(folder: Path) -> bool:
    return folder.is_dir() and (any(folder.glob("test*/*.py")) or any(folder.glob("test_*.py")))


def _read(folder: Path, test_command: str) -> Package:
    files: dict[str, str] = {}
    tests: dict[str, str] = {}
    for file in sorted(folder.rglob("*")):
        relative = file.relative_to(folder)
        if file.is_symlink() or not file.is_file() or not HIDDEN_FOLDERS.isdisjoint(relative.parts):
            continue
        try:
            text = file.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        (tests if is_test(str(relative)) else files)[str(relative)] = text
    return Package(folder.resolve().name, files, tests, test_command)


def _problem(package: Package, max_bytes: int) -> str | None:
    size = sum(len(text.encode()) for files in (package.files, package.test_files) for text in files.values())
    if not package.modules or not package.test_files:
        return "no Python files" if not package.modules else "no tests"
    if size > max_bytes:
        return f"{size} bytes, over packages.max_bytes={max_bytes}"
    installed = _installed(package)
    if installed is not None:
        return f"it is installed at {installed}, which an agent can read: mine in an environment without it"
    return None


def _installed(package: Package) -> str | None:
    """Where the sandbox shows a package of the same name: the fault could be looked up there."""
    tops = {path.removeprefix("src/").split("/")[0].removesuffix(".py") for path in package.modules} - {"setup"}
    for folder in sys.path:
        for top in sorted(tops):
            for place in (Path(folder, top), Path(folder, f"{top}.py")):
                if Path(folder).name in ("site-packages", "dist-packages") and place.exists():
                    return str(place)
    return None
