"""data_prep/difficulty: pass rates of a real (random) policy, what is dropped, the order, and going on after a kill."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.grpo_task import make_checkpoint, prompts, write_rows
from nemotron_steps.artifacts.validators import validate
from nemotron_steps.config.schema.eval import DifficultyConfig
from nemotron_steps.engine.rollouts.evaluation import PassRate, RateJournal
from nemotron_steps.environments import registry
from nemotron_steps.runs.context import plain_context
from nemotron_steps.steps.data_prep.difficulty import FIELD, run
from tests.engine.grpo.grpo_environments import ENVIRONMENTS

PROMPTS = 24


@pytest.fixture(autouse=True)
def environments(monkeypatch: pytest.MonkeyPatch) -> None:
    for environment in ENVIRONMENTS:
        monkeypatch.setitem(registry.BUILT_IN, environment.name, f"{environment.__module__}:{environment.__name__}")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("difficulty")
    make_checkpoint(folder)
    write_rows(folder / "train.jsonl", prompts(PROMPTS))
    write_rows(folder / "held.jsonl", prompts(3))
    return folder


def config_of(
    task: Path,
    *,
    environment: str = "any_vowel",
    cluster: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    **settings: Any,
) -> DifficultyConfig:
    return DifficultyConfig.model_validate(
        {
            "model": str(task),
            "data": {
                "train": {"data_path": str(task / "train.jsonl")},
                "heldout": {"data_path": str(task / "held.jsonl")},
            },
            "difficulty": {"samples_per_prompt": 4, "max_total_sequence_length": 96, "prompts_at_once": 3, **settings},
            "generation": {"max_new_tokens": 48, "max_sequences": 8, **(generation or {})},
            "env": {"should_use_nemo_gym": False, "environment": environment},
            "cluster": cluster or {},
        }
    )


def prepared(config: DifficultyConfig, folder: Path) -> Path:
    context = plain_context(config, folder, outputs={"curriculum": "rl_prompts"})
    run(context)
    assert context.outputs["curriculum"].attributes == {"order": "pass_rate"}
    return context.outputs["curriculum"].path


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def table_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "pass_rates.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def curriculum(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        for each in ENVIRONMENTS:
            patch.setitem(registry.BUILT_IN, each.name, f"{each.__module__}:{each.__name__}")
        return prepared(config_of(task), tmp_path_factory.mktemp("curriculum"))


def test_prompts_come_easiest_first_without_those_that_are_always_solved(task: Path, curriculum: Path) -> None:
    table = table_of(curriculum)
    assert len(table) == PROMPTS and all(int(row["graded"]) == 4 for row in table)
    solved = [row["line"] for row in table if row["passed"] == "4"]
    kept = rows_of(curriculum / "train-split.jsonl")
    rates = [row[FIELD]["pass_rate"] for row in kept]
    assert rates == sorted(rates, reverse=True) and len(set(rates)) > 2, "some are harder than others"
    assert solved and len(kept) == PROMPTS - len(solved)
    assert {row["outcome"] for row in table if row["line"] in solved} == {"always_solved"}
    assert 1.0 not in rates
    source = rows_of(task / "train.jsonl")
    for row in kept:  # every field survives
        rate = row.pop(FIELD)
        line = source.index(row) + 1
        assert float(table[line - 1]["pass_rate"]) == rate["pass_rate"] == rate["mean_reward"]
    assert (curriculum / "heldout.jsonl").read_bytes() == (task / "held.jsonl").read_bytes()
    assert validate("rl_prompts", curriculum)["rows"] == {"train-split": len(kept), "heldout": 3}


def test_a_killed_run_goes_on_and_ends_as_an_unbroken_one(task: Path, curriculum: Path, tmp_path: Path) -> None:
    class KilledError(BaseException):
        pass

    journal = tmp_path / "work" / "pass_rates.jsonl"

    keep = RateJournal.add

    def add(self: RateJournal, rate: PassRate) -> None:
        if len(self.rates) == 10:
            raise KilledError
        keep(self, rate)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(RateJournal, "add", add)
        prepared(config_of(task), tmp_path)
    known = journal.read_text().splitlines()
    assert len(known) == 10
    journal.write_text("\n".join(known) + '\n{"index": 3, "gra')  # cut off while it was written
    rated: list[int] = []

    def noted(self: RateJournal, rate: PassRate) -> None:
        rated.append(rate.index)
        keep(self, rate)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RateJournal, "add", noted)
        again = prepared(config_of(task), tmp_path)
    assert sorted(rated + [json.loads(line)["index"] for line in known]) == list(range(PROMPTS))
    for file in ("train-split.jsonl", "pass_rates.csv", "heldout.jsonl"):
        assert (again / file).read_bytes() == (curriculum / file).read_bytes(), file


def test_a_plan_refuses_to_shuffle_the_curriculum_and_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    from nemotron_steps.cli.main import steps

    chain = ("plan", "data_prep/difficulty", "rl/nemo_rl/rlvr", "-c", "tiny")
    assert steps(chain) == 2
    told = capsys.readouterr().err
    assert "sorted by pass_rate" in told and "hint: data.shuffle=false" in told
    assert steps((*chain, "data.shuffle=false")) == 0
