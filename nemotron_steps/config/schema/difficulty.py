"""Config of `data_prep/difficulty`: a policy samples each prompt, and prompts are dropped and sorted by the outcome."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from nemotron_steps.config.schema.base import OPERATIONAL, Section, refuse
from nemotron_steps.config.schema.policy import GenerationConfig
from nemotron_steps.config.schema.rl import ClusterConfig, DataFileConfig, EnvConfig
from nemotron_steps.config.schema.vllm_options import of_sampling, option_rules


class PromptFilesConfig(Section):
    """`data.*`: only training prompts are sampled; the other splits are handed on as they are."""

    train: DataFileConfig = DataFileConfig()
    validation: DataFileConfig = DataFileConfig()
    heldout: DataFileConfig = DataFileConfig()


class DifficultySettings(Section):
    """`difficulty.*`."""

    samples_per_prompt: PositiveInt = 8
    pass_reward: float = 1.0
    """A sample passes with a reward of at least this."""
    drop_always_solved: bool = True
    """Leave out prompts of which every graded sample passed: their groups have no advantage."""
    drop_never_solved: bool = False
    """Leave out prompts of which none passed."""
    order: Literal["easy_first", "hard_first"] = "easy_first"
    max_total_sequence_length: PositiveInt = 4096
    max_rollout_turns: PositiveInt = 1
    """Assistant turns of a rollout, where the environment's own `max_steps` does not say."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the weights while sampling."""
    seed: int = Field(0, ge=0)
    prompts_at_once: Annotated[PositiveInt | None, OPERATIONAL] = None
    """Prompts under way together; None: as many as fill the generators twice."""


class DifficultyConfig(Section):
    """The whole config."""

    model: str | None = None
    """Hugging Face folder of the policy; the `model` port is written here."""
    data: PromptFilesConfig = PromptFilesConfig()
    difficulty: DifficultySettings = DifficultySettings()
    generation: GenerationConfig = GenerationConfig()
    env: EnvConfig = EnvConfig()
    cluster: Annotated[ClusterConfig, OPERATIONAL] = ClusterConfig()

    @model_validator(mode="after")
    def _has_a_meaning(self) -> DifficultyConfig:
        refuse(option_rules(self.generation, "generation", of_sampling("difficulty", "model")))
        return self
