"""Every fault of the table, provoked through the command line: its code, its hint, and what comes of pasting it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import nemotron_steps
from tests.hints.conftest import Bench
from tests.hints.faults import FAULTS, Fault
from tests.hints.pasting import hints_in, paste, placeless, told
from tests.hints.render import PAGE, page


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_pasted_hint_mends_the_fault(fault: Fault, bench: Bench, workplace: Path) -> None:
    fault.setup(bench)
    typed = shlex.split(fault.command)
    result = bench(*typed)
    hint = hints_in(result)[fault.pasted]
    places = {f"{workplace}/": "", str(workplace): ".", f"{Path(nemotron_steps.__file__).parents[1]}/": ""}
    where = next((line.split("--> ", 1)[1] for line in result.err.splitlines() if "--> " in line), "")
    _, shown, whole = result.err.partition("\n\n")[0].partition("as in: ")
    if shown and fault.pasted == 0:  # the hint in the command that was typed
        whole = whole.partition("\n")[0]
        for word, value in fault.put.items():
            whole = whole.replace(word, value)
        then = told(bench(*shlex.split(whole.removeprefix("python -m nemotron_steps.cli.main").removeprefix("steps"))))
    else:
        then = told(paste(hint, typed, where, bench, fault.put, again=fault.again))
    assert (told(result), placeless(hint, places), then) == (fault.code, fault.hint, fault.then)
    assert then != fault.code


def test_the_page_of_errors_is_this_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()
