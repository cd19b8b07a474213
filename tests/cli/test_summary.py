"""What the end of a run says of its numbers."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from nemotron_steps.cli.run import _show_next, show_values, summary_rows
from nemotron_steps.cli.terminal import Terminal

GREEN, RED, DIM = "\x1b[32m", "\x1b[31m", "\x1b[2m"


def test_a_change_is_green_where_it_is_for_the_better() -> None:
    values = {
        "reward": {"before": 0.25, "after": 0.75},
        "validation_loss": {"before": 1.0, "after": 1.5},
        "kl": {"before": 0.5, "after": 0.25},
        "accuracy": {"before": 0.5, "after": 0.25},
        "best_of_4": {"before": 1, "after": 1},
    }
    rows = summary_rows(values, Terminal(io.StringIO(), color=True, width=None))
    assert [row[-1].removesuffix("\x1b[0m") for row in rows] == [
        f"{GREEN}+0.5",
        f"{RED}+0.5",
        f"{GREEN}−0.25",
        f"{RED}−0.25",
        f"{DIM}no change",
    ]


def test_values_that_cannot_be_compared_and_several_at_once_are_shown_as_they_are() -> None:
    values = {
        "verdict": {"before": None, "after": 0.5},
        "by_environment": {"math": 0.5, "code": 1},
        "curve": [1, 0.25],
        "num_rows": 1234,
    }
    assert summary_rows(values, Terminal(io.StringIO(), color=False, width=None)) == [
        ["verdict", "None → 0.5"],
        ["by environment", "math 0.5, code 1"],
        ["curve", "1, 0.25"],
        ["num rows", "1,234"],
    ]


def test_what_comes_next_is_a_command_with_every_input_that_it_needs() -> None:
    def port(name: str, type_name: str, *, required: bool = True) -> Any:
        return SimpleNamespace(name=name, type=type_name, required=required)

    def consumer(*consumes: Any) -> Any:
        return SimpleNamespace(step=SimpleNamespace(category="eval", entry="toy:run"), consumes=consumes)

    def advised(*consumes: Any) -> list[str]:
        registry: Any = SimpleNamespace(
            steps={"toy/eval": consumer(*consumes)},
            types=SimpleNamespace(is_a=lambda a, b: a == b),
            find_step=lambda step_id: None,
        )
        text = io.StringIO()
        _show_next(result, train, registry, Terminal(text, color=False, width=None))
        return [line.strip() for line in text.getvalue().splitlines() if "steps run" in line]

    made = {name: SimpleNamespace(ref=f"{name}:v1", type=name) for name in ("rows", "model")}
    older = SimpleNamespace(step_id="toy/older", outputs={"rows": SimpleNamespace(ref="older:v1", type="rows")})
    make, train = (
        SimpleNamespace(step_id=f"toy/{name}", outputs={output: made[output]})
        for name, output in (("make", "rows"), ("train", "model"))
    )
    result: Any = SimpleNamespace(steps=[older, make, train])
    model, optional = port("policy", "model"), port("judge", "rows", required=False)
    assert advised(model, optional) == ["steps run toy/eval --input policy=model:v1"]
    assert advised(model, port("prompts", "rows")) == [
        "steps run toy/eval --input policy=model:v1 --input prompts=rows:v1"
    ]
    assert advised(model, port("judge", "model_of_a_judge")) == []


def test_a_table_has_a_column_for_every_number_that_a_row_has() -> None:
    table = {"first": {"math": 0.5}, "second": {"math": 1.0, "code": 0.25}}
    text = io.StringIO()
    show_values({"held_out": table, "loss": 2.0}, Terminal(text, color=False, width=None))
    assert [line.split() for line in text.getvalue().splitlines()] == [
        ["loss", "2"],
        ["held", "out", "math", "code"],
        ["first", "0.5"],
        ["second", "1", "0.25"],
    ]
