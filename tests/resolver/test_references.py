"""`${art:NAME}` at a config's keys: which input it feeds, and which it cannot."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.manifest.models import StepManifest
from nemotron_steps.resolver.graph import with_references
from nemotron_steps.resolver.request import StepConfig
from tests.resolver.worlds import step_of


def art(ref: str, field: str = "path") -> str:
    return f"art\0{ref}\0{field}"


@pytest.fixture
def step(tmp_path: Path) -> StepManifest:
    ports = """
[[consumes]]
name = "prompts"
type = "rows"
bind = { "data.train" = "train.jsonl", "data.val" = "validation.jsonl|train.jsonl", "data.test" = "heldout.jsonl" }
[[consumes]]
name = "validation"
type = "rows"
bind = { "data.val" = "validation.jsonl" }
[[consumes]]
name = "model"
type = "hf"
bind = "model.path"
[[consumes]]
name = "unbound"
type = "hf"
"""
    return step_of(tmp_path, "s", ports)


def given(step: StepManifest, data: dict[str, Any], **more: Any) -> tuple[StepConfig, list[str]]:
    values = {"data": data, "model": {"path": None}, **more.pop("values", {})}
    before = copy.deepcopy(values)
    config, problems = with_references(step, StepConfig(values, **more), "s")
    assert values == before
    return config, [f"{problem.code} {problem.found}" for problem in problems]


@pytest.mark.parametrize(
    ("data", "after"),
    [
        ({"train": art("a:v1")}, {"train": "a:v1"}),
        ({"train": art("a:v1", "train"), "val": art("a:v1", "val")}, {"train": "a:v1", "val": None}),
        ({"train": art("a:v1"), "test": art("a:v1", "test")}, {"train": "a:v1", "test": None}),
        ({"train": art("a:v1"), "val": "mine"}, {"train": "a:v1", "val": "mine"}),
        ({"train": "mine", "val": art("b:v1", "val")}, {"train": "mine", "val": "b:v1"}),
        ({"train": "mine", "val": art("b:v1")}, {"train": "mine", "val": "b:v1"}),
    ],
)
def test_an_input_is_fed_at_its_first_key_and_fills_the_others(
    data: dict[str, Any], after: dict[str, Any], step: StepManifest
) -> None:
    config, problems = given(step, data)
    assert (config.values["data"], problems) == (after, [])


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"train": art("a:v1"), "val": art("b:v1")}, ["E306 ${art:b:v1}"]),
        ({"train": art("a:v1", "val")}, ["E305 ${art:a:v1,val}"]),
        ({"train": art("a:v1"), "val": art("a:v1", "train")}, ["E305 ${art:a:v1,train}"]),
        ({"train": art("a:v1"), "test": art("a:v1", "val")}, ["E305 ${art:a:v1,val}"]),
        ({"test": art("a:v1", "test")}, ["E305 ${art:a:v1,test}"]),
        ({"train": art("a:v1"), "seed": art("b:v1")}, ["E305 ${art:b:v1}"]),
    ],
)
def test_what_no_input_is_fed_with_there_is_told(data: dict[str, Any], told: list[str], step: StepManifest) -> None:
    assert given(step, data)[1] == told
    assert given(step, data, inputs={"model": "x"})[1] == told
