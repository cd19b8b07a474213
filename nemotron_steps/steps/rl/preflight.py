"""What a GRPO step refuses before it loads a model: a placement that cannot be, prompts that cannot be graded.

`check` is the steps' preflight: the same before any step of a run starts, for the prompts that are there already.
Nothing here may import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.config.names import nearest
from nemotron_steps.config.schema.rl import JUDGE_ROLES, RlConfig
from nemotron_steps.engine.rollouts.data import JoinedRows, PromptRow, PromptStream, read_rows
from nemotron_steps.environments.agents import agent_of, route
from nemotron_steps.environments.environment_set import POLICY_NAME, EnvironmentSet, judge_roles
from nemotron_steps.environments.judged.judges import Messages
from nemotron_steps.environments.registry import names
from nemotron_steps.errors import ConfigError
from nemotron_steps.steps.placement import refuse_misfits, refuse_without_gpus, refuse_without_ray
from nemotron_steps.steps.rl.prompt_lengths import short_enough


def check(config: RlConfig, inputs: Mapping[str, Artifact | None]) -> None:
    """Refuse what the step would refuse when it starts, as far as its prompts exist. See StepTable.preflight."""
    check_placement(config)
    refuse_misfits(config, inputs)
    check_low_effort(config)
    refuse_without_gpus(config.cluster)
    if "prompts" in inputs and inputs["prompts"] is None:
        return  # whatever the config names gives way to what an earlier step will make
    if "policy" in inputs and inputs["policy"] is None:
        config = config.model_copy(update={"policy": config.policy.model_copy(update={"checkpoint": None})})
    rows, validation, heldout = read_data(config)
    check_rows(config, JoinedRows(rows, validation), heldout)
    prompt_stream(config, rows)


def prompt_stream(config: RlConfig, rows: Sequence[PromptRow]) -> PromptStream:
    """Training prompts in their order. DataError if there are fewer than a step takes."""
    return PromptStream(
        rows,
        batch_size=config.grpo.prompts_per_generation_batch,
        max_epochs=config.grpo.max_num_epochs,
        seed=config.grpo.seed,
        shuffle=config.data.shuffle,
    )


def check_placement(config: RlConfig) -> None:
    """Settings that need more than one process: refused where there is one, never ignored."""
    separate = not config.policy.generation.colocated.enabled
    further = ["policy.generation.colocated.enabled=true"] if separate else []
    gym = config.env.nemo_gym
    for role in JUDGE_ROLES:
        judge = gym.judge(role)
        if judge is not None and (judge.replicas or 1) > 1:
            further.append(f"env.nemo_gym.{role}.responses_api_models.vllm_model.replicas=1")
    refuse_without_ray(config.cluster, config.policy, *further)


def check_low_effort(config: RlConfig) -> None:
    """Refuse a name in `grpo.low_effort.environments` that no environment has: its prompts would never be asked."""
    named, known = config.grpo.low_effort.environments, names()
    for name in named:
        if name not in known:
            rest = [other for other in named if other != name]
            close = nearest(name, known)
            raise ConfigError(
                f"grpo.low_effort asks the prompts of '{name}', and there is no environment of that name",
                where="grpo.low_effort.environments",
                expected=" or ".join(close) or f"one of {', '.join(known)}",
                found=name,
                hints=[f"grpo.low_effort.environments=[{','.join([*rest, *kept])}]" for kept in (close[:1], ())],
            )


def read_data(
    config: RlConfig, left_out: Callable[[int], None] = lambda _: None
) -> tuple[Sequence[PromptRow], Sequence[PromptRow], Sequence[PromptRow]]:
    """Training, validation and held-out rows, those that are too long left out or refused (prompt_lengths.py).

    Args:
        left_out: told how many rows of a file are left out.

    Raises:
        ConfigError, DataError: for what is missing, malformed or too long.
    """
    data = config.data
    if data.train.data_path is None:
        raise ConfigError(
            "no training prompts",
            where="data.train.data_path",
            hints=["--input prompts=PATH", "data.train.data_path=PATH/train-split.jsonl"],
        )
    asked = [key for key, on in _validation_keys(config).items() if on]
    if asked and data.validation.data_path is None:
        off = {"grpo.val_period": "grpo.val_period=-1"}
        raise ConfigError(
            f"{', '.join(asked)} asks for validation, and there are no validation prompts",
            where="data.validation.data_path",
            expected="JSON Lines of prompts (the prompts input brings them as validation.jsonl)",
            found="null",
            hints=["data.validation.data_path=PATH/val-split.jsonl", " ".join(off.get(k, f"{k}=false") for k in asked)],
        )
    paths = (data.train.data_path, data.validation.data_path, data.heldout.data_path)
    read = [short_enough(config, read_rows(path), left_out) if path is not None else () for path in paths]
    return read[0], read[1], read[2]


def _validation_keys(config: RlConfig) -> dict[str, bool]:
    """Whether each key that asks for validation does."""
    grpo = config.grpo
    return {
        "grpo.val_period": grpo.val_period > 0,
        "grpo.val_at_start": grpo.val_at_start,
        "grpo.val_at_end": grpo.val_at_end,
    }


def check_rows(config: RlConfig, rows: Sequence[PromptRow], heldout: Sequence[PromptRow]) -> set[str]:
    """Refuse a row that its environment could not score, and an environment whose judge is not configured.

    Args:
        rows: for training and validation.

    Returns:
        Judge roles that the environments of all rows need.
    """
    gym = config.env.nemo_gym
    only = None if config.env.should_use_nemo_gym else config.env.environment
    needed = _needed_judges(config, rows if config.heldout.environment is not None else JoinedRows(rows, heldout), only)
    judges = {role: _UnaskedJudge() for role in needed if gym.judge(role) is not None}
    environments = EnvironmentSet(gym.environments, judges, only=only)
    if config.policy.generation.vllm_cfg.expose_http_server:
        environments.offer_policy("http://127.0.0.1/v1", POLICY_NAME)
    environments.check_rows((row.row, row.where) for row in rows)
    check_heldout(config, environments, heldout)
    return needed


def check_heldout(config: RlConfig, environments: EnvironmentSet, heldout: Sequence[PromptRow]) -> None:
    """Refuse a held-out row that the environment grading it could not score."""
    name = config.heldout.environment
    for row in heldout:
        environment = environments.get(name) if name is not None else environments.route(row.row, row.where)
        environment.check_row(row.row, row.where)


def _needed_judges(config: RlConfig, rows: Sequence[PromptRow], only: str | None) -> set[str]:
    """Judge roles of the environments that the rows and the held-out grading need."""
    names = {only} if only is not None else {agent_of(r.row, r.where) for r in rows}
    if config.heldout.environment is not None:
        names.add(config.heldout.environment)
    options = config.env.nemo_gym.environments
    if only is None:
        for row in rows:
            route(row.row, row.where, options)
    return judge_roles(names, options)


class _UnaskedJudge:
    """Stands for a judge that is not loaded yet."""

    async def complete(self, messages: Messages, *, temperature: float, top_p: float, max_tokens: int) -> str:
        """Never asked."""
        raise AssertionError("rows are checked without a judge")
