from __future__ import annotations

import pytest

from nemotron_steps.environments.swe.working_copy import is_protected, is_test


@pytest.mark.parametrize(
    "path",
    [
        *("conftest.py", "a/conftest.py", "sitecustomize.py", "pytest.ini", "a/tox.ini", "pyproject.toml", "setup.cfg"),
        *(
            "usercustomize.py",
            ".pytest.ini",
            "a/pytest.ini",
            "a/pytest.toml",
            ".pytest.toml",
            "a/.coveragerc",
            "noxfile.py",
        ),
        *("tests/a.txt", "a/Test/b.py", "test_a.py", "a/a_test.py", "a/tests.py", "TEST_A.PY"),
        *("a.pyc", "a.pyo", "a/b.so", "a.pyd", "x.pth", "a.egg-link"),
        *(".git/config", "a/__pycache__/b.py", ".venv/a.py", "venv/lib/a.py", ".tox/a"),
        *(".hg/a", ".svn/a", ".nox/a", ".pytest_cache/a"),
        *("py.py", "pluggy/a.py", "src/iniconfig.py", "lib/packaging/a.py", "xdist.py", "coverage/a.py", "nose.py"),
        *("json.py", "json/__init__.py", "src/random.py", "lib/pytest/a.py", "_pytest/x.py", "os.txt"),
        *("/etc/passwd", "../a.py", "a/../b.py", "", "."),
    ],
)
def test_what_grades_or_steers_the_tests_is_not_the_agents_to_change(path: str) -> None:
    assert is_protected(path, {"a.py"})


@pytest.mark.parametrize(
    "path",
    [
        *("a.py", "new.py", "src/new.py", "src", "testing.py", "a/contest.py", "a_tests.py", "docs/test_a.md"),
        *("a/json.py", "setup.py", "README.md", "git/a.py", "json2.py", "src/a/random.py"),
    ],
)
def test_other_files_are(path: str) -> None:
    assert not is_protected(path, {"a.py"})


def test_a_module_that_the_repository_has_itself_is_not_shadowed_by_one_more_file() -> None:
    assert not is_protected("json/more.py", {"json/__init__.py"})
    assert not is_protected("json/more.py", {"json.py"})
    assert not is_protected("src/json/more.py", {"src/json/__init__.py"})
    assert not is_protected("json.py", {"json.py"})  # it is that file itself
    assert not is_protected("json.txt", {"json.txt"})
    assert is_protected("json/more.py", {"src/json/__init__.py", "jsonic/__init__.py"})
    assert is_protected("src/json/more.py", {"json/__init__.py"})


def test_tests_are_known_by_folder_or_name() -> None:
    assert [path for path in ("tests/x", "a/test/x.c", "test_x.py", "x_test.py", "tests.py") if not is_test(path)] == []
    assert [path for path in ("test_x.c", "test", "tests", "xtest.py", "a/testsuite/x.py") if is_test(path)] == []
