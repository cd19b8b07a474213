"""Every number that a run reports at its end is recomputed from what it recorded on its way."""

import io
import json
import re
from collections import defaultdict
from collections.abc import Callable
from html import unescape
from statistics import fmean
from typing import Any

import pytest

from nemotron_steps import run
from nemotron_steps.api.result import Result
from nemotron_steps.cli.run import show_values
from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.runs.log_format import number

pytestmark = [pytest.mark.chain, pytest.mark.slow, pytest.mark.timeout(600)]

Series = dict[str, dict[int, float]]
Formula = Callable[[Series], Any]


def steps_of(name: str, first: int, last: int) -> Formula:
    """Mean over training steps, both ends included."""
    return lambda series: fmean(series[name][step] for step in range(first, last + 1))


def changed(name: str, last: int, *further: str) -> Formula:
    """Before the first step, and after the last one."""

    def both(series: Series, name: str) -> dict[str, float]:
        return {"before": series[name][0], "after": series[name][last]}

    beside = {figure: f"{name.rpartition('/')[0]}/{figure}" for figure in further}
    return lambda series: both(series, name) | {figure: both(series, key) for figure, key in beside.items()}


def heldout(name: str, last: int) -> dict[str, Formula]:
    return {
        f"{name}_reward": changed(f"{name}/reward", last, "standard_error", "samples"),
        f"{name}_answer_tokens": changed(f"{name}/answer_tokens", last),
        f"{name}_truncation_rate": changed(f"{name}/truncation_rate", last),
    }


SFT: dict[str, Formula] = {
    "steps": lambda series: max(series["loss"]),
    "train_loss_first_5_steps": steps_of("loss", 1, 5),
    "train_loss_last_5_steps": steps_of("loss", 8, 12),
    "validation_loss": changed("validation_loss", 12),
}
RLVR: dict[str, Formula] = {
    "steps": lambda series: max(series["reward/mean"]),
    "reward_first_3_steps": steps_of("reward/mean", 1, 3),
    "reward_last_3_steps": steps_of("reward/mean", 5, 7),
    **heldout("validation", 7),
    **heldout("heldout", 7),
}
DPO: dict[str, Formula] = {
    "steps": lambda series: max(series["loss"]),
    "train_loss_first_step": lambda series: series["loss"][1],
    "train_loss_last_step": lambda series: series["loss"][3],
    "train_accuracy_first_step": lambda series: series["accuracy"][1],
    "train_accuracy_last_step": lambda series: series["accuracy"][3],
    **{f"validation_{name}": changed(f"validation/{name}", 3) for name in ("loss", "accuracy", "rewards_margin")},
}
EVAL: dict[str, Formula] = {
    name: lambda series, name=name: series[f"heldout/{name}"][0] for name in ("reward", "standard_error", "samples")
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Result:
    home = tmp_path_factory.mktemp("home")
    settings = {"sft": {"max_num_steps": 12}, "from_scratch": {"max_position_embeddings": 1024}}
    return run("sft/megatron_bridge", config="tiny", home=home, progress=False, **settings)


def trained(model: Result, step: str, **settings: Any) -> Result:
    inputs = {("model" if step.startswith("eval") else "policy"): model.outputs["model"]}
    return run(step, config="tiny", home=model.folder.parents[1], inputs=inputs, progress=False, **settings)


def recorded(result: Result, step: str) -> Series:
    """metrics.jsonl of the run."""
    series: Series = defaultdict(dict)
    for line in (result.folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["step"] == step:
            for name, value in record["values"].items():
                series[name][record["index"]] = value
    return series


@pytest.mark.parametrize(
    ("step", "formulas", "settings"),
    [
        ("sft/megatron_bridge", SFT, None),
        (
            "rl/nemo_rl/rlvr",
            RLVR,
            {"grpo": {"max_num_steps": 7, "val_at_start": True, "val_at_end": True, "max_val_samples": 8}},
        ),
        ("rl/nemo_rl/dpo", DPO, {"dpo": {"max_num_steps": 3}}),
        ("eval/model_eval", EVAL, {"evaluation": {"max_prompts": 40}}),
    ],
)
def test_a_number_is_what_its_label_says(
    step: str, formulas: dict[str, Formula], settings: dict[str, Any] | None, model: Result
) -> None:
    result = model if settings is None else trained(model, step, **settings)
    series = recorded(result, step)
    expected = {label: formula(series) for label, formula in formulas.items()}
    if step == "eval/model_eval":
        expected |= {"graded_prompts": "40 of 400", "split": "heldout"}
    assert result.summary == expected

    # The same numbers under the same labels on the page and in the terminal.
    text, page = io.StringIO(), unescape(result.report.read_text())
    show_values(result.summary, Terminal(text, color=False, width=None))
    lines = [line.split("  ") for line in text.getvalue().splitlines()]
    assert [next(word for word in line if word).strip() for line in lines] == [
        label.replace("_", " ") for label in expected
    ]
    for label, value in expected.items():
        words = label.replace("_", " ")
        if isinstance(value, dict):
            cells = re.search(rf"<tr><td>{words}</td><td[^>]*>(.*?)</td><td[^>]*>(.*?)</td>", page)
            assert cells is not None and cells.groups() == (number(value["before"]), number(value["after"]))
        else:
            assert f"{words} <b>{value if isinstance(value, str) else number(value)}</b>" in page

    # Cached, the same request says the same.
    assert result.metrics == {
        name: values
        for name, points in series.items()
        if not name.startswith("timing/") and (values := {at: y for at, y in points.items() if y == y and y != "nan"})
    }
    if settings is not None:
        again = trained(model, step, **settings)
        assert again.steps[step].state == "cached"
        assert (again.summary, again.metrics) == (result.summary, result.metrics)
