"""data_prep/rl_prep: prompts with verifier fields in the NeMo-Gym row shape, split so that no question is in two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemotron_steps.artifacts.rows import prompt_row
from nemotron_steps.config.schema.data_prep import ReasoningGymSource, RlPrepConfig
from nemotron_steps.environments.agents import agent_of, resolve
from nemotron_steps.environments.registry import environment_class, settings_of, unknown_agent
from nemotron_steps.errors import ConfigError, DataError, UnsupportedError, show_line
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.data_prep.blends.prepare import Preparation, Source, prepare
from nemotron_steps.steps.data_prep.blends.row_work import RowFunction
from nemotron_steps.steps.data_prep.blends.sources import data_files
from nemotron_steps.steps.data_prep.gym_tasks import Question, Split, draw_questions
from nemotron_steps.steps.data_prep.row_files import Row, write_splits

if TYPE_CHECKING:
    from nemotron_steps.environments.base import Environment

FILES: dict[Split, str] = {"train": "train-split.jsonl", "validation": "val-split.jsonl", "heldout": "heldout.jsonl"}
GYM_AGENT = "reasoning_gym_simple_agent"


def run(context: StepContext[RlPrepConfig]) -> None:
    """Write the `prompts` output."""
    config = context.config
    if config.reasoning_gym is not None:
        splits = gym_rows(config, config.reasoning_gym)
        counts = write_splits(context.outputs["prompts"].path, FILES, splits)
    else:
        counts = prepare_own(context)
    context.tracker.summary({f"{split}_prompts": count for split, count in counts.items()})


def gym_rows(config: RlPrepConfig, source: ReasoningGymSource) -> dict[Split, list[Row]]:
    """Rows of reasoning-gym questions."""
    return {
        split: [question_row(q, config.agent or q.asked.agent or GYM_AGENT) for q in questions]
        for split, questions in draw_questions(source, config.rows).items()
    }


def question_row(question: Question, agent: str) -> Row:
    """One question as a row, its verifier fields whichever agent is named: any environment may grade it later."""
    return {
        "responses_create_params": {"input": [{"role": "user", "content": question.text}]},
        **question.fields,
        "agent_ref": agent_ref(agent),
    }


def agent_ref(name: str) -> dict[str, str]:
    """The reference to a NeMo-Gym agent."""
    return {"type": "responses_api_agents", "name": name}


def prepare_own(context: StepContext[RlPrepConfig]) -> dict[str, int]:
    """The user's own rows, every field kept. Returns split → rows."""
    config = context.config
    assert config.jsonl is not None  # the config has exactly one source
    source = Source("jsonl", data_files(config.jsonl.path, key="jsonl.path"))
    return prepare(
        [source],
        PromptWork(agent=config.agent, check_environments=config.check_environments),
        Preparation(config.rows, config.sample, config.max_refused_share, config.num_workers),
        folder=context.outputs["prompts"].path,
        files=FILES,
        staging=context.work / "shards",
        tracker=context.tracker,
    )


@dataclass(frozen=True)
class PromptWork:
    """What becomes of a prompt row: it is checked, and named an agent if it names none."""

    agent: str | None
    check_environments: bool

    def function(self) -> RowFunction:
        """See RowWork."""
        check_environment = EnvironmentChecks() if self.check_environments else None

        def become(where: str, row: Row) -> list[Row] | None:
            problem = prompt_row(row)
            if problem is not None:
                fields = "fields " + (", ".join(sorted(row)[:12]) or "none")
                raise DataError(problem, where=where, found=fields, hints=show_line(where))
            changed = self.agent is not None and row.get("agent_ref") is None
            if changed and self.agent is not None:
                row["agent_ref"] = agent_ref(self.agent)
            if check_environment is not None:
                check_environment(where, row)
            return [row] if changed else None

        return become


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
