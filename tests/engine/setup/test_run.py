"""What a run's parts are told of its config, with parts that only note it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.config.schema.opd import OpdConfig
from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.engine.placement import run as run_module
from nemotron_steps.engine.rollouts.data import PromptRow
from nemotron_steps.engine.setup import rows as rows_module
from nemotron_steps.engine.setup.rows import Needs, RunRows, check_run_rows
from nemotron_steps.errors import DataError

ENVIRONMENT = {"should_use_nemo_gym": False, "environment": "mcqa"}
PROMPTS = [PromptRow(n, {"responses_create_params": {"input": "x"}}, f"f:{n + 1}") for n in range(8)]


def built(task: Path, work: Path, monkeypatch: pytest.MonkeyPatch, trained_on: str, **changes: Any) -> Any:
    """A run whose environments are `a` to `c`, of which those named are trained on, with rewards up to 1, 2 and 3."""
    usual = {"c": (1.0, 2.0)}
    ranges = {
        name: SimpleNamespace(name=name, reward_range=(0.0, n), usual_range=usual.get(name))
        for n, name in enumerate("abc", start=1)
    }
    told: dict[str, Any] = {}

    def place(config: Any, wanted: Any) -> Any:
        told["wanted"] = wanted
        environments = SimpleNamespace(get=ranges.__getitem__)
        return SimpleNamespace(
            policy=None, generator=None, sampler=None, judges=[], environments=environments, teachers=None, where={},
            resources=ExitStack(),
        )  # fmt: skip

    monkeypatch.setattr(run_module, "place", place)
    monkeypatch.setattr(run_module, "build_collector", lambda *given, **more: told.update(collector=more))
    needs = Needs(("c", "a", "b"), frozenset(), frozenset(trained_on))
    monkeypatch.setattr(run_module, "check_run_rows", lambda config, rows: needs)
    grpo = {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "max_num_steps": 3, "max_num_epochs": 9}
    values: dict[str, Any] = {
        "grpo": {**grpo, **changes.pop("grpo", {})},
        "policy": {
            "checkpoint": str(task),
            "train_global_batch_size": 2,
            "max_total_sequence_length": 40,
            "max_total_sequence_length_end": 50,
            **changes.pop("policy", {}),
        },
        **changes,
    }
    reporter: Any = SimpleNamespace(event=lambda name, **fields: None)
    run, _ = run_module.build_run(
        RlConfig.model_validate(values), RunRows(PROMPTS, PROMPTS[:1]), work=work, reporter=reporter, started=0.0
    )
    run.close()
    return run, told


@pytest.mark.parametrize(
    ("trained_on", "bounds", "more"),
    [
        ("b", (0.0, 2), {}),
        ("c", (1.0, 2.0), {}),
        ("ab", None, {}),
        ("", None, {}),
        ("b", None, {"low_effort": {"string": "brief", "weight": 1.0}}),  # which adds to the reward
    ],
)
def test_the_range_of_rewards_is_known_where_one_environment_alone_gives_them(
    trained_on: str, bounds: Any, more: Any, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = built(task, tmp_path, monkeypatch, trained_on, grpo=more)
    assert run.signals.reward_range == bounds and run.signals.max_policy_lag is None


def test_every_row_that_is_trained_on_has_a_teacher_and_those_of_validation_are_checked_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(rows_module, "check_rows", lambda env, rows, heldout, **more: checked.append((rows, more)))
    section = {"teachers": {"a": "x", "b": "y"}, "teacher_field": "teacher"}
    config = OpdConfig.model_validate({"on_policy_distillation": section, "env": ENVIRONMENT})
    rows = [PromptRow(n, {"teacher": name}, f"f:{n + 1}") for n, name in enumerate("abz")]
    check_run_rows(config, RunRows(rows[:2], rows[2:]))  # nobody learns from those of validation
    ((found, more),) = checked
    assert list(found) == rows and more["policy_served"] is False and more["only"] == "mcqa"
    with pytest.raises(DataError, match="'z' is not there"):
        check_run_rows(config, RunRows(rows))
