"""The steps that train without generating: SFT (sft/automodel, sft/megatron_bridge), DPO (rl/nemo_rl/dpo), and the
generative judge (reward_model/genrm), which is SFT on comparison chats, measured on pairs it never saw.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.artifacts.prompt_data import first_row
from nemotron_steps.config.layout.memory.generation import rows_that_fit
from nemotron_steps.config.layout.memory.shape import ModelShape
from nemotron_steps.config.schema.dpo import DpoConfig
from nemotron_steps.config.schema.policy import GenerationConfig
from nemotron_steps.config.schema.sft import GenRmConfig, SftConfig
from nemotron_steps.engine.checkpoints import CheckpointManager
from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.losses.supervised import DpoLoss, NegativeLogLikelihood
from nemotron_steps.engine.placement.run import open_policy
from nemotron_steps.engine.rollouts.data import read_rows
from nemotron_steps.engine.rollouts.evaluation import measure_agreement
from nemotron_steps.engine.setup.backends import GeneratorJudge, build_generator
from nemotron_steps.engine.supervised.chat_tokens import SftExample, read_packed
from nemotron_steps.engine.supervised.training import (
    PreferencePair,
    finetune,
    optimize_preferences,
    read_chats,
    read_pairs,
    total_steps,
)
from nemotron_steps.environments.judged.genrm_messages import layout_of
from nemotron_steps.errors import ConfigError, StepFailedError
from nemotron_steps.models.architecture import hf_folder
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.models.initialize import initialize_checkpoint
from nemotron_steps.rows import lines
from nemotron_steps.rows.layouts import sniff_row
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.preflight import check_placement, nothing_to_train
from nemotron_steps.steps.trained_model import save_trained

if TYPE_CHECKING:
    from nemotron_steps.engine.types import Policy


@contextmanager
def trained_on_chats(
    context: StepContext[Any], config: SftConfig
) -> Iterator[tuple[Policy, ChatFormat, dict[str, Any]]]:
    """A model trained on data.train: (policy, which lives until the block ends; its chat format; summary)."""
    check_placement(config, {})
    if config.policy.checkpoint is None and config.from_scratch is None:
        raise nothing_to_train()
    if config.data.train.data_path is None:
        raise ConfigError(
            "no training chats", where="data.train.data_path", hints=["--input chats=PATH", "data.train.data_path=PATH"]
        )
    start = Path(config.policy.checkpoint or context.work / "initial")
    if config.policy.checkpoint is None and config.from_scratch is not None:
        if config.data.tokenizer is None:
            what, hint = "training from scratch needs a tokenizer", "data.tokenizer=PATH"
            raise ConfigError(what, where="data.tokenizer", hints=[hint])
        if not (start / "config.json").is_file():
            initialize_checkpoint(config.from_scratch, Path(config.data.tokenizer), start, config.sft.seed)
    chat = ChatFormat.from_folder(hf_folder(start), config.policy.tokenizer.chat_template_kwargs)
    limit = config.policy.max_total_sequence_length
    train, chats, too_long = _read_examples(config.data.train.data_path, chat, limit)
    validation: Sequence[SftExample] = []
    if config.data.validation.data_path is not None:
        validation, *_ = _read_examples(config.data.validation.data_path, chat, limit)
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
        yield policy, chat, summary


def _read_examples(path: str, chat: ChatFormat, max_length: int) -> tuple[Sequence[SftExample], int, int]:
    """Packed rows or sequences of chats, how many rows or chats these are, and how many were too long."""
    file = Path(path)
    first = next((row for _, row in lines.read_rows(file)), {}) if file.is_file() else {}
    if sniff_row(first) != "packed_chats":
        return read_chats(file, chat, max_length)
    packed = read_packed(file, max_length=max_length, vocabulary=len(chat.tokenizer))
    return packed, len(packed), 0


def sft_automodel(context: StepContext[SftConfig]) -> None:
    """Train and write the `model` output (Hugging Face folder, or adapter)."""
    if not context.config.policy.dtensor_cfg.enabled:
        raise ConfigError(
            "this step trains with FSDP2",
            where="policy.dtensor_cfg.enabled",
            hints=["policy.dtensor_cfg.enabled=true", "steps sft_automodel sft/megatron_bridge"],
        )
    with trained_on_chats(context, context.config) as (policy, _, summary):
        save_trained(policy, context, context.config.policy.checkpoint, port="model", hf=True)
    context.tracker.summary(summary)


def sft_megatron_bridge(context: StepContext[SftConfig]) -> None:
    """Train and write the `model` output (checkpoint_megatron, or adapter)."""
    with trained_on_chats(context, context.config) as (policy, _, summary):
        save_trained(policy, context, context.config.policy.checkpoint, port="model")
    context.tracker.summary(summary)


def dpo(context: StepContext[DpoConfig]) -> None:
    """Train and write the `model` output (checkpoint_megatron, or adapter)."""
    config = context.config
    check_placement(config, {})
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


def genrm(context: StepContext[GenRmConfig]) -> None:
    """Train and write the `reward_model` output (Hugging Face folder)."""
    config = context.config
    folder = context.outputs["reward_model"].path
    with trained_on_chats(context, config) as (
        policy,
        chat,
        summary,
    ):  # a placed policy leaves its devices to the judge
        policy.save_hf(folder)
    del policy
    first = first_row(Path(config.data.train.data_path)) if config.data.train.data_path is not None else None
    if first is not None and "messages" in first:  # packed rows are tokens
        context.outputs["reward_model"].attributes["comparison_layout"] = layout_of(first["messages"])
    if config.data.heldout.data_path is not None:
        rows = read_rows(config.data.heldout.data_path)[: config.agreement.max_pairs]
        limit = config.policy.max_total_sequence_length
        at_once = GenerationConfig(max_sequences=judged_at_once(folder, len(rows), limit, config.policy.precision))
        generator = build_generator(folder, at_once, chat, max_total_length=limit, precision=config.policy.precision)
        judge = GeneratorJudge(
            AsyncSampler(generator),
            chat,
            max_total_length=limit,
            length_key="policy.max_total_sequence_length",
            seed=config.sft.seed,
        )
        context.tracker.progress("agreement on held-out pairs", 0, None)
        agreement, records = measure_agreement(judge, rows, temperature=config.agreement.temperature, max_tokens=limit)
        for record in records[:8]:
            context.tracker.sample(record)
        summary["heldout_agreement"] = agreement.rate
        summary["heldout_pairs"] = agreement.pairs
        summary["heldout_unparsed"] = agreement.unparsed
        context.outputs["reward_model"].attributes["heldout_agreement"] = agreement.rate
        if agreement.rate < config.agreement.minimum:
            raise StepFailedError(
                "the judge does not agree with held-out labels often enough to be used",
                where="agreement.minimum",
                expected=f"at least {config.agreement.minimum:.2f}",
                found=f"{agreement.rate:.3f} of {agreement.pairs} pairs ({agreement.unparsed} replies unreadable)",
                hints=[
                    f"sft.max_num_steps={2 * config.sft.max_num_steps}",
                    f"agreement.minimum={agreement.rate:.2f}",
                ],
            )
    context.tracker.summary(summary)


def judged_at_once(folder: Path, pairs: int, length: int, precision: str) -> int:
    """Of `pairs`, as many as one GPU's free memory decodes to `length` tokens; at most 256, as on CPU."""
    import torch

    most = max(1, min(pairs, GenerationConfig().max_sequences))
    if not torch.cuda.is_available():
        return most
    shape = ModelShape.read(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    if shape is None:
        return most
    gc.collect()  # what trained the judge, and has cycles
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return rows_that_fit(shape, free, most=most, length=length, element=getattr(torch, precision).itemsize)
