"""Config of `data_prep/tool_preference_prep`: preference pairs against tool hallucination."""

from collections.abc import Iterable
from typing import Annotated, Literal, get_args

from pydantic import Field, PositiveInt

from nemotron_steps.config.schema.base import OPERATIONAL, Rule, Section
from nemotron_steps.config.schema.data_prep import JsonlSource, SplitRows, broken_source_rules

Hallucination = Literal["unknown_tool", "unknown_argument", "missing_argument", "made_up_value", "needless_call"]
"""What is wrong with a rejected answer: nemotron_steps/steps/data_prep/tool_preference_prep.py."""


class ToolTasksSource(Section):
    """`tool_tasks.*`: made-up requests to small tools, for machines without data."""

    offered: int = Field(3, ge=1, le=6)
    """Tools offered with each request."""
    unanswerable_share: float = Field(0.25, ge=0, lt=1)
    """Share of requests that none of the offered tools can fulfil."""


class ToolPreferencePrepConfig(Section):
    """The whole config of the step. `rows.*` count rows, each of which gives up to `pairs_per_row` pairs."""

    jsonl: JsonlSource | None = None
    """Rows of single_step_tool_use_with_argument_comparison, or of another environment with its fields."""
    tool_tasks: ToolTasksSource | None = None
    rows: SplitRows = SplitRows()
    hallucinations: tuple[Hallucination, ...] = Field(get_args(Hallucination), min_length=1)
    """What rejected answers may do."""
    pairs_per_row: PositiveInt = 2
    """Different hallucinations drawn for one row at most."""
    sample: PositiveInt | None = None
    """Rows read of the source at most (jsonl only)."""
    max_refused_share: float = Field(0.0, ge=0, le=1)
    """Share of unusable rows that is left out, each one named and counted; above it the step fails."""
    num_workers: Annotated[PositiveInt | None, OPERATIONAL] = None
    """Processes that read the rows of jsonl. None: one for each processor."""
    seed: int = 42

    def _broken_rules(self) -> Iterable[Rule]:
        made_up, own = self.tool_tasks is not None, {"jsonl": self.jsonl is not None}
        return broken_source_rules("tool_tasks", made_up, own, self.rows.train, self.sample)
