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


def test_every_set_is_answered_by_one_model_and_graded_by_one_set_of_environments(noted: list[Any]) -> None:
    found, _ = evaluation.grade(Path("x/model"), SETS, config(), None, environment="mcqa")  # type: ignore[arg-type]
    assert found == {"a": ["graded a0", "graded a1"], "b": ["graded b0"]}
    assert noted == [
        ("check", ["a0", "a1", "b0"], "mcqa", False),
        ("generator", "model", 64, "bfloat16"),
        ("judges", "needed", 5),
        ("environments", "judges", "mcqa"),
        ("collector", 5, 64, 64, 2),
        ("start",),
        ("collect", ["a0", "a1"], ["eval/0", "eval/1"], 3),
        ("collect", ["b0"], ["eval/0"], 3),
        ("close",),
        ("generator closed",),
        ("refuse", ["a0", "a1"], ["graded a0", "graded a1"], 3),
        ("refuse", ["b0"], ["graded b0"], 3),
    ]


def test_the_one_environment_of_the_config_grades_where_no_other_is_asked_for(noted: list[Any]) -> None:
    one = {"should_use_nemo_gym": False, "environment": "genrm_compare"}
    for asked, only in ((None, "genrm_compare"), ("mcqa", "mcqa")):
        noted.clear()
        evaluation.grade(Path("model"), SETS, config(**one), None, environment=asked)  # type: ignore[arg-type]
        assert (noted[0][2], noted[3][2]) == (only, only)


def test_environments_and_model_are_closed_where_answering_fails(noted: list[Any]) -> None:
    with pytest.raises(StepFailedError, match="lost"):
        evaluation.grade(Path("model"), {"a": ["lost"], "b": ["b0"]}, config(), None, environment=None)  # type: ignore
    assert noted[-3:] == [("collect", ["lost"], ["eval/0"], 3), ("close",), ("generator closed",)]


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
