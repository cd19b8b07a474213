"""What becomes of a prompt row: filled in, checked, named an agent, left out where it is too long."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemotron_steps.config.schema.data_prep import PromptLengthConfig
from nemotron_steps.environments.agents import agent_of, resolve, unknown_agent
from nemotron_steps.environments.registry import environment_class, settings_of
from nemotron_steps.errors import ConfigError, DataError, UnsupportedError
from nemotron_steps.rows.layouts import prompt_layout, read_request, text_columns
from nemotron_steps.rows.lines import Row
from nemotron_steps.steps.data_prep.blends.placeholders import PLACEHOLDER, PlaceholderFiller, Placeholders
from nemotron_steps.steps.data_prep.blends.row_work import RowFunction, RowLeftOut

if TYPE_CHECKING:
    from nemotron_steps.environments.base import Environment


def agent_ref(name: str) -> dict[str, str]:
    """The reference to a NeMo-Gym agent."""
    return {"type": "responses_api_agents", "name": name}


@dataclass(frozen=True)
class PromptWork:
    """See RowWork.

    Attributes:
        agent: of rows that name none.
        check_environments: whether rows are refused that their environment could not score.
        placeholders: where the questions are that rows point to.
        length: prompts longer than that are left out.
    """

    agent: str | None
    check_environments: bool
    placeholders: Placeholders
    length: PromptLengthConfig | None

    def function(self) -> RowFunction:
        """See RowWork."""
        check_environment = EnvironmentChecks() if self.check_environments else None
        length = LengthCheck(self.length) if self.length is not None else None
        filler = PlaceholderFiller(self.placeholders)

        def become(where: str, row: Row) -> list[Row] | None:
            changed = PLACEHOLDER in row
            if changed:
                row = filler.fill(row, where)
            try:
                read_request(row, where)
            except DataError as error:
                error.hints = (*_imported(where, row), *error.hints)
                raise
            if self.agent is not None and row.get("agent_ref") is None:
                row["agent_ref"] = agent_ref(self.agent)
                changed = True
            if check_environment is not None:
                check_environment(where, row)
            if length is not None and not length.fits(row, where):
                raise RowLeftOut(f"the prompt has more than {length.max_tokens} tokens")
            return [row] if changed else None

        return become


def _imported(where: str, row: Row) -> tuple[str, ...]:
    """A command that makes prompts of rows like this one, as a hint; none for one that is meant to be a prompt here."""
    if "responses_create_params" in row:
        return ()
    imported = f"steps run data_prep/import_prompts --input dataset={shlex.quote(where.rpartition(':')[0])}"
    if prompt_layout(row)[1]:
        return (imported,)
    return tuple(f"{imported} prompt_column={name}" for name in text_columns(row)[:1])


class LengthCheck:
    """Tells prompts that have more tokens than a policy may read."""

    def __init__(self, config: PromptLengthConfig) -> None:
        from nemotron_steps.models.chat import ChatFormat

        self._chat = ChatFormat.from_folder(config.tokenizer)
        self.max_tokens = config.max_tokens

    def fits(self, row: Row, where: str) -> bool:
        """Whether a policy may read the prompt."""
        asked = read_request(row, where)
        return len(self._chat.render(asked.messages, asked.tools)) <= self.max_tokens


class EnvironmentChecks:
    """Asks each row's environment whether it could score the row. No judge is needed for that.

    Where an environment is nothing without the run's own settings (a server's address), a row is only checked for
    naming an agent that exists.
    """

    def __init__(self) -> None:
        self._environments: dict[str, Environment | None] = {}

    def __call__(self, where: str, row: Row) -> None:
        """DataError naming file, line and field of an unusable row."""
        reference = row.get("agent_ref")
        if not isinstance(reference, dict) or reference.get("name") is None:
            raise DataError(
                "the row names no agent, so nothing says which environment grades it",
                where=f"{where} field agent_ref.name",
                expected='"agent_ref": {"type": "responses_api_agents", "name": ...}',
                found="no agent_ref",
                hints=("agent=reasoning_gym_simple_agent", "check_environments=false"),
            )
        agent = agent_of(row, where)
        if agent not in self._environments:
            self._environments[agent] = _unset_environment(agent, where)
        environment = self._environments[agent]
        if environment is not None:
            environment.check_row(row, where)


def _unset_environment(agent: str, where: str) -> Environment | None:
    """The environment of an agent without a run's settings; None where it cannot be without them."""
    try:
        found = resolve(agent, {})
        if found is None:
            # Only a training step has settings that say what a new agent stands for.
            raise unknown_agent(agent, where, hints=("check_environments=false",))
        name, settings = found
        return environment_class(name)(settings_of(name, settings), {})
    except (ConfigError, UnsupportedError):
        return None
