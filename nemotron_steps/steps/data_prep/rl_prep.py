"""data_prep/rl_prep: prompts with verifier fields in the NeMo-Gym row shape, split so that no question is in two."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nemotron_steps.artifacts.files import to_json_bytes
from nemotron_steps.config.schema.data_prep import ReasoningGymSource, RlPrepConfig
from nemotron_steps.rows.lines import Row
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.data_prep.blends.placeholders import Placeholders
from nemotron_steps.steps.data_prep.blends.prepare import prepare, sources_of
from nemotron_steps.steps.data_prep.gym_tasks import Question, draw_questions
from nemotron_steps.steps.data_prep.prompt_work import PromptWork, agent_ref
from nemotron_steps.steps.data_prep.split_files import PROMPT_FILES, Split, write_splits

TREE: dict[Split, str] = {"train": "train/data.jsonl", "validation": "val/data.jsonl", "heldout": "test/data.jsonl"}
GYM_AGENT = "reasoning_gym_simple_agent"


def run(context: StepContext[RlPrepConfig]) -> None:
    """Write the `prompts` output."""
    config = context.config
    folder = context.outputs["prompts"].path
    files = TREE if config.layout == "tree" else PROMPT_FILES
    if config.reasoning_gym is not None:
        counts = write_splits(folder, files, gym_rows(config, config.reasoning_gym))
    else:
        counts = prepare_own(context, files)
    if config.layout == "tree":
        # The keys of the published manifest; paths are relative, so that a copy of the folder is as good.
        manifest = {Path(name).parent.name: name if split in counts else "" for split, name in files.items()}
        (folder / "manifest.json").write_bytes(to_json_bytes({**manifest, "mode": "resolve"}))
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


def prepare_own(context: StepContext[RlPrepConfig], files: Mapping[Split, str]) -> dict[str, int]:
    """The user's own rows, every field kept. Returns split → rows."""
    config = context.config
    where = Placeholders(config.placeholders.model_dump(), config.mirror, str(context.work / "placeholders"))
    return prepare(
        sources_of(config),
        PromptWork(config.agent, config.check_environments, where, config.prompt_length),
        config,
        folder=context.outputs["prompts"].path,
        files=files,
        staging=context.work / "shards",
        tracker=context.tracker,
    )
