"""What of a folder is a package, its modules and its tests."""

from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.config.schema.data_prep import MUTATION_KINDS
from nemotron_steps.steps.data_prep.swe.mining import issue_text
from nemotron_steps.steps.data_prep.swe.packages import CASES, FUNCTIONS, Package, mutations_of, packages_in

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


def results(source: str, name: str) -> list[Any]:
    space: dict[str, Any] = {}
    exec(compile(source, "made up", "exec"), space)
    found = []
    for case in CASES:
        try:
            found.append(space[name](*case))
        except ArithmeticError as error:
            found.append(type(error))
    return found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_does_what_its_operator_says_and_no_fault_of_it_goes_unnoticed(name: str) -> None:
    operator, does = FUNCTIONS[name]
    source = f"def {name}(a, b):\n    return a {operator} b\n"
    right = [does(*case) for case in CASES]
    assert results(source, name) == right
    faults = mutations_of("a.py", source, MUTATION_KINDS)
    assert faults and all(results(fault.source, name) != right for fault in faults)


@pytest.mark.parametrize(
    ("kind", "line", "broken"),
    [
        ("constant", 'x = "é€𝄞", 3', {'x = "é€𝄞", 4'}),
        ("arguments", 'f("ß", "日本")', {'f("日本", "ß")'}),
    ],
)
def test_letters_of_several_bytes_are_one_column_each(kind: str, line: str, broken: set[str]) -> None:
    found = mutations_of("a.py", f"# é\n{line}\n", [kind])  # type: ignore[list-item]
    assert {mutation.broken for mutation in found} == broken
    assert {(mutation.line, mutation.correct) for mutation in found} == {(2, line)}
    assert {mutation.source for mutation in found} == {f"# é\n{text}\n" for text in broken}


def test_an_issue_names_some_of_its_tests_and_counts_the_others() -> None:
    assert issue_text("abcde", file=None) == "These tests fail: a, b, c, d, e."
    several = issue_text("abcdefg", file="a.py", error="KeyError: 1")
    assert several == "These tests fail: a, b, c, d, e and 2 more. The fault is in a.py.\n\nKeyError: 1"
