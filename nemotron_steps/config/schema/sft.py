"""Config of supervised fine-tuning (`sft/megatron_bridge`, `reward_model/genrm`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from nemotron_steps.config.schema.base import OPERATIONAL, Section
from nemotron_steps.config.schema.policy import PolicyConfig
from nemotron_steps.config.schema.rl import CheckpointingConfig, ClusterConfig, DataFileConfig


class FromScratchConfig(Section):
    """A new randomly initialised model, when no checkpoint is given."""

    architecture: Literal["llama", "qwen2", "qwen3"] = "qwen3"
    hidden_size: PositiveInt = 128
    intermediate_size: PositiveInt = 384
    num_hidden_layers: PositiveInt = 4
    num_attention_heads: PositiveInt = 4
    num_key_value_heads: PositiveInt = 2
    head_dim: PositiveInt = 32
    max_position_embeddings: PositiveInt = 512
    rope_theta: float = Field(10_000.0, gt=0)
    tie_word_embeddings: bool = True
    initializer_range: float = Field(0.02, gt=0)


class SftTrainConfig(Section):
    """`sft.*`: how long, and what is measured."""

    max_num_steps: PositiveInt = 1000
    max_num_epochs: PositiveInt = 1
    val_period: int = -1
    val_batches: PositiveInt = 8
    seed: int = 42


class SftDataConfig(Section):
    """`data.*`: chats as JSON Lines with a `messages` list."""

    train: DataFileConfig = DataFileConfig()
    validation: DataFileConfig = DataFileConfig()
    tokenizer: str | None = None
    """Tokenizer folder; used when training from scratch."""


class SftConfig(Section):
    """The whole config of an SFT step."""

    sft: SftTrainConfig = SftTrainConfig()
    policy: PolicyConfig = PolicyConfig()
    from_scratch: FromScratchConfig | None = None
    data: SftDataConfig = SftDataConfig()
    cluster: Annotated[ClusterConfig, OPERATIONAL] = ClusterConfig()
    checkpointing: Annotated[CheckpointingConfig, OPERATIONAL] = CheckpointingConfig()
