"""What a GRPO step refuses before it loads a model: a placement that cannot be, prompts that cannot be graded.

`check` is the steps' preflight: the same before any step of a run starts, for the prompts that are there already.
Nothing here may import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.config.layout.processes import raise_if_rl_needs_ray
from nemotron_steps.config.schema.opd import OpdConfig
from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.engine.build.rows import (
    asks_for_validation,
    check_run_rows,
    prompt_stream,
    read_data,
    teacher_choice,
)
from nemotron_steps.environments.own.reward_function import load
from nemotron_steps.errors import ConfigError
from nemotron_steps.steps.hub_folder import check_judges
from nemotron_steps.steps.placement import refuse_violations


def check(config: RlConfig, inputs: Mapping[str, Artifact | None]) -> Iterable[str]:
    """Refuse what the step would refuse when it starts, as far as its prompts exist. See StepTable.preflight.

    Returns:
        What the rows need of the machine.
    """
    raise_if_rl_needs_ray(config)
    refuse_violations(config, inputs)
    check_judges(config, inputs)
    load_reward_functions(config)
    refuse_idle_validation(config, inputs)
    if isinstance(config, OpdConfig):
        config = _with_teachers(config, inputs)
        teacher_choice(config)
    if any(inputs.get(port, ...) is None for port in ("prompts", "validation")):
        return ()  # whatever the config names gives way to what an earlier step will make
    if "policy" in inputs and inputs["policy"] is None:
        config = config.model_copy(update={"policy": config.policy.model_copy(update={"checkpoint": None})})
    rows = read_data(config)
    needs = check_run_rows(config, rows)
    prompt_stream(config, rows.train)
    return needs.programs


def _with_teachers(config: OpdConfig, inputs: Mapping[str, Artifact | None]) -> OpdConfig:
    """With the teachers that earlier steps will make, which so far have a name only."""
    distillation = config.on_policy_distillation
    named = {port.removeprefix("teachers."): "" for port in inputs if port.startswith("teachers.")}
    update = {"teachers": {**named, **distillation.teachers}}
    return config.model_copy(update={"on_policy_distillation": distillation.model_copy(update=update)})


def load_reward_functions(config: RlConfig) -> None:
    """Refuse functions of the user's own that cannot be loaded: what they need may not be installed here."""
    settings = config.env.nemo_gym.environments.get("reward_function")
    for each in settings.get("functions", ()) if isinstance(settings, Mapping) else ():
        if isinstance(each, Mapping) and isinstance(each.get("function"), str):
            load(each["function"])


def refuse_idle_validation(config: RlConfig, inputs: Mapping[str, Artifact | None]) -> None:
    """Refuse prompts that were given to validate on where nothing asks for a validation."""
    if "validation" in inputs and not asks_for_validation(config):
        raise ConfigError(
            "there are prompts to validate on, and nothing asks for a validation",
            where="input validation",
            expected="grpo.val_period, grpo.val_at_start or grpo.val_at_end",
            hints=("grpo.val_period=10", "grpo.val_at_start=true grpo.val_at_end=true"),
        )
