"""Configs of the steps that sample from a model without training it: evaluations, and `data_prep/difficulty`."""

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from nemotron_steps.config.schema.base import OPERATIONAL, Rule, Section
from nemotron_steps.config.schema.policy import GenerationConfig, option_rules, own_keys
from nemotron_steps.config.schema.reward import RewardedConfig
from nemotron_steps.config.schema.rl import ClusterConfig, DataFileConfig, EnvConfig, PromptFilesConfig


class EvaluationConfig(Section):
    """`evaluation.*`: how many prompts and samples."""

    environment: str | None = None
    """Grades every row; None: each row's own environment."""
    max_prompts: PositiveInt | None = None
    samples_per_prompt: PositiveInt = 1
    max_total_sequence_length: PositiveInt | None = None
    """None: 4096, or what the model was made for where that is less."""
    max_turns: PositiveInt = 1
    """Turns of a conversation with tools, as `grpo.max_rollout_turns`."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the weights that generate."""
    seed: int = Field(0, ge=0)


class GradingConfig(RewardedConfig):
    """What every evaluation has."""

    GRADERS: ClassVar = {"evaluation.environment": None}
    MODEL: ClassVar[str] = "model"
    """The key of what it samples from."""

    evaluation: EvaluationConfig = EvaluationConfig()
    generation: GenerationConfig = GenerationConfig()
    env: EnvConfig = EnvConfig()

    def _broken_rules(self) -> Iterable[Rule]:
        return option_rules(self.generation, "generation", own_keys("evaluation", "evaluation", self.MODEL))


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

    GRADERS: ClassVar = {**GradingConfig.GRADERS, "evaluation.environments": {}}
    MODEL: ClassVar[str] = "models.NAME"

    evaluation: StagesEvaluationConfig = StagesEvaluationConfig()

    models: dict[str, str] = Field(default_factory=dict)
    """Name → Hugging Face folder, in the order of the table's rows; the `models` port is written here."""
    prompts: dict[str, str] = Field(default_factory=dict)
    """Name → folder of prompts, in the order of its columns; the `prompts` port is written here."""


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


class DifficultyConfig(RewardedConfig):
    """The whole config of `data_prep/difficulty`: a policy samples each prompt; the outcome sorts and drops prompts."""

    model: str | None = None
    """Hugging Face folder of the policy; the `model` port is written here."""
    data: PromptFilesConfig = PromptFilesConfig()
    difficulty: DifficultySettings = DifficultySettings()
    generation: GenerationConfig = GenerationConfig()
    env: EnvConfig = EnvConfig()
    cluster: Annotated[ClusterConfig, OPERATIONAL] = ClusterConfig()

    def _broken_rules(self) -> Iterable[Rule]:
        return option_rules(self.generation, "generation", own_keys("difficulty", "difficulty", "model"))
