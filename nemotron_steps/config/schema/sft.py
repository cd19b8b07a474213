"""Configs of supervised fine-tuning (`sft/megatron_bridge`, `reward_model/genrm`), and of `data_prep/sft_packing`."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from nemotron_steps.config.schema.base import OPERATIONAL, OnlyIf, Rule, Section
from nemotron_steps.config.schema.data_prep import SplitRows
from nemotron_steps.config.schema.policy import PackingAlgorithm, PolicyConfig
from nemotron_steps.config.schema.rl import CheckpointingConfig, ClusterConfig, DataFileConfig

_NOT_OF_HYBRIDS = OnlyIf("architecture", "llama", "qwen2", "qwen3")
"""Of keys that hybrids have in their pattern, or not at all: their attention knows no positions."""


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
    num_hidden_layers: Annotated[PositiveInt, _NOT_OF_HYBRIDS] = 4
    num_attention_heads: PositiveInt = 4
    num_key_value_heads: PositiveInt = 2
    head_dim: PositiveInt = 32
    max_position_embeddings: PositiveInt = 512
    rope_theta: Annotated[float, _NOT_OF_HYBRIDS] = Field(10_000.0, gt=0)
    tie_word_embeddings: Annotated[bool, _NOT_OF_HYBRIDS] = True
    initializer_range: float = Field(0.02, gt=0)
    hybrid: Annotated[HybridLayersConfig | None, OnlyIf("architecture", "nemotron_h")] = None

    def _broken_rules(self) -> Iterator[Rule]:
        hybrid, heads = self.hybrid, self.num_attention_heads
        if self.architecture == "nemotron_h" and hybrid is None:
            what = "from_scratch.architecture=nemotron_h needs from_scratch.hybrid, which says what its layers are"
            yield Rule("hybrid", what, "hybrid.pattern=ME*-")
        if heads % self.num_key_value_heads:
            fix = f"num_key_value_heads={math.gcd(heads, self.num_key_value_heads)}"
            yield Rule("num_key_value_heads", "from_scratch.num_key_value_heads must divide num_attention_heads", fix)
        if hybrid is not None and hybrid.mamba_num_heads % hybrid.n_groups:
            what = "from_scratch.hybrid.n_groups must divide mamba_num_heads"
            yield Rule("hybrid.n_groups", what, "hybrid.n_groups=1")
        if hybrid is not None and hybrid.num_experts_per_tok > hybrid.n_routed_experts:
            what = "from_scratch.hybrid.num_experts_per_tok is more than there are experts"
            yield Rule("hybrid.num_experts_per_tok", what, "hybrid.num_experts_per_tok=1")


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


class AgreementConfig(Section):
    """`agreement.*`: how often the judge prefers the answer that the held-out label prefers."""

    max_pairs: PositiveInt = 200
    temperature: float = Field(0.0, ge=0)
    minimum: float = Field(0.0, ge=0, le=1)
    """Below this the step fails: a judge that cannot judge must not train anything."""


class GenRmDataConfig(SftDataConfig):
    """`data.*`: as for SFT, and comparisons that nothing is trained on or chosen by."""

    heldout: DataFileConfig = DataFileConfig()
    """Comparisons with known labels; the agreement is measured on them."""


class GenRmConfig(SftConfig):
    """The whole config of `reward_model/genrm`: a judge is trained on comparisons, and its agreement measured."""

    data: GenRmDataConfig = GenRmDataConfig()

    agreement: AgreementConfig = AgreementConfig()


class PackingConfig(Section):
    """`packing.*`"""

    pack_size: PositiveInt = 4096
    """Tokens of a row at most; longer chats are left out, and counted."""
    algorithm: PackingAlgorithm = "modified_first_fit_decreasing"
    """As policy.sequence_packing.algorithm."""
    tokenizer: str | None = None
    """A folder with the tokenizer and chat template of the model that is to be trained, or its checkpoint. None:
    data.tokenizer, which the chats bring where one was trained on them."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """As policy.tokenizer.chat_template_kwargs, which has no part in training on packed rows."""


class SftPackingConfig(Section):
    """The whole config of `data_prep/sft_packing`: chats to rows of tokens of one length."""

    data: SftDataConfig = SftDataConfig()
    packing: PackingConfig = PackingConfig()
    sample: PositiveInt | None = None
    """Chats read of each split at most."""
    max_refused_share: float = Field(0.0, ge=0, le=1)
    """Share of unusable chats that is left out, each one named and counted; above it the step fails."""
    num_workers: Annotated[PositiveInt | None, OPERATIONAL] = None
    """Processes that tokenise. None: one for each processor."""

    @property
    def rows(self) -> SplitRows:
        """See Preparation: the splits are what they are."""
        return SplitRows(validation=0)
