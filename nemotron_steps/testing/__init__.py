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


def step_conformance(
    step_id: str,
    *,
    config: str | None = None,
    inputs: Mapping[str, Source] | None = None,
    overrides: Sequence[str] = (),
    seconds: float = 60.0,
) -> type:
    """A class of tests for a step (docs/testing.md); assign it to a name that begins with `Test`.

    Args:
        step_id: `ID`, or `PACK:ID`.
        inputs: port → a path, or a function that writes into an empty folder and returns the path.
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
    """A class of tests for an environment (docs/testing.md); assign it to a name that begins with `Test`.

    Args:
        answer: row → the right answer: a text, or a Response, whose tool calls are made before it is judged.
        config: settings, as under `env.nemo_gym.environments.NAME`.
        judges: role → judge.
        worthless: the most that an answer without content may earn; default: the low end of the rewards' range.
    """
    from nemotron_steps.testing.environment import SUITE
    from nemotron_steps.testing.environment_subject import EnvironmentSubject

    return SUITE.test_class(
        f"environment {name}", lambda _: EnvironmentSubject(name, rows, answer, config or {}, judges or {}, worthless)
    )


def executor_conformance(
    name: str, *, profile: Mapping[str, Any] | None = None, seconds: float = 60.0, jobs: bool = True
) -> type:
    """A class of tests for an executor (docs/testing.md); assign it to a name that begins with `Test`.

    Args:
        profile: its keys in env.toml.
        seconds: the longest that a job may take to start or to end.
        jobs: False: its class and its profile alone.
    """
    from nemotron_steps.testing.executor import PROFILE_SUITE, SUITE, ExecutorSubject

    suite = SUITE if jobs else PROFILE_SUITE
    return suite.test_class(f"executor {name}", lambda folder: ExecutorSubject(name, folder, profile or {}, seconds))


def type_conformance(name: str, *, example: Callable[[Path], object]) -> type:
    """A class of tests for an artifact type (docs/testing.md), of which `example` writes one into an empty folder, the
    same each time; assign it to a name that begins with `Test`."""
    from nemotron_steps.testing.artifact_type import SUITE, TypeSubject

    return SUITE.test_class(f"type {name}", lambda folder: TypeSubject(name, folder, example))


def pipeline_conformance(name: str) -> type:
    """A class of tests for a pipeline (docs/testing.md); assign it to a name that begins with `Test`."""
    from nemotron_steps.testing.pipeline import SUITE, PipelineSubject

    return SUITE.test_class(f"pipeline {name}", lambda folder: PipelineSubject(name, folder))
