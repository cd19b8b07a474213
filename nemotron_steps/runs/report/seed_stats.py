"""What the instances of a fanned-out stage came to, side by side, and mean and spread over seeds."""

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from nemotron_steps.artifacts.files import as_float, plain
from nemotron_steps.runs.log_format import is_table, number

MEANING = "mean ± standard deviation over seeds"


class Outcome(NamedTuple):
    """A step of a run: its key, its summary, and what it was fanned out over (key of the config → label), if it was."""

    key: str
    summary: Mapping[str, Any]
    stage: str = ""
    labels: Mapping[str, str] | None = None


class Spread(NamedTuple):
    """One measure over seeds: its values by instance, their mean and sample standard deviation (n − 1).

    `spread` is None where there is one value. Where one is not finite (an instance that diverged) the mean is NaN
    and `spread` None: a mean of the others would hide it.
    """

    mean: float
    spread: float | None
    values: Mapping[str, float]

    def __str__(self) -> str:
        error = "" if self.spread is None else f" ± {number(float(self.spread))}"
        return number(float(self.mean)) + error

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable form; what is not finite as text."""
        fields: dict[str, Any] = plain(self._asdict())
        return fields


Table = Mapping[str, Mapping[str, Spread]]
"""Row → column → measure. A row is a fanned-out stage, or a row of a table that a later step made of its instances."""


def spread_tables(outcomes: Iterable[Outcome]) -> dict[str, Table]:
    """Title → table: of the instances themselves, and of each table in which a later step has a row for each.

    Instances that differ in a seed alone share a row. Empty for a run without fan-out.
    """
    found = list(outcomes)
    tables: dict[str, Table] = {}
    cells: list[tuple[str, str, Mapping[str, Any]]] = []
    endings: dict[str, str] = {}
    over: dict[str, None] = {}
    for outcome in found:
        if labels := outcome.labels:
            shared = "".join(f"-{label}" for name, label in labels.items() if not name.endswith("seed"))
            endings["".join(f"-{label}" for label in labels.values())] = shared
            cells.append((outcome.stage + shared, outcome.key, outcome.summary))
            over |= dict.fromkeys(labels)
    if own := _table(cells):
        tables[f"over {' and '.join(over)}"] = own
    for outcome in found:
        for name, table in outcome.summary.items():
            if outcome.labels or not is_table(table):
                continue
            rows = []
            for row, measures in table.items():
                ending = max((each for each in endings if row.endswith(each)), key=len, default=None)
                if ending is not None:
                    rows.append((row.removesuffix(ending) + endings[ending], row, measures))
            gathered = _table(rows)
            if len(gathered) < len(rows):
                tables[f"{outcome.key}: {name.replace('_', ' ')}"] = gathered
    return tables


def as_text(table: Table) -> dict[str, dict[str, str]]:
    """A table for reading."""
    return {row: {name: str(cell) for name, cell in cells.items()} for row, cells in table.items()}


def _table(cells: Iterable[tuple[str, str, Mapping[str, Any]]]) -> Table:
    """(row, instance, measures) of each instance as a table of the numbers; of a change, what it came to."""
    values: dict[str, dict[str, dict[str, float]]] = {}
    for row, instance, measures in cells:
        for measure, value in measures.items():
            if isinstance(value, Mapping) and "before" in value:
                value = value.get("after")
            if (single := as_float(value)) is not None:
                values.setdefault(row, {}).setdefault(measure, {})[instance] = single
    return {row: {name: _spread(by) for name, by in measures.items()} for row, measures in values.items()}


def _spread(values: Mapping[str, float]) -> Spread:
    several = list(values.values())
    if not all(map(math.isfinite, several)):
        return Spread(math.nan, None, values)
    return Spread(statistics.fmean(several), statistics.stdev(several) if len(several) > 1 else None, values)
