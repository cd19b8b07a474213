"""reward_model/genrm: train a generative judge on comparison chats and measure it on pairs it never saw."""

from __future__ import annotations

import gc
import json
from pathlib import Path

from nemotron_steps.artifacts.prompt_data import first_row
from nemotron_steps.config.layout.memory.generation import rows_that_fit
from nemotron_steps.config.layout.memory.shape import ModelShape
from nemotron_steps.config.schema.policy import GenerationConfig
from nemotron_steps.config.schema.sft import GenRmConfig
from nemotron_steps.engine.backends.generator import build_generator
from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.rollouts.agreement import measure_agreement
from nemotron_steps.engine.rollouts.data import read_rows
from nemotron_steps.engine.rollouts.judges import GeneratorJudge
from nemotron_steps.environments.judged.genrm_messages import layout_of
from nemotron_steps.errors import StepFailedError
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.sft.training import trained_on_chats


def run(context: StepContext[GenRmConfig]) -> None:
    """Train and write the `reward_model` output (Hugging Face folder)."""
    config = context.config
    folder = context.outputs["reward_model"].path
    with trained_on_chats(context, config) as trained:  # a placed policy leaves its devices to the judge
        trained.policy.save_hf(folder)
    chat, summary = trained.chat, dict(trained.summary)
    del trained  # and with it, in one process, the policy
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
        summary.update(
            {
                "heldout_agreement": agreement.rate,
                "heldout_pairs": agreement.pairs,
                "heldout_unparsed": agreement.unparsed,
            }
        )
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
