"""The GRPO steps (rlvr, rlhf, swe, opd differ in configs and environments): build the run, train, grade before and
after."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nemotron_steps.artifacts.files import write_atomic
from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.engine.grpo.async_loop import train_async
from nemotron_steps.engine.grpo.loop import evaluate_heldout, train
from nemotron_steps.engine.placement.run import build_run
from nemotron_steps.engine.rollouts.evaluation import EvaluationResult, before_and_after
from nemotron_steps.engine.setup.rows import read_data
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.errors import StepsError
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.preflight import maker_of_prompts
from nemotron_steps.steps.trained_model import save_trained

_CLOSE_SECONDS = 10.0
"""For environments to close after an error: one of them may be what hangs."""


def run_grpo(context: StepContext[RlConfig]) -> None:
    """Train `policy` on `data.train` and write the `model` output (checkpoint_megatron, or adapter)."""
    config = context.config
    limit = config.data.max_input_seq_length
    rows = read_data(
        config,
        lambda count: context.tracker.event("prompts_left_out", longer_than=limit, count=count),
        made_by=maker_of_prompts(context.inputs),
    )
    heldout = rows.heldout
    if rows.split:
        context.tracker.event("prompts_held_out", count=rows.split[0], of=rows.split[1])
    run, environments = build_run(config, rows, work=context.work, reporter=context.tracker, started=context.started)
    summary: dict[str, Any] = {"held_out_prompts": "{} of {}".format(*rows.split)} if rows.split else {}
    baseline_file = context.work / "heldout_before.json"
    try:
        with _started_environments(environments) as runner:
            if heldout and not baseline_file.is_file():
                context.tracker.progress("held-out prompts, before", 0, None)
                run.generator.update_weights(run.policy.weights(), 0)
                before = runner.run(evaluate_heldout(run, heldout, "before"))
                write_atomic(baseline_file, json.dumps(before.to_dict()).encode())
            if heldout:
                before = EvaluationResult(**json.loads(baseline_file.read_text()))
                context.tracker.metrics(0, before.metrics("heldout"))
            summary.update((train_async if config.grpo.async_grpo.enabled else train)(run, runner))
            if heldout:
                context.tracker.progress("held-out prompts, after", 0, None)
                after = runner.run(evaluate_heldout(run, heldout, "after"))
                context.tracker.metrics(summary["steps"], after.metrics("heldout"))
                summary.update(before_and_after("heldout", before, after))
        save_trained(run.policy, context, config.policy.checkpoint, port="policy")
        context.tracker.summary(summary)
    finally:
        run.close()


@contextmanager
def _started_environments(environments: EnvironmentSet) -> Iterator[asyncio.Runner]:
    """Environments from start to end, whatever ends the run between, on the one event loop that is given."""

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
