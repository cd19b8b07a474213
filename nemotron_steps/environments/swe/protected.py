"""Which of an agent's changes count: none to what grades it.

The tests are those of the task, and what steers a test run (configuration, start-up files, repository metadata,
compiled files) is that of the repository as it was. Other files are the agent's to change.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import PurePosixPath

STEERING = frozenset(
    {
        *("conftest.py", "sitecustomize.py", "usercustomize.py"),
        *("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml"),
        *(".coveragerc", "noxfile.py"),
    }
)
"""Names of files that a test run reads by itself."""
TEST_FOLDERS = frozenset({"test", "tests"})
HIDDEN_FOLDERS = frozenset({".git", ".hg", ".svn", ".tox", ".nox", ".venv", "venv", "__pycache__", ".pytest_cache"})
COMPILED = frozenset({".pyc", ".pyo", ".so", ".pyd", ".pth", ".egg-link"})
RUNNERS = frozenset({"pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "xdist", "coverage", "nose"})
"""Packages that a test run imports besides the standard library."""
SOURCE_FOLDERS = frozenset({"src", "lib"})


def is_protected(path: str, known: Collection[str]) -> bool:
    """Whether a change to a file does not count.

    Args:
        path: relative to the repository.
        known: every file of the repository as it was.
    """
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        return True
    return (
        pure.name in STEERING
        or is_test(path)
        or pure.suffix in COMPILED
        or not HIDDEN_FOLDERS.isdisjoint(pure.parts)
        or (path not in known and _shadows(pure, known))
    )


def is_test(path: str) -> bool:
    """Whether a file is one of tests by the usual names."""
    pure = PurePosixPath(path)
    folders = {part.lower() for part in pure.parts[:-1]}
    stem = pure.name.lower()
    return not TEST_FOLDERS.isdisjoint(folders) or (
        stem.endswith(".py") and (stem.startswith("test_") or stem.endswith("_test.py") or stem == "tests.py")
    )


def _shadows(pure: PurePosixPath, known: Collection[str]) -> bool:
    """Whether a new file would be imported instead of a module that runs the tests."""
    parts = pure.parts[1:] if pure.parts[0] in SOURCE_FOLDERS and len(pure.parts) > 1 else pure.parts
    module = parts[0].partition(".")[0]
    if module not in sys.stdlib_module_names and module not in RUNNERS:
        return False
    # A package that the repository has itself, under a name of the standard library, is not shadowed by one more file.
    root = "/".join((*pure.parts[: len(pure.parts) - len(parts)], module))
    return not any(path == f"{root}.py" or path.startswith(f"{root}/") for path in known)
