"""Every fault of docs/errors.md, provoked on the command line: its code, its hint, and what comes of pasting it."""

import shlex
from pathlib import Path

import pytest

import nemotron_steps
from tests.hints.conftest import Bench
from tests.hints.faults import FAULTS, PASTED, SETUPS, Fault
from tests.hints.pasting import hints_in, paste, placeless, told


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_pasted_hint_mends_the_fault(fault: Fault, bench: Bench, workplace: Path) -> None:
    if fault.name in SETUPS:
        SETUPS[fault.name](bench)
    pasted = PASTED.get(fault.name, 0)
    typed = shlex.split(fault.command)
    result = bench(*typed)
    hint = hints_in(result)[pasted]
    places = {f"{workplace}/": "", str(workplace): ".", f"{Path(nemotron_steps.__file__).parents[1]}/": ""}
    where = next((line.split("--> ", 1)[1] for line in result.err.splitlines() if "--> " in line), "")
    then = told(paste(hint, typed, where, bench, fault.put, again=fault.again))
    assert (told(result), placeless(hint, places), then) == (fault.code, fault.hint, fault.then)
    assert then != fault.code


def test_every_setup_is_that_of_a_fault() -> None:
    assert {*SETUPS, *PASTED} <= {fault.name for fault in FAULTS} and len(FAULTS) > 60
