"""data_prep/import_prompts, import_chats and import_pairs: rows as others have them, in the shape that a step takes."""

from functools import partial
from typing import Any

from nemotron_steps.config.schema.data_prep import ImportPromptsConfig, ImportRowsConfig, ReasoningControlConfig
from nemotron_steps.errors import DataError
from nemotron_steps.rows.layouts import imported_prompt, prompt_layout
from nemotron_steps.rows.lines import parse_row
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.data_prep.blends.formats import lines_of, parts_of
from nemotron_steps.steps.data_prep.blends.prepare import Source, prepare
from nemotron_steps.steps.data_prep.blends.shards import RowFunction, RowWork
from nemotron_steps.steps.data_prep.blends.sources import DataFile, data_files, licence_of
from nemotron_steps.steps.data_prep.preference_prep import preference_rows
from nemotron_steps.steps.data_prep.sft_prep import chat_rows


def imported_rows(column: str | None, system: str | None) -> RowFunction:
    """Of prompts in any layout: see imported_prompt."""
    return lambda where, row: [imported_prompt(row, where, column, system)]


def prompts(context: StepContext[ImportPromptsConfig]) -> None:
    """Write the `prompts` output."""
    config = context.config
    _import(context, partial(imported_rows, config.prompt_column, config.system), "prompts")


def chats(context: StepContext[ImportRowsConfig]) -> None:
    """Write the `chats` output."""
    _import(context, partial(chat_rows, ReasoningControlConfig(), ""), "chats")


def pairs(context: StepContext[ImportRowsConfig]) -> None:
    """Write the `preferences` output."""
    _import(context, preference_rows, "preferences")


def _import(context: StepContext[Any], work: RowWork, port: str) -> None:
    path, tracker = context.config.dataset.path, context.tracker
    if path is None:
        raise DataError("no data set was given", where="dataset.path", hints=("--input dataset=FILE.parquet",))
    # Nobody means to train on files of a `test` split.
    every = data_files(path, key="dataset.path")
    files = data_files(path, key="dataset.path", split="train") if len(every) > 1 else every
    if len(files) < len(every):
        tracker.summary({"left_aside": [file.name for file in every if file not in files]})
    if port == "prompts":
        tracker.summary(_recognised(files[0], context.config.prompt_column))
    counts = prepare(context, [Source("dataset", files, licence=licence_of(path))], work, context.outputs[port].path)
    tracker.summary({f"{split}_{port}": count for split, count in counts.items()})


def _recognised(file: DataFile, column: str | None) -> dict[str, str]:
    for part in parts_of(file):
        for number, line in lines_of(part):
            if line.strip():
                layout, named = prompt_layout(parse_row(line, f"{file.place}:{number}")[0])
                shown = column or named
                return {"layout": (layout or "unknown") if column is None else "as told", "prompt_column": shown}
    return {}
