"""rl/nemo_rl/opd: on-policy distillation: a policy learns from teachers what they would say in its place."""

from __future__ import annotations

from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.rl.training import run_grpo


def run(context: StepContext[RlConfig]) -> None:
    """The GRPO loop with another loss: each row's teacher scores what the policy samples; rewards are only logged."""
    run_grpo(context)
