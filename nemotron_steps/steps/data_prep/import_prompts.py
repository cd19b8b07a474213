"""data_prep/import_prompts: prompts as another trainer has them, in the shape that an RL step takes."""

from __future__ import annotations

from nemotron_steps.artifacts.rows import parse_row
from nemotron_steps.config.schema.data_prep import ImportPromptsConfig
from nemotron_steps.errors import DataError
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.data_prep.blends.formats import lines_of, parts_of
from nemotron_steps.steps.data_prep.blends.prepare import Source, prepare
from nemotron_steps.steps.data_prep.blends.sources import DataFile, data_files
from nemotron_steps.steps.data_prep.prompt_layouts import PromptImport, layout_of
from nemotron_steps.steps.data_prep.split_files import FILES


def run(context: StepContext[ImportPromptsConfig]) -> None:
    """Write the `prompts` output."""
    config = context.config
    if config.dataset.path is None:
        raise DataError("no data set was given", where="dataset.path", hints=("--input dataset=FILE.parquet",))
    files, aside = _training_files(config.dataset.path)
    if aside:
        context.tracker.summary({"left_aside": aside})
    context.tracker.summary(_recognised(files[0], config.prompt_column))
    counts = prepare(
        [Source("dataset", files)],
        PromptImport(config.prompt_column, config.system),
        config,
        folder=context.outputs["prompts"].path,
        files=FILES,
        staging=context.work / "shards",
        tracker=context.tracker,
    )
    context.tracker.summary({f"{split}_prompts": count for split, count in counts.items()})


def _training_files(path: str) -> tuple[list[DataFile], list[str]]:
    """The files to train on, and the names of those that are of other splits: nobody means to train on a `test`."""
    every = data_files(path, key="dataset.path")
    if len(every) < 2:
        return every, []
    files = data_files(path, key="dataset.path", split="train")
    return files, [file.name for file in every if file not in files]


def _recognised(file: DataFile, column: str | None) -> dict[str, str]:
    """What the first row looks like, for the summary."""
    for part in parts_of(file):
        for number, line in lines_of(part):
            if line.strip():
                layout, named = layout_of(parse_row(line, f"{file.place}:{number}")[0])
                shown = column or named
                return {"layout": (layout or "unknown") if column is None else "as told", "prompt_column": shown}
    return {}
