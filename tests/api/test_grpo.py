"""GRPO from a model, rows and functions in Python: the same run as on the command line."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from nemotron_steps import GRPO, open_run, run
from nemotron_steps.cli.main import steps
from nemotron_steps.errors import RequestError
from tests.api.conftest import ROWS, TINY

WORTH = {"a": 1.0}


def shorter(completions, **columns):
    return [-float(len(each)) for each in completions]


@pytest.mark.slow
@pytest.mark.chain
def test_ten_lines_train_and_what_they_did_is_there_to_be_read(model: Path, workplace: Path, capsys: Any) -> None:
    async def letters(prompts, completions, answer, **columns):
        assert len(prompts) == len(completions) == len(answer)
        return [sum(WORTH.get(letter, 0.0) for letter in each) for each in completions]

    training = GRPO(model, ROWS, rewards=[shorter, letters], weights=[0.1, 1.0], config="cpu", **TINY)

    async def in_a_notebook():
        return training.run(progress=False)

    result = asyncio.run(in_a_notebook())  # a cell runs within a loop
    assert result.status == "done" and capsys.readouterr().out == ""
    assert list(result.metrics["reward/mean"]) == [1, 2]
    assert {"model"} == set(result.outputs)
    assert result.report.is_file()
    above = result.artifacts.lineage(result.outputs["model"])["ancestors"]
    assert {"policy", "prompts"} <= {link["port"] for link in above}
    assert "reward/mean" in result._repr_html_() and "<svg" in result._repr_html_()

    # The command line knows it: the same request is cached, and the run is resumed by its id.
    assert steps(["run", *training_words(training), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {step["state"] for step in said["steps"]} == {"cached"}
    assert training.plan().cached
    assert run(resume=result.id, progress=False).id == result.id
    assert open_run(result.id).metrics == result.metrics

    # What a function says, and what it uses, is part of the run.
    WORTH["b"] = 1.0
    try:
        changed = GRPO(model, ROWS, rewards=[shorter, letters], weights=[0.1, 1.0], config="cpu", **TINY)
        assert not changed.plan().cached
    finally:
        del WORTH["b"]


def training_words(training: GRPO) -> list[str]:
    import shlex

    return shlex.split(training.command)


def test_overrides_are_any_mapping_or_a_list_and_no_text_alone(model: Path, workplace: Path) -> None:
    given = MappingProxyType({"grpo.seed": 1})
    assert "grpo.seed=1" in GRPO(model, ROWS, shorter, config="cpu", overrides=given).command.split()
    with pytest.raises(RequestError, match="overrides are a list of texts") as raised:
        GRPO(model, ROWS, shorter, config="cpu", overrides="grpo.seed=1")
    assert raised.value.hints == ("overrides=['grpo.seed=1']",)
