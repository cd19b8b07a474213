"""Supervised training shared by the SFT and the judge steps: data, model, loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.engine.checkpoints.checkpoint import CheckpointManager
from nemotron_steps.engine.losses.likelihood import NegativeLogLikelihood
from nemotron_steps.engine.supervised.packed_rows import PackedRows, SftExample
from nemotron_steps.steps.sft.preflight import nothing_to_train

from nemotron_steps.config.schema.sft import SftConfig
from nemotron_steps.engine.placement.standalone import open_policy
from nemotron_steps.engine.supervised.loop import total_steps
from nemotron_steps.engine.supervised.sft import finetune, read_chats
from nemotron_steps.errors import ConfigError
from nemotron_steps.models.architecture import hf_folder
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.models.initialize import initialize_checkpoint
from nemotron_steps.rows.layouts import sniff_row
from nemotron_steps.rows.lines import read_rows
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps import placement

if TYPE_CHECKING:
    from nemotron_steps.engine.types import Policy


@dataclass
class TrainedModel:
    """What training leaves behind."""

    policy: Policy
    chat: ChatFormat
    summary: dict[str, Any]


@contextmanager
def trained_on_chats(context: StepContext[Any], config: SftConfig) -> Iterator[TrainedModel]:
    """A model trained on data.train and measured on data.validation. Its policy lives until the block ends."""
    placement.check(config, {})
    start = _starting_checkpoint(context, config)
    chat = ChatFormat.from_folder(hf_folder(start), config.policy.tokenizer.chat_template_kwargs)
    if config.data.train.data_path is None:
        raise ConfigError(
            "no training chats", where="data.train.data_path", hints=["--input chats=PATH", "data.train.data_path=PATH"]
        )
    limit = config.policy.max_total_sequence_length
    train, chats, too_long = _read(config.data.train.data_path, chat, limit)
    validation: Sequence[SftExample] = []
    if config.data.validation.data_path is not None:
        validation, *_ = _read(config.data.validation.data_path, chat, limit)
    if chats != len(train):
        context.tracker.event("a_sequence_a_turn", chats=chats, sequences=len(train))
    if too_long:
        context.tracker.event("chats_left_out", longer_than=limit, count=too_long)
    steps = total_steps(config.sft, config.policy.train_global_batch_size, len(train))
    opened = open_policy(
        config.cluster, config.policy, start, NegativeLogLikelihood(), reference=False, total_steps=steps
    )
    with opened as (policy, where):
        context.tracker.event("placement", **where)
        manager = CheckpointManager(context.work / "checkpoints", config.checkpointing, started=context.started)
        with manager as checkpoints:
            summary = finetune(policy, train, validation, config, checkpoints, context.tracker)
        yield TrainedModel(policy, chat, summary)


def _read(path: str, chat: ChatFormat, max_length: int) -> tuple[Sequence[SftExample], int, int]:
    """Packed rows or sequences of chats, whichever the file has, how many rows or chats these are, and how many chats
    were left out for being too long."""
    file = Path(path)
    first = next((row for _, row in read_rows(file)), {}) if file.is_file() else {}
    if sniff_row(first) != "packed_chats":
        return read_chats(file, chat, max_length)
    packed = PackedRows(file, max_length=max_length, vocabulary=len(chat.tokenizer))
    return packed, len(packed), 0


def _starting_checkpoint(context: StepContext[Any], config: SftConfig) -> Path:
    if config.policy.checkpoint is not None:
        return Path(config.policy.checkpoint)
    if config.from_scratch is None:
        raise nothing_to_train()
    if config.data.tokenizer is None:
        raise ConfigError(
            "training from scratch needs a tokenizer", where="data.tokenizer", hints=["data.tokenizer=PATH"]
        )
    target = context.work / "initial"
    if not (target / "config.json").is_file():
        initialize_checkpoint(config.from_scratch, Path(config.data.tokenizer), target, config.sft.seed)
    return target
