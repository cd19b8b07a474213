"""One stage as several: what the instances are called, what they read, and what is theirs alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from nemotron_steps.manifest.pipeline_models import StageSource
from nemotron_steps.resolver.plan import Instance
from nemotron_steps.resolver.request import Goal, Request
from nemotron_steps.session.fan_out import Axis, fanned_out


def goal(name: str, *overrides: str, **wired: str) -> Goal:
    """`port="stage.out"`: wired to an earlier stage; a colon makes it a reference. `_` stands for the dot of a port."""
    sources = {
        port.replace("__", "."): StageSource(ref=source) if ":" in source else StageSource.model_validate(source)
        for port, source in wired.items()
    }
    where = {"": f"p.toml:{name}", **{port: f"p.toml:{name}.{port}" for port in sources}}
    return Goal(f"steps/{name}", None, overrides, name, sources, where)


def axis(*values: str, keys: tuple[tuple[str, str], ...] = (("train", "seed"),)) -> Axis:
    return Axis(keys, values)


def made(goals: tuple[Goal, ...], *axes: Axis, inputs: Mapping[str, str] | None = None) -> dict[str, Goal]:
    request = fanned_out(Request(goals, "p", inputs or {}, chained=False, name="p"), axes)
    assert (request.command, request.chained, request.name) == ("p", False, "p")
    return {str(goal.name): goal for goal in request.goals}


def read(goal: Goal) -> dict[str, Any]:
    return {port: source.ref or (source.stage, source.port) for port, source in goal.wired.items()}


def test_what_reads_an_instance_is_fanned_out_with_it_and_a_port_of_many_takes_all() -> None:
    stages = (
        goal("train"),
        goal("eval", model="train.model"),
        goal("compare", models__t="train", models__e="eval.out"),
    )
    found = made(stages, axis("1", "2"))
    assert list(found) == ["train-1", "train-2", "eval-1", "eval-2", "compare"]
    assert read(found["eval-2"]) == {"model": ("train-2", "model")}
    assert found["eval-2"].overrides == ()
    assert found["eval-2"].instance == Instance("eval", {"train.seed": "2"})
    assert read(found["compare"]) == {
        "models.t-1": ("train-1", None),
        "models.t-2": ("train-2", None),
        "models.e-1": ("eval-1", "out"),
        "models.e-2": ("eval-2", "out"),
    }
    where = found["compare"].where
    assert (where["models.t-2"], where["models.e-1"]) == ("p.toml:compare.models.t", "p.toml:compare.models.e")
    assert found["compare"].instance is None


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        (("0.1", "1e-6"), ("0_1", "1e_6")),
        (("'a b'", '"c"', "\\'d"), ("a_b", "c", "d")),
        (("/data/rows.jsonl", "./more.v2.jsonl", "org/name/"), ("rows", "more_v2", "name")),
        (("/", "--", ""), ("value_1", "value_2", "value_3")),
        (("a/x", "b/x", "c/y"), ("x_1", "x_2", "y")),
    ],
)
def test_a_value_is_part_of_a_name(values: tuple[str, ...], labels: tuple[str, ...]) -> None:
    assert axis(*values).labels == labels
