"""The prompts of a run: read, checked against their environments, teachers and lengths, put in order. Nothing here may
import torch. The steps' preflight checks them too, before any step of a run starts.

A prompt is counted by its texts alone, without what the chat template and an environment's tools add.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from nemotron_steps.config.layout.model_limits import template_file
from nemotron_steps.config.names import nearest
from nemotron_steps.config.schema.opd import OnPolicyDistillationConfig, OpdConfig
from nemotron_steps.config.schema.rl import JUDGE_ROLES, EnvConfig, RlConfig, VllmModelConfig
from nemotron_steps.engine.rollouts.data import PromptRow, PromptRows, PromptStream, Rows, read_rows
from nemotron_steps.environments.base import Environment, Row
from nemotron_steps.environments.environment_set import POLICY_NAME, EnvironmentSet
from nemotron_steps.environments.judged.judges import Messages, longer_context
from nemotron_steps.environments.registry import agent_of, refuse_unread_settings
from nemotron_steps.errors import ArtifactError, ConfigError, DataError, show_line
from nemotron_steps.models.architecture import Architecture, hf_folder
from nemotron_steps.models.chat import COMMON_ROLES, ChatFormat
from nemotron_steps.rows.layouts import read_request

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_SECTION = "on_policy_distillation"


class TeacherChoice:
    """Rows to names of teachers: by a field of the row, by its agent, or the one that has all others."""

    def __init__(self, config: OnPolicyDistillationConfig, *, only: str | None) -> None:
        self._config, self._only = config, only
        self._teachers = tuple(config.teachers)
        if not self._teachers:
            raise ConfigError(
                "on-policy distillation needs a teacher",
                where=f"{_SECTION}.teachers",
                expected="at least one",
                hints=("--input teachers.NAME=PATH",),
            )
        by_agent, overrides = config.teacher_model_by_agent_name, config.non_colocated_teachers.teacher_overrides
        named = {f"teacher_model_by_agent_name.{agent}": name for agent, name in by_agent.items()}
        named |= {f"non_colocated_teachers.teacher_overrides.{name}": name for name in overrides}
        if config.default_teacher_alias is not None:
            named["default_teacher_alias"] = config.default_teacher_alias
        for key, name in named.items():
            if name not in self._teachers:
                close = nearest(name, self._teachers) or self._teachers[:1]
                chosen = () if name in overrides else (f"{_SECTION}.{key}={close[0]}",)
                raise ConfigError(
                    f"unknown teacher '{name}'",
                    where=f"{_SECTION}.{key}",
                    expected=" or ".join(self._teachers),
                    found=name,
                    hints=(*chosen, f"--input teachers.{name}=PATH"),
                )

    def of(self, row: Mapping[str, Any], where: str) -> str:
        """The teacher of a row."""
        config = self._config
        name = None if config.teacher_field is None else row.get(config.teacher_field)
        if name is not None and name not in self._teachers:
            raise DataError(
                f"the row's teacher '{name}' is not there",
                where=f"{where} field {config.teacher_field}",
                expected=" or ".join(self._teachers),
                found=str(name),
                hints=(f"--input teachers.{name}=PATH", *show_line(where)),
            )
        if name is not None:
            return str(name)
        agent = self._only if self._only is not None else agent_of(row, where)
        only = self._teachers[0] if len(self._teachers) == 1 else None
        chosen = config.teacher_model_by_agent_name.get(agent, config.default_teacher_alias) or only
        if chosen is None:
            raise DataError(
                f"no teacher for rows of '{agent}'",
                where=where,
                expected=f"one of {', '.join(self._teachers)}",
                found=f"teachers for {', '.join(config.teacher_model_by_agent_name) or 'no agent'}",
                hints=(
                    f"+{_SECTION}.teacher_model_by_agent_name.{agent}={self._teachers[0]}",
                    f"{_SECTION}.default_teacher_alias={self._teachers[0]}",
                ),
            )
        return chosen


_AT_ONCE = 256
"""Prompts tokenized together."""


def longer_than(limit: int, rows: PromptRows, model: str | Path) -> dict[int, int]:
    """Place of each row with more tokens than `limit` → its tokens; none where the model has no tokenizer.json."""
    suspects = [place for place in rows.places_over(limit) if len(_text(rows[place]).encode()) > limit]
    tokenizer = _tokenizer(hf_folder(model)) if suspects else None
    if tokenizer is None:
        return {}
    tokens: dict[int, int] = {}
    for start in range(0, len(suspects), _AT_ONCE):
        places = suspects[start : start + _AT_ONCE]
        encoded = tokenizer.encode_batch_fast([_text(rows[place]) for place in places], add_special_tokens=False)
        tokens.update((place, len(each.ids)) for place, each in zip(places, encoded, strict=True))
    return {place: count for place, count in tokens.items() if count > limit}


def short_enough(config: RlConfig, rows: PromptRows, left_out: Callable[[int], None]) -> Sequence[PromptRow]:
    """Rows within `data.max_input_seq_length`; without that all, and DataError if any fills the sequence."""
    limit, model = config.data.max_input_seq_length, config.policy.checkpoint
    if model is None:
        return rows
    if limit is None:
        _refuse_without_room(config, rows, model)
        return rows
    long = longer_than(limit, rows, model)
    if not long:
        return rows
    if len(long) == len(rows):
        place, tokens = next(iter(long.items()))
        raise DataError(
            f"none of {len(rows)} prompts is within data.max_input_seq_length",
            where=rows[place].where,
            expected=f"at most {limit} tokens",
            found=f"{tokens}, the shortest {min(long.values())}",
            hints=["data.max_input_seq_length=null   # leaves none out", *show_line(rows[place].where)],
        )
    left_out(len(long))
    chosen = array("Q", [place for place in range(len(rows)) if place not in long])
    return Rows(len(chosen), lambda place: rows[chosen[place]])


def _refuse_without_room(config: RlConfig, rows: PromptRows, model: str) -> None:
    policy = config.policy
    end = policy.max_total_sequence_length_end or 0
    key = f"policy.max_total_sequence_length{'_end' if end > policy.max_total_sequence_length else ''}"
    limit = max(policy.max_total_sequence_length, end)
    long = longer_than(limit - 1, rows, model)
    if not long:
        return
    place, tokens = next(iter(long.items()))
    most = max(long.values())
    room: float = most + policy.generation.max_new_tokens
    with suppress(ArtifactError):  # a longer one than the model was made for would be refused in turn
        room = min(room, Architecture.from_folder(hf_folder(model)).positions)
    raise DataError(
        f"{len(long)} of {len(rows)} prompts leave no room for an answer",
        where=rows[place].where,
        expected=f"fewer than {limit} tokens ({key})",
        found=f"{tokens}, the longest {most}",
        hints=[
            *([f"data.max_input_seq_length={limit - 1}   # leaves them out"] if len(long) < len(rows) else []),
            *([f"{key}={room}   # room for all of them"] if room > most else []),
            *show_line(rows[place].where),
        ],
    )


def _tokenizer(folder: Path) -> Tokenizer | None:
    """Without its own bound on lengths; None where the folder has no tokenizer.json."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    return tokenizer


def _text(row: PromptRow) -> str:
    """The texts of a prompt, as far as it can be read: check_rows reports those that cannot."""
    try:
        return "\n".join(message["content"] for message in read_request(row.row, row.where).messages)
    except DataError:
        return ""


class JudgeToBe:
    """Stands for a judge that is not loaded yet."""

    def __init__(self, role: str, config: VllmModelConfig) -> None:
        self._role, self._config = role, config
        self._unwritten: dict[tuple[str, ...], tuple[str, ...]] = {}

    async def complete(self, messages: Messages, *, temperature: float, top_p: float, max_tokens: int) -> str:
        """Never asked."""
        raise AssertionError("rows are checked without a judge")

    def refuse_longer(self, messages: Messages, where: str, *, max_tokens: int) -> None:
        """DataError for a question, of the row at `where`, that fills the context; see MeasuringJudge."""
        limit, texts = self._config.max_total_sequence_length, [message["content"] for message in messages]
        if sum(len(text.encode()) for text in texts) < limit or self._tokenizer is None:
            return
        tokens = sum(len(each.ids) for each in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        if tokens < limit:
            return
        key = f"env.nemo_gym.{self._role}.responses_api_models.vllm_model.max_total_sequence_length"
        raise DataError(
            f"what {self._role} is asked about this row leaves no room for its answer",
            where=where,
            expected=f"fewer than {limit} tokens ({key})",
            found=f"{tokens}, without the answers that it is to judge",
            hints=(longer_context(key, tokens + max_tokens), *show_line(where)),
        )

    def unwritten(self, messages: Messages) -> tuple[str, ...]:
        """Roles of a question that the judge's template refuses or leaves out; see MeasuringJudge."""
        own = tuple(role for role in (message["role"] for message in messages) if role not in COMMON_ROLES)
        if own and own not in self._unwritten:
            self._unwritten[own] = self._left_out(own)
        return self._unwritten.get(own, ())

    def _left_out(self, own: tuple[str, ...]) -> tuple[str, ...]:
        if self._folder is None:
            return ()
        marked = [{"role": role, "content": f"what {role} said"} for role in ("user", *own)]
        try:
            text = ChatFormat.from_folder(self._folder).render_text(marked)
        except ArtifactError:  # without a template; who loads it says so
            return ()
        except (TemplateError, TypeError, ValueError):  # `raise_exception` of a role that it does not know
            return own
        return tuple(each["role"] for each in marked if each["content"] not in text)

    @cached_property
    def _folder(self) -> Path | None:
        """None for a judge that somebody else serves, or that is not here yet."""
        if self._config.backend == "http" or self._config.model is None:
            return None
        folder = hf_folder(self._config.model)
        return folder if (folder / "tokenizer.json").is_file() else None

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        return _tokenizer(self._folder) if self._folder is not None else None


@dataclass(frozen=True)
class RunRows:
    """What a GRPO run trains on, is validated on, and is graded on before and after."""

    train: Sequence[PromptRow]
    validation: Sequence[PromptRow] = ()
    heldout: Sequence[PromptRow] = ()
    split: tuple[int, int] | None = None
    """How many distinct prompts of how many `heldout.share` held out; None where it says nothing here."""


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


def read_data(config: RlConfig, left_out: Callable[[int], None] = lambda _: None, *, made_by: str = "") -> RunRows:
    """The rows, those that are too long left out or refused, and `heldout.share` of them held out;
    `made_by`: the step that the prompts are of."""
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
    splits = (short_enough(config, read_rows(path), left_out) if path is not None else () for path in paths)
    train, validation, heldout = splits
    rows, share = RunRows(train, validation, heldout), config.heldout.share
    if share and rows.heldout:
        where, hints = "heldout.share", ("heldout.share=null", "data.heldout.data_path=null")
        raise ConfigError("these prompts have held-out rows already", where=where, found=str(share), hints=hints)
    of_the_user = made_by == _IMPORT and not rows.validation and not rows.heldout
    return _with_held_out(config, rows) if share or (share is None and of_the_user) else rows


_IMPORT = "data_prep/import_prompts"
_LEAST, _MOST = 50, 64
"""Distinct prompts from which on some are held out where no share is asked for, and how many at most."""


def _with_held_out(config: RlConfig, rows: RunRows) -> RunRows:
    """The training prompts whose digest is least are held out, with every row that asks the same."""
    asked = array("Q")
    for row in rows.train:
        text = json.dumps(read_request(row.row, row.where).messages, sort_keys=True)
        asked.append(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))
    every, share = sorted({*asked}), config.heldout.share
    count = min(_MOST, len(every) // 10) if share is None else max(1, round(share * len(every)))
    held = {*every[: min(count, len(every) - 1)]}
    sides = [array("Q", (n for n, each in enumerate(asked) if (each in held) is side)) for side in (False, True)]
    batch = config.grpo.prompts_per_generation_batch
    if share is None and (len(every) < _LEAST or len(sides[0]) < min(batch, len(asked))):
        return rows  # too few to judge by, or a step's prompts would no longer be there
    train, heldout = (Rows(len(places), lambda n, at=places: rows.train[at[n]]) for places in sides)  # type: ignore[misc]
    return replace(rows, train=train, heldout=heldout, split=(len(held), len(every)))


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
