"""rl/nemo_rl/dpo: direct preference optimisation of a policy on pairs of answers."""

from __future__ import annotations

from pathlib import Path

from nemotron_steps.engine.checkpoints.checkpoint import CheckpointManager
from nemotron_steps.engine.losses.dpo import DpoLoss

from nemotron_steps.config.schema.dpo import DpoConfig
from nemotron_steps.engine.placement.standalone import open_policy
from nemotron_steps.engine.supervised.dpo import PreferencePair, optimize_preferences, read_pairs
from nemotron_steps.engine.supervised.loop import total_steps
from nemotron_steps.errors import ConfigError
from nemotron_steps.models.architecture import hf_folder
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps import placement
from nemotron_steps.steps.trained_model import save_trained


def run(context: StepContext[DpoConfig]) -> None:
    """Train and write the `model` output (checkpoint_megatron, or adapter)."""
    config = context.config
    placement.check(config, {})
    if config.policy.checkpoint is None or config.data.train.data_path is None:
        missing = "policy" if config.policy.checkpoint is None else "preferences"
        raise ConfigError(f"the {missing} input is missing", where=missing, hints=[f"--input {missing}=PATH"])
    chat = ChatFormat.from_folder(hf_folder(config.policy.checkpoint), config.policy.tokenizer.chat_template_kwargs)
    limit = config.policy.max_total_sequence_length
    pairs, too_long = read_pairs(config.data.train.data_path, chat, limit)
    if too_long:
        context.tracker.event("pairs_left_out", longer_than=limit, count=too_long)
    validation: list[PreferencePair] = []
    if config.data.validation.data_path is not None:
        validation, _ = read_pairs(config.data.validation.data_path, chat, limit)
    opened = open_policy(
        config.cluster,
        config.policy,
        Path(config.policy.checkpoint),
        DpoLoss(config.dpo),
        reference=True,
        total_steps=total_steps(config.dpo, config.policy.train_global_batch_size, len(pairs)),
    )
    with opened as (policy, where):
        context.tracker.event("placement", **where)
        manager = CheckpointManager(context.work / "checkpoints", config.checkpointing, started=context.started)
        with manager as checkpoints:
            summary = optimize_preferences(policy, pairs, validation, config, checkpoints, context.tracker)
        save_trained(policy, context, config.policy.checkpoint, port="policy")
    context.tracker.summary(summary)
