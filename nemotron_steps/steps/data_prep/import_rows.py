"""data_prep/import_prompts, import_chats and import_pairs: rows as others have them, in the shape that a step takes.

Every column survives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nemotron_steps.config.schema.data_prep import ImportPromptsConfig, ImportRowsConfig, ReasoningControlConfig
from nemotron_steps.errors import DataError
from nemotron_steps.rows.layouts import imported_prompt, prompt_layout
from nemotron_steps.rows.lines import Row, parse_row
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.data_prep.blends.formats import lines_of, parts_of
from nemotron_steps.steps.data_prep.blends.prepare import Source, prepare
from nemotron_steps.steps.data_prep.blends.shards import RowFunction, RowWork
from nemotron_steps.steps.data_prep.blends.sources import DataFile, data_files
from nemotron_steps.steps.data_prep.blends.splits import FILES
from nemotron_steps.steps.data_prep.preference_prep import PreferenceWork
from nemotron_steps.steps.data_prep.sft_prep import ChatWork


@dataclass(frozen=True)
class PromptImport:
    """See RowWork.

    Attributes:
        column: the column of the prompt; None: told from the names.
        system: a system message before every prompt that has none.
    """

    column: str | None = None
    system: str | None = None

    def function(self) -> RowFunction:
        """See RowWork."""

        def become(where: str, row: Row) -> list[Row]:
            return [imported_prompt(row, where, self.column, self.system)]

        return become


def prompts(context: StepContext[ImportPromptsConfig]) -> None:
    """Write the `prompts` output."""
    config = context.config
    _import(context, PromptImport(config.prompt_column, config.system), "prompts")


def chats(context: StepContext[ImportRowsConfig]) -> None:
    """Write the `chats` output."""
    _import(context, ChatWork(ReasoningControlConfig(), ""), "chats")


def pairs(context: StepContext[ImportRowsConfig]) -> None:
    """Write the `preferences` output."""
    _import(context, PreferenceWork(), "preferences")


def _import(context: StepContext[Any], work: RowWork, port: str) -> None:
    files, aside = _training_files(context.config.dataset.path)
    if aside:
        context.tracker.summary({"left_aside": aside})
    if isinstance(work, PromptImport):
        context.tracker.summary(_recognised(files[0], work.column))
    counts = prepare(
        [Source("dataset", files)],
        work,
        context.config,
        folder=context.outputs[port].path,
        files=FILES,
        staging=context.work / "shards",
        tracker=context.tracker,
    )
    context.tracker.summary({f"{split}_{port}": count for split, count in counts.items()})


def _training_files(path: str | None) -> tuple[list[DataFile], list[str]]:
    """The files to train on, and the names of those that are of other splits: nobody means to train on a `test`."""
    if path is None:
        raise DataError("no data set was given", where="dataset.path", hints=("--input dataset=FILE.parquet",))
    every = data_files(path, key="dataset.path")
    files = data_files(path, key="dataset.path", split="train") if len(every) > 1 else every
    return files, [file.name for file in every if file not in files]


def _recognised(file: DataFile, column: str | None) -> dict[str, str]:
    """What the first row looks like, for the summary."""
    for part in parts_of(file):
        for number, line in lines_of(part):
            if line.strip():
                layout, named = prompt_layout(parse_row(line, f"{file.place}:{number}")[0])
                shown = column or named
                return {"layout": (layout or "unknown") if column is None else "as told", "prompt_column": shown}
    return {}
