"""How answers are graded: which environment, with what, and what is closed whatever happens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.config.schema.eval import GradingConfig
from nemotron_steps.errors import StepFailedError, UnsupportedError
from nemotron_steps.steps import evaluation

SETS = {"a": ["a0", "a1"], "b": ["b0"]}


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is done with a model that answers nothing, in order."""
    notes: list[tuple[Any, ...]] = []

    class Environments:
        def __init__(self, settings: Any, judges: Any, *, only: str | None) -> None:
            notes.append(("environments", judges, only))

        async def start(self) -> None:
            notes.append(("start",))

        async def close(self) -> None:
            notes.append(("close",))

    class Collector:
        async def collect(self, rows: Any, *, group_ids: list[str], num_generations: int) -> list[str]:
            notes.append(("collect", rows, group_ids, num_generations))
            if "lost" in rows:
                raise StepFailedError("lost")
            return [f"graded {row}" for row in rows]

    def check_rows(env: Any, rows: Any, *, only: str | None, policy_served: bool, policy: Any) -> Any:
        notes.append(("check", rows, only, policy_served))
        return SimpleNamespace(judges="needed")

    def build_judges(gym: Any, needed: Any, *, defer_to: Any, seed: int) -> str:
        notes.append(("judges", needed, seed))
        return "judges"

    def build_generator(folder: Path, generation: Any, chat: Any, *, max_total_length: int, precision: str) -> Any:
        notes.append(("generator", folder.name, max_total_length, precision))
        return SimpleNamespace(close=lambda: notes.append(("generator closed",)))

    def build_collector(*given: Any, seed: int, max_total_length: int, max_turns: int, **more: Any) -> Collector:
        notes.append(("collector", seed, max_total_length, more["longest"], max_turns))
        return Collector()

    monkeypatch.setattr(evaluation, "check_rows", check_rows)
    monkeypatch.setattr(evaluation, "ChatFormat", SimpleNamespace(from_folder=lambda folder: "chat"))
    monkeypatch.setattr(evaluation, "build_generator", build_generator)
    monkeypatch.setattr(evaluation, "AsyncSampler", lambda generator, name: "sampler")
    monkeypatch.setattr(evaluation, "build_judges", build_judges)
    monkeypatch.setattr(evaluation, "EnvironmentSet", Environments)
    monkeypatch.setattr(evaluation, "build_collector", build_collector)
    monkeypatch.setattr(evaluation, "refuse_failures", lambda *given: notes.append(("refuse", *given)))
    return notes


def config(**env: Any) -> GradingConfig:
    evaluation = {"samples_per_prompt": 3, "max_total_sequence_length": 64, "max_turns": 2, "seed": 5}
    return GradingConfig.model_validate({"evaluation": {**evaluation, "precision": "bfloat16"}, "env": env})


def test_what_a_generator_cannot_do_is_told_with_the_keys_of_this_step(
    noted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise UnsupportedError(
            "no kernel",
            where="policy.generation.backend=vllm",
            hints=["policy.generation.backend=embedded", "'inputs.policy.overrides=[\"from_scratch.head_dim=32\"]'"],
        )

    monkeypatch.setattr(evaluation, "build_generator", refuse)
    with pytest.raises(UnsupportedError) as caught:
        evaluation.grade(Path("model"), SETS, config(), None, environment="mcqa")  # type: ignore[arg-type]
    assert caught.value.where == "generation.backend=vllm"
    assert caught.value.hints == ("generation.backend=embedded",)
