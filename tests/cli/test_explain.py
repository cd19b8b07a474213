"""`steps explain`: every code that can be raised is explained, and its example raises it."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from nemotron_steps.cli.explain import explanations
from nemotron_steps.errors import StepsError
from tests.cli.conftest import Cli

for module in ("nemotron_steps.cli.parser", "nemotron_steps.resolver.problems"):
    import_module(module)
EXAMPLES = [code for code, entry in explanations().items() if "example" in entry]


def classes(root: type[StepsError] = StepsError) -> Iterator[type[StepsError]]:
    yield root
    for each in root.__subclasses__():
        if each.__module__.startswith("nemotron_steps."):
            yield from classes(each)


def test_every_code_is_explained_and_no_other() -> None:
    assert set(explanations()) == {each.code for each in classes()}


@pytest.mark.parametrize("code", EXAMPLES)
def test_an_example_raises_its_error_and_what_mends_it_does_not(cli: Cli, workplace: Path, code: str) -> None:
    entry = explanations()[code]
    shell, *commands = (entry.get("setup") or "true").split("; ")
    subprocess.run(["/bin/sh", "-c", shell], check=True)
    for command in commands:
        assert cli(*shlex.split(command)[1:]).code == 0
    program, *arguments = shlex.split(entry["example"])
    assert program == "steps"
    result = cli(*arguments)
    assert f"error[{code}]" in result.err, result.err
    if "then" in entry:
        _, *arguments = shlex.split(entry["then"])
        mended = cli(*arguments)
        # What doctor finds to be missing on this machine is not an error of the mend.
        assert mended.code == 0 or arguments == ["doctor"], mended.err


def test_a_code_is_found_as_it_is_printed(cli: Cli) -> None:
    assert cli("explain", "error[E303]").out == cli("explain", "e303").out
    assert cli("explain", "E303", "--json").json["title"] == "Nothing feeds a required input"
    assert [entry["code"] for entry in cli("explain", "--json").json] == list(explanations())


def test_an_unknown_code_is_refused_with_near_ones(cli: Cli) -> None:
    result = cli("explain", "E30")
    assert result.code == 2
    assert "steps explain E303" in result.err or "steps explain E300" in result.err
