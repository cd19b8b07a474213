"""Packages made here: their functions do what their tests say, and every fault is one that a test notices."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.config.schema.data_prep import MUTATION_KINDS, MadeUpPackages, SweDemonstrations
from nemotron_steps.errors import DataError
from nemotron_steps.steps.data_prep.swe import demonstrations as module
from nemotron_steps.steps.data_prep.swe.demonstrations import swe_chats
from nemotron_steps.steps.data_prep.swe.mutations import mutations_of
from nemotron_steps.steps.data_prep.swe.packages import CASES, FUNCTIONS, made_up_tasks, split_of


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
    ("place", "split"),
    [(0.0, "heldout"), (0.24, "heldout"), (0.25, "validation"), (0.49, "validation"), (0.5, "train")],
)
def test_a_package_is_in_the_split_that_its_digest_falls_into(place: float, split: str) -> None:
    source = MadeUpPackages(heldout_fraction=0.25, validation_fraction=0.25)
    package: Any = SimpleNamespace(digest=f"{int(place * 2**64):016x}ffff")
    assert split_of(package, source) == split


def demonstrations(**source: Any) -> SweDemonstrations:
    return SweDemonstrations.model_validate({"made_up": {"seed": 5}, **source})


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_too_few_tasks_say_how_often_each_would_have_to_be_shown(split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    some = list(islice(made_up_tasks(demonstrations().made_up, "some"), 60))
    monkeypatch.setattr(module, "made_up_tasks", lambda *_: iter(some))
    wanted: Any = {"train": 0, "validation": 0, "heldout": 0, split: 1000}
    with pytest.raises(DataError, match=f"too few different tasks for the {split} split") as caught:
        swe_chats(demonstrations(), wanted)
    often = -(-1000 // int(caught.value.found or 0))
    assert caught.value.hints == (f"swe.chats_per_task={often}",)
