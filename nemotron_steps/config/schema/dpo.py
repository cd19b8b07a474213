"""Config of direct preference optimisation (`rl/nemo_rl/dpo`)."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from nemotron_steps.config.schema.base import OPERATIONAL, Rule, Section
from nemotron_steps.config.schema.policy import PolicyConfig
from nemotron_steps.config.schema.rl import CheckpointingConfig, ClusterConfig, DataFileConfig


class DpoTrainConfig(Section):
    """`dpo.*`: the loss, how long, and what is measured."""

    reference_policy_kl_penalty: PositiveFloat = 0.05
    """beta: how closely the policy stays with the one it starts from."""
    preference_loss_weight: float = Field(default=1.0, ge=0)
    sft_loss_weight: float = Field(default=0.0, ge=0)
    """Weight of the negative log likelihood of chosen answers, which keeps their probability from falling."""
    preference_average_log_probs: bool = False
    """Mean instead of sum over an answer's tokens in the preference loss."""
    sft_average_log_probs: bool = False
    """Mean instead of sum over an answer's tokens in the SFT loss."""
    max_num_steps: PositiveInt = 1000
    max_num_epochs: PositiveInt = 1
    val_period: int = -1
    """Validate every so many steps; -1 only before and after."""
    val_batches: PositiveInt = 8
    seed: int = 42

    def _broken_rules(self) -> Iterator[Rule]:
        if self.preference_loss_weight == 0 and self.sft_loss_weight == 0:
            what = "dpo.preference_loss_weight and dpo.sft_loss_weight are both 0: there is no loss"
            yield Rule("preference_loss_weight", what, "preference_loss_weight=1")


class DpoDataConfig(Section):
    """`data.*`: preference pairs as JSON Lines with `prompt`, `chosen` and `rejected`."""

    train: DataFileConfig = DataFileConfig()
    validation: DataFileConfig = DataFileConfig()


class DpoConfig(Section):
    """The whole config of a DPO step. `policy.train_global_batch_size` counts pairs, and so do
    `policy.train_micro_batch_size` and `policy.logprob_batch_size`."""

    dpo: DpoTrainConfig = DpoTrainConfig()
    policy: PolicyConfig = PolicyConfig()
    data: DpoDataConfig = DpoDataConfig()
    cluster: Annotated[ClusterConfig, OPERATIONAL] = ClusterConfig()
    checkpointing: Annotated[CheckpointingConfig, OPERATIONAL] = CheckpointingConfig()
