"""GRPO from a model, rows and functions in Python: the same run as on the command line."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps import GRPO, open_run, run
from nemotron_steps.api.grpo import _config_for
from nemotron_steps.cli.main import steps
from nemotron_steps.config.profiles import Profile
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


def test_validation_is_asked_for_where_no_key_says_when(model: Path, workplace: Path) -> None:
    def command(**more: Any) -> list[str]:
        return GRPO(model, ROWS, shorter, config="cpu", validation=ROWS[:2], **more).command.split()

    assert "grpo.val_at_end=true" in command(over={"grpo.seed": [1, 2]})
    assert "grpo.val_at_end=true" in command(grpo={"val_period": 0})
    assert "grpo.val_at_end=true" not in command(grpo={"val_period": 1})
    assert "grpo.val_at_start=true" not in command(overrides=["grpo.val_at_end=true"])
    (workplace / "own.yaml").write_text("defaults: [cpu]\ngrpo: {val_at_start: true}\n")
    assert "grpo.val_at_end=true" not in GRPO(model, ROWS, shorter, config="own", validation="held.jsonl").command


def training_words(training: GRPO) -> list[str]:
    import shlex

    return shlex.split(training.command)


@pytest.mark.parametrize(
    ("device", "visible", "config"),
    [("nvidia0", None, "one_gpu"), ("nvidia0", "0", "one_gpu"), ("nvidia0", "-1", "cpu"), ("nvidiactl", None, "cpu")],
)
def test_the_config_is_that_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, visible: str | None, config: str
) -> None:
    (tmp_path / device).touch()
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, kind: glob(tmp_path if str(self) == "/dev" else self, kind))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert _config_for(None) == _config_for(Profile(executor="local", gpus_per_node=8)) == config
    assert _config_for(Profile(executor="slurm", gpus_per_node=0)) == "cpu"
    assert _config_for(Profile(executor="slurm", gpus_per_node=None)) == "one_gpu"
