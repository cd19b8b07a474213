"""The conformance kit: one line in a test file of a package's, and pytest checks what the package brings.

    from nemotron_steps.testing import step_conformance

    TestFilterPrompts = step_conformance("acme/filter_prompts")

gives `TestFilterPrompts::test_runs`, `::test_resumes_after_a_kill` and so on, each an item of its own that can be
selected (`-k resumes`), marked, or overridden in a subclass. Needs pytest; nothing else of the project imports this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemotron_steps.testing.environment_subject import Answer, Row
    from nemotron_steps.testing.step_subject import Source

__all__ = [
    "environment_conformance",
    "executor_conformance",
    "pipeline_conformance",
    "step_conformance",
    "type_conformance",
]


def step_conformance(
    step_id: str,
    *,
    config: str | None = None,
    inputs: Mapping[str, Source] | None = None,
    overrides: Sequence[str] = (),
    seconds: float = 60.0,
) -> type:
    """A class of tests for a step; assign it to a name that begins with `Test`.

    Args:
        step_id: `ID`, or `PACK:ID`. The pack is installed, on STEPS_PATH or in ./manifests.
        config: the config that runs use; default: `tiny` where the step has one, else `default`.
        inputs: port → a path, or a function that writes into an empty folder and returns the path. Ports of the
            built-in types of rows need none.
        overrides: further overrides of every run, `key=value`.
        seconds: the longest that a run may take.
    """
    from nemotron_steps.testing.step_runs import SUITE
    from nemotron_steps.testing.step_subject import StepSubject

    return SUITE.test_class(
        f"step {step_id}", lambda folder: StepSubject(step_id, folder, config, inputs or {}, overrides, seconds)
    )


def environment_conformance(
    name: str,
    *,
    rows: Sequence[Row] | str | Path,
    answer: Callable[[Row], Answer],
    config: Mapping[str, Any] | None = None,
    judges: Mapping[str, Any] | None = None,
    worthless: float | None = None,
) -> type:
    """A class of tests for an environment; assign it to a name that begins with `Test`.

    Args:
        name: its name; the package that brings it is installed.
        rows: rows it can score, or a JSON Lines file of some. Two that differ are enough.
        answer: row → the right answer: a text, or a Response, whose tool calls are made before it is judged.
        config: settings, as under `env.nemo_gym.environments.NAME`.
        judges: role → judge, for an environment that asks language models.
        worthless: the most that an answer without content may earn, where that is not the low end of its range:
            a reward by degrees gives any letters something.
    """
    from nemotron_steps.testing.environment import SUITE
    from nemotron_steps.testing.environment_subject import EnvironmentSubject

    return SUITE.test_class(
        f"environment {name}", lambda _: EnvironmentSubject(name, rows, answer, config or {}, judges or {}, worthless)
    )


def executor_conformance(
    name: str, *, profile: Mapping[str, Any] | None = None, seconds: float = 60.0, jobs: bool = True
) -> type:
    """A class of tests for an executor; assign it to a name that begins with `Test`. It starts small jobs for real.

    Args:
        name: its name; the package that brings it is installed, and what it starts jobs with is at hand.
        profile: its keys in env.toml.
        seconds: the longest that a job may take to start or to end.
        jobs: False where what it starts jobs with is not at hand: its class and its profile alone.
    """
    from nemotron_steps.testing.executor import PROFILE_SUITE, SUITE, ExecutorSubject

    suite = SUITE if jobs else PROFILE_SUITE
    return suite.test_class(f"executor {name}", lambda folder: ExecutorSubject(name, folder, profile or {}, seconds))


def type_conformance(name: str, *, example: Callable[[Path], object]) -> type:
    """A class of tests for an artifact type; assign it to a name that begins with `Test`.

    Args:
        name: of the type; the pack that declares it is installed, on STEPS_PATH or in ./manifests.
        example: writes a valid artifact into an empty folder, the same each time.
    """
    from nemotron_steps.testing.artifact_type import SUITE, TypeSubject

    return SUITE.test_class(f"type {name}", lambda folder: TypeSubject(name, folder, example))


def pipeline_conformance(name: str) -> type:
    """A class of tests for a pipeline, which is planned and not run; assign it to a name that begins with `Test`.

    Args:
        name: of the pipeline; its pack is installed, on STEPS_PATH or in ./manifests.
    """
    from nemotron_steps.testing.pipeline import SUITE, PipelineSubject

    return SUITE.test_class(f"pipeline {name}", lambda folder: PipelineSubject(name, folder))
