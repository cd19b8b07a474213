"""Configs of the evaluation steps."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from nemotron_steps.config.schema.base import Section, refuse
from nemotron_steps.config.schema.policy import GenerationConfig
from nemotron_steps.config.schema.rl import DataFileConfig, EnvConfig
from nemotron_steps.config.schema.vllm_options import of_sampling, option_rules


class EvaluationConfig(Section):
    """`evaluation.*`: how many prompts and samples."""

    environment: str | None = None
    """Grades every row; None: each row's own environment."""
    max_prompts: PositiveInt | None = None
    samples_per_prompt: PositiveInt = 1
    max_total_sequence_length: PositiveInt = 4096
    max_turns: PositiveInt = 1
    """Turns of a conversation with tools, as `grpo.max_rollout_turns`."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the weights that generate."""
    seed: int = Field(0, ge=0)


class GradingConfig(Section):
    """What every evaluation has."""

    MODEL: ClassVar[str] = "model"
    """The key of what it samples from."""

    evaluation: EvaluationConfig = EvaluationConfig()
    generation: GenerationConfig = GenerationConfig()
    env: EnvConfig = EnvConfig()

    @model_validator(mode="after")
    def _has_a_meaning(self) -> GradingConfig:
        refuse(option_rules(self.generation, "generation", of_sampling("evaluation", self.MODEL)))
        return self


class EvalConfig(GradingConfig):
    """The whole config of a model evaluation."""

    model: str | None = None
    """Hugging Face folder; the `model` port is written here."""
    data: DataFileConfig = DataFileConfig()


class StagesEvaluationConfig(EvaluationConfig):
    """`evaluation.*` of several sets of prompts."""

    environments: dict[str, str] = Field(default_factory=dict)
    """Set → what grades every row of it; a set that is not here is graded as the others are."""
    max_prompts_of: dict[str, PositiveInt] = Field(default_factory=dict)
    """Set → its prompts at most, where that is not `max_prompts`: agents take longer than answers."""


class StagesEvalConfig(GradingConfig):
    """The whole config of an evaluation of several models on several sets of prompts."""

    MODEL: ClassVar[str] = "models.NAME"

    evaluation: StagesEvaluationConfig = StagesEvaluationConfig()

    models: dict[str, str] = Field(default_factory=dict)
    """Name → Hugging Face folder, in the order of the table's rows; the `models` port is written here."""
    prompts: dict[str, str] = Field(default_factory=dict)
    """Name → folder of prompts, in the order of its columns; the `prompts` port is written here."""
