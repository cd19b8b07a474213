"""Config of supervised fine-tuning (`sft/megatron_bridge`, `reward_model/genrm`)."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from nemotron_steps.config.schema.base import OPERATIONAL, Rule, Section, refuse
from nemotron_steps.config.schema.policy import PolicyConfig
from nemotron_steps.config.schema.rl import CheckpointingConfig, ClusterConfig, DataFileConfig

_NOT_OF_HYBRIDS = {
    "num_hidden_layers": "hybrid.pattern has a letter for each",
    "rope_theta": "its attention knows no positions",
    "tie_word_embeddings": "its output layer is its own",
}
"""Keys of `from_scratch` that only the other families have, and why."""


class HybridLayersConfig(Section):
    """`from_scratch.hybrid.*`: what a Nemotron-H model has beside attention and MLPs, under config.json's names."""

    pattern: str = Field(min_length=1, pattern=r"^[ME*-]+$")
    """One letter a layer: M Mamba-2, E experts, * attention, - MLP."""
    mamba_num_heads: PositiveInt = 8
    mamba_head_dim: PositiveInt = 16
    ssm_state_size: PositiveInt = 16
    n_groups: PositiveInt = 2
    conv_kernel: PositiveInt = 4
    chunk_size: PositiveInt = 64
    n_routed_experts: PositiveInt = 8
    num_experts_per_tok: PositiveInt = 2
    moe_intermediate_size: PositiveInt = 64
    moe_shared_expert_intermediate_size: PositiveInt = 64
    moe_latent_size: PositiveInt | None = None
    routed_scaling_factor: float = Field(1.0, gt=0)
    num_nextn_predict_layers: Literal[0, 1] = 0
    """1: with a block for multi-token prediction, attention and experts; mtp_num_layers of the policy trains it."""


class FromScratchConfig(Section):
    """A new randomly initialised model, when no checkpoint is given."""

    architecture: Literal["llama", "qwen2", "qwen3", "nemotron_h"] = "qwen3"
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
    hybrid: HybridLayersConfig | None = None

    @model_validator(mode="after")
    def _has_a_meaning(self) -> FromScratchConfig:
        hybrid, is_hybrid = self.hybrid, self.architecture == "nemotron_h"
        refuse(
            [
                Rule(
                    is_hybrid and hybrid is None,
                    "hybrid",
                    "from_scratch.architecture=nemotron_h needs from_scratch.hybrid, which says what its layers are",
                    ("hybrid.pattern=ME*-",),
                ),
                Rule(
                    hybrid is not None and not is_hybrid,
                    "architecture",
                    f"from_scratch.hybrid is for nemotron_h, and architecture={self.architecture} would ignore it",
                    ("architecture=nemotron_h",),
                ),
                *(
                    Rule(
                        is_hybrid and getattr(self, name) != FromScratchConfig.model_fields[name].default,
                        name,
                        f"from_scratch.{name} means nothing to nemotron_h: {why}",
                        (f"{name}={str(FromScratchConfig.model_fields[name].default).lower()}",),
                    )
                    for name, why in _NOT_OF_HYBRIDS.items()
                ),
                Rule(
                    self.num_attention_heads % self.num_key_value_heads != 0,
                    "num_key_value_heads",
                    "from_scratch.num_key_value_heads does not divide num_attention_heads",
                    (f"num_key_value_heads={math.gcd(self.num_attention_heads, self.num_key_value_heads)}",),
                ),
                Rule(
                    hybrid is not None and hybrid.mamba_num_heads % hybrid.n_groups != 0,
                    "hybrid.n_groups",
                    "from_scratch.hybrid.n_groups does not divide mamba_num_heads",
                    ("hybrid.n_groups=1",),
                ),
                Rule(
                    hybrid is not None and hybrid.num_experts_per_tok > hybrid.n_routed_experts,
                    "hybrid.num_experts_per_tok",
                    "from_scratch.hybrid.num_experts_per_tok is more than there are experts",
                    ("hybrid.num_experts_per_tok=1",),
                ),
            ]
        )
        return self


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
