"""What the GRPO steps share: build the engine's parts from config and inputs, train, grade before and after."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.engine.build.backends import build_endpoint, sampling_params
from nemotron_steps.engine.build.parts import Parts, build_parts
from nemotron_steps.engine.checkpoints.checkpoint import CheckpointManager
from nemotron_steps.engine.event_loop import run_on
from nemotron_steps.engine.grpo.async_loop import train_async
from nemotron_steps.engine.grpo.loop import GrpoRun, evaluate_heldout, train
from nemotron_steps.engine.grpo.reward_penalties import RewardPenalties
from nemotron_steps.engine.policy.malloc_tuning import freeze_objects
from nemotron_steps.engine.rollouts.collector import RolloutCollector
from nemotron_steps.engine.rollouts.conversation import TurnFormat
from nemotron_steps.engine.rollouts.data import JoinedRows, PromptRow, PromptStream
from nemotron_steps.engine.rollouts.evaluation import EvaluationResult
from nemotron_steps.engine.signals import SignalMonitor
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.errors import ConfigError, StepsError
from nemotron_steps.models.architecture import hf_folder
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.rl.preflight import check_heldout, check_placement, check_rows, prompt_stream, read_data

_CLOSE_SECONDS = 10.0
"""For environments to close after an error: one of them may be what hangs."""


def run_grpo(context: StepContext[RlConfig]) -> None:
    """Train `policy` on `data.train` and write the `model` output (checkpoint_megatron)."""
    config = context.config
    limit = config.data.max_input_seq_length
    rows, validation, heldout = read_data(
        config, lambda count: context.tracker.event("prompts_left_out", longer_than=limit, count=count)
    )
    run, environments = build_run(context, rows, validation, heldout)
    params = sampling_params(config.policy.generation, _chat_format(config), config.grpo.seed)
    summary: dict[str, Any] = {}
    baseline_file = context.work / "heldout_before.json"
    try:
        with _started(environments) as runner:
            if heldout and not baseline_file.is_file():
                context.tracker.progress("held-out prompts, before", 0, None)
                run.generator.update_weights(run.policy.weights(), 0)
                before = run_on(runner, evaluate_heldout(run, heldout, params, "before"))
                _write_atomically(baseline_file, before)
            summary.update((train_async if config.grpo.async_grpo.enabled else train)(run, runner))
            if heldout:
                context.tracker.progress("held-out prompts, after", 0, None)
                after = run_on(runner, evaluate_heldout(run, heldout, params, "after"))
                summary.update(_improvement(json.loads(baseline_file.read_text()), after))
        run.policy.save_model(context.outputs["model"].path)
        context.tracker.summary(summary)
    finally:
        run.close()


@contextmanager
def _started(environments: EnvironmentSet) -> Iterator[asyncio.Runner]:
    """Environments from their start to their end, whatever ends the run between. Helper processes and locks of an
    environment belong to one event loop: the one that is given."""

    async def close() -> None:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await environments.close()

    with asyncio.Runner() as runner:
        try:
            runner.run(environments.start())
            yield runner
        except BaseException as error:
            try:
                runner.run(close())
            except (StepsError, TimeoutError) as another:
                error.add_note(f"besides, the environments did not close: {another!r}")  # what stopped the run is first
            raise
        runner.run(environments.close())


def build_run(
    context: StepContext[RlConfig],
    rows: Sequence[PromptRow],
    validation: Sequence[PromptRow],
    heldout: Sequence[PromptRow] = (),
) -> tuple[GrpoRun, EnvironmentSet]:
    """Every part of a training run, rows checked against their environments before anything is loaded."""
    config = context.config
    check_placement(config)
    grpo = config.grpo
    needed = check_rows(config, JoinedRows(rows, validation), heldout)
    hf_folder = _hf_folder(config)
    chat = _chat_format(config)
    penalties = _reward_penalties(config, chat)
    prompts = prompt_stream(config, rows)
    total_steps = min(grpo.max_num_steps, grpo.max_num_epochs * prompts.steps_per_epoch())
    updates = grpo.num_prompts_per_step * grpo.num_generations_per_prompt // config.policy.train_global_batch_size
    longest = max(config.policy.max_total_sequence_length, config.policy.max_total_sequence_length_end or 0)
    parts = build_parts(config, hf_folder, chat, needed, total_steps=total_steps * updates, max_total_length=longest)
    with parts.resources:
        context.tracker.event("placement", **parts.placement)
        if config.policy.generation.vllm_cfg.expose_http_server:
            endpoint = parts.resources.enter_context(
                build_endpoint(config.policy.generation, parts.sampler, chat, max_total_length=longest)
            )
            parts.environments.offer_policy(endpoint.url, endpoint.model_name)
            context.tracker.event("policy_endpoint", url=endpoint.url, model=endpoint.model_name)
        run = _assemble(context, parts, chat, prompts, rows, validation)
        run.reward_penalties = penalties
        check_heldout(config, parts.environments, heldout)  # which creates their environments: they are started too
        freeze_objects()
        parts.resources.callback(gc.unfreeze)
        run.resources = parts.resources.pop_all()
    return run, parts.environments


def _reward_penalties(config: RlConfig, chat: ChatFormat) -> RewardPenalties | None:
    if not config.reward_penalties.any_enabled:
        return None
    return RewardPenalties.of(
        config.reward_penalties,
        config.env.nemo_gym.thinking_tags,
        chat.render_text([{"role": "user", "content": "x"}]),
        lambda text: list(chat.tokenizer.encode(text, add_special_tokens=False)),
    )


def _assemble(
    context: StepContext[RlConfig],
    parts: Parts,
    chat: ChatFormat,
    prompts: PromptStream,
    rows: Sequence[PromptRow],
    validation: Sequence[PromptRow],
) -> GrpoRun:
    config, environments = context.config, parts.environments
    grpo = config.grpo
    needed_by_rows = environments.check_rows((r.row, r.where) for r in JoinedRows(rows, validation))
    collector = RolloutCollector(
        parts.sampler,
        chat,
        environments,
        sampling_params(config.policy.generation, chat, grpo.seed),
        max_total_length=config.policy.max_total_sequence_length,
        max_turns=grpo.max_rollout_turns,
        turn_format=TurnFormat.of(config.policy.generation, chat),
        reporter=context.tracker,
    )
    return GrpoRun(
        config=config,
        policy=parts.policy,
        generator=parts.generator,
        sampler=parts.sampler,
        collector=collector,
        judges=parts.judges,
        prompts=prompts,
        validation=validation,
        checkpoints=CheckpointManager(context.work / "checkpoints", config.checkpointing, started=context.started),
        reporter=context.tracker,
        signals=SignalMonitor(
            reward_range=environments.get(next(iter(needed_by_rows))).reward_range
            if len(needed_by_rows) == 1
            else None,
            max_policy_lag=grpo.async_grpo.max_trajectory_age_steps if grpo.async_grpo.enabled else None,
        ),
    )


def _chat_format(config: RlConfig) -> ChatFormat:
    return ChatFormat.from_folder(_hf_folder(config), config.policy.tokenizer.chat_template_kwargs)


def _hf_folder(config: RlConfig) -> Path:
    if config.policy.checkpoint is None:
        raise ConfigError("no policy to train", where="policy.checkpoint", hints=["--input policy=PATH"])
    return hf_folder(config.policy.checkpoint)


def _write_atomically(path: Path, result: EvaluationResult) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result.to_dict()))
    partial.rename(path)


def _improvement(before: dict[str, Any], after: EvaluationResult) -> dict[str, Any]:
    """Held-out figures before and after training, as the run's summary shows them."""
    return {
        "heldout_reward": {
            "before": before["reward"],
            "after": after.reward,
            "standard_error": after.standard_error,
            "samples": after.samples,
        },
        "heldout_answer_tokens": {"before": before["answer_tokens"], "after": after.answer_tokens},
        "heldout_truncation_rate": {"before": before["truncation_rate"], "after": after.truncation_rate},
    }
