"""The prompts of a run: read, checked against their environments, put in order. Nothing here may import torch.

The steps' preflight checks them too, before any step of a run starts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from nemotron_steps.config.layout.model_limits import template_file
from nemotron_steps.config.schema.opd import OpdConfig
from nemotron_steps.config.schema.rl import JUDGE_ROLES, EnvConfig, RlConfig
from nemotron_steps.engine.rollouts.data import PromptRow, PromptStream, read_rows
from nemotron_steps.engine.rollouts.teacher_choice import TeacherChoice
from nemotron_steps.engine.setup.prompt_lengths import JudgeToBe, short_enough
from nemotron_steps.environments.base import Environment, Row
from nemotron_steps.environments.environment_set import POLICY_NAME, EnvironmentSet
from nemotron_steps.environments.registry import refuse_unread_settings
from nemotron_steps.errors import ArtifactError, ConfigError, show_line
from nemotron_steps.models.architecture import hf_folder
from nemotron_steps.models.chat import ChatFormat
from nemotron_steps.rows.layouts import read_request


@dataclass(frozen=True)
class RunRows:
    """What a GRPO run trains on, is validated on, and is graded on before and after."""

    train: Sequence[PromptRow]
    validation: Sequence[PromptRow] = ()
    heldout: Sequence[PromptRow] = ()


@dataclass(frozen=True)
class Needs:
    """What checked rows need."""

    environments: tuple[str, ...]
    """Names of agents or environments, in the order in which rows first ask for them."""
    judges: frozenset[str]
    """Roles that these environments ask."""
    trained_on: frozenset[str]
    """Names of the environments that grade training and validation."""
    programs: frozenset[str] = frozenset()
    """What grading needs of the machine, see Environment.needs."""


def read_data(config: RlConfig, left_out: Callable[[int], None] = lambda _: None) -> RunRows:
    """The rows, those that are too long left out or refused (prompt_lengths.py)."""
    data = config.data
    if data.train.data_path is None:
        raise ConfigError(
            "no training prompts",
            where="data.train.data_path",
            hints=["--input prompts=PATH", "data.train.data_path=PATH/train-split.jsonl"],
        )
    asked = validation_keys(config)
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
    return RunRows(*(short_enough(config, read_rows(path), left_out) if path is not None else () for path in paths))


def validation_keys(config: RlConfig) -> list[str]:
    """The keys that ask for validation."""
    grpo = config.grpo
    asked = {"val_period": grpo.val_period > 0, "val_at_start": grpo.val_at_start, "val_at_end": grpo.val_at_end}
    return [f"grpo.{key}" for key, on in asked.items() if on]


def prompt_stream(config: RlConfig, rows: Sequence[PromptRow]) -> PromptStream:
    """Training prompts in their order. DataError if there are fewer than a step takes."""
    return PromptStream(
        rows,
        batch_size=config.grpo.prompts_per_generation_batch,
        max_epochs=config.grpo.max_num_epochs,
        seed=config.grpo.seed,
        shuffle=config.data.shuffle,
    )


def check_run_rows(config: RlConfig, rows: RunRows) -> Needs:
    """check_rows of a GRPO run; where there are teachers, every row that is trained on has one."""
    choice = teacher_choice(config)
    if choice is not None:
        for row in rows.train:
            choice.of(row.row, row.where)
    return check_rows(
        config.env,
        chain(rows.train, rows.validation),
        rows.heldout,
        only=config.env.only_environment,
        heldout_environment=config.heldout.environment,
        policy_served=config.policy.generation.vllm_cfg.expose_http_server,
        policy=config.policy.checkpoint,
        template_kwargs=config.policy.tokenizer.chat_template_kwargs,
    )


def teacher_choice(config: RlConfig) -> TeacherChoice | None:
    """Which row has which teacher; None without distillation. ConfigError: see TeacherChoice."""
    if not isinstance(config, OpdConfig):
        return None
    return TeacherChoice(config.on_policy_distillation, only=config.env.only_environment)


def check_rows(
    config: EnvConfig,
    rows: Iterable[PromptRow],
    heldout: Iterable[PromptRow] = (),
    *,
    only: str | None,
    heldout_environment: str | None = None,
    policy_served: bool,
    policy: str | Path | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Needs:
    """Refuse a row that its environment could not score, that leaves its judge no room for an answer, or that offers
    tools which the policy's chat template does not write, and an environment whose judge is not configured."""
    gym = config.nemo_gym
    refuse_unread_settings(gym.environments)
    chosen = {role: gym.judge(role) for role in JUDGE_ROLES}
    configured = {role: JudgeToBe(role, judge) for role, judge in chosen.items() if judge is not None}
    environments = EnvironmentSet(gym.environments, configured, only=only)
    if policy_served:
        environments.offer_policy("http://127.0.0.1/v1", POLICY_NAME)
    trained_on = environments.check_rows((row.row, row.where) for row in rows)
    environments.check_rows(((row.row, row.where) for row in heldout), environment=heldout_environment)
    if policy is not None and environments.first_offer is not None:
        _refuse_unwritten_tools(*environments.first_offer, hf_folder(policy), template_kwargs)
    return Needs(environments.names, environments.needed_judges(), frozenset(trained_on), frozenset(environments.needs))


def _refuse_unwritten_tools(
    row: Row, where: str, environment: Environment, folder: Path, template_kwargs: Mapping[str, Any] | None
) -> None:
    """DataError where the chat template passes over the tools of a row: they would reach nobody."""
    request = read_request(row, where)
    own = {**environment.config.chat_template_kwargs, **request.template_kwargs}
    tools = environment.tools_of(row)
    try:
        chat = ChatFormat.from_folder(folder, template_kwargs).with_template_kwargs(own, where)
        text = chat.render_text(request.messages, tools)
    except (ArtifactError, TemplateError, TypeError):  # no template, or it refuses them: reported elsewhere
        return
    hint = f"cp TEMPLATE.jinja {template_file(str(folder))}   # one that writes tools"
    chat.require_shown(text, request.messages, tools, where=where, hints=(hint, *show_line(where)))
