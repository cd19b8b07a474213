"""data_prep/preference_prep: preference pairs for DPO out of rows of two answers each (pair_layouts.py)."""

from __future__ import annotations

from nemotron_steps.config.schema.data_prep import PreferencePrepConfig
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.data_prep.blends.prepare import prepare, sources_of
from nemotron_steps.steps.data_prep.pair_layouts import PreferenceWork
from nemotron_steps.steps.data_prep.split_files import FILES


def run(context: StepContext[PreferencePrepConfig]) -> None:
    """Write the `preferences` output."""
    config = context.config
    counts = prepare(
        sources_of(config),
        PreferenceWork(),
        config,
        folder=context.outputs["preferences"].path,
        files=FILES,
        staging=context.work / "shards",
        tracker=context.tracker,
    )
    context.tracker.summary({f"{split}_pairs": count for split, count in counts.items()})
