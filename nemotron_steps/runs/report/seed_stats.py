"""What the instances of a fanned-out stage came to, side by side, and mean and spread over seeds."""

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from nemotron_steps.artifacts.files import plain
from nemotron_steps.runs.log_format import Figure, difference, figure, is_table, number

MEANING = "mean ± standard deviation over seeds (difference to the first ± its standard error)"


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
    standard_error: float | None = None
    change: Mapping[str, Any] | None = None
    """To the first row, as `log_format.difference` gives it; None in that row."""

    def __str__(self) -> str:
        spread = "" if self.spread is None else f" ± {number(float(self.spread))}"
        return (
            number(float(self.mean))
            + spread
            + (f" ({self.change['text']})" if self.change and self.change["text"] else "")
        )

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
    cells: list[_Cell] = []
    endings: dict[str, list[str]] = {}
    over = list(dict.fromkeys(name for outcome in found for name in outcome.labels or ()))
    last = [name.rpartition(".")[2] for name in over]
    short = {name: end if last.count(end) == 1 else name for name, end in zip(over, last, strict=True)}
    several = len({outcome.stage for outcome in found if outcome.labels}) > 1
    for outcome in found:
        if labels := outcome.labels:
            values = [f"{short[name]}={value}" for name, value in labels.items() if not name.endswith("seed")]
            endings[outcome.key.removeprefix(outcome.stage)] = values
            row = " ".join([outcome.stage] * (several or not values) + values)
            cells.append((outcome.stage, row, outcome.key, outcome.summary))
    if own := _table(cells):
        tables[f"over {' and '.join(over)}"] = own
    for outcome in found:
        for name, table in outcome.summary.items():
            if outcome.labels or not is_table(table):
                continue
            rows: list[_Cell] = []
            for row, measures in table.items():
                ending = max((each for each in endings if row.endswith(each)), key=len, default=None)
                if ending is not None:
                    stage = row.removesuffix(ending)
                    rows.append((stage, " ".join([stage, *endings[ending]]), row, measures))
            gathered = _table(rows)
            if len(gathered) < len(rows):
                tables[f"{outcome.key}: {name.replace('_', ' ')}"] = gathered
    return tables


_Cell = tuple[str, str, str, Mapping[str, Any]]
"""Stage (rows of one are compared), row, instance, measures."""


def as_text(table: Table) -> dict[str, dict[str, str]]:
    """A table for reading."""
    return {row: {name: str(cell) for name, cell in cells.items()} for row, cells in table.items()}


def _table(cells: Iterable[_Cell]) -> Table:
    """The numbers of each instance as a table; of a change, what it came to."""
    values: dict[tuple[str, str, str], dict[str, Figure]] = {}
    for stage, row, instance, measures in cells:
        for measure in measures:
            if (found := figure(measures, measure))[0] is not None:
                values.setdefault((stage, row, measure), {})[instance] = found
    table: dict[str, dict[str, Spread]] = {}
    firsts: dict[tuple[str, str], Figure] = {}
    for (stage, row, measure), by in values.items():
        spread = _spread(by)
        came_to = (spread.mean, spread.standard_error)
        first = firsts.setdefault((stage, measure), came_to)
        change = None if first is came_to else difference(measure, first, came_to)
        table.setdefault(row, {})[measure] = spread._replace(change=change)
    return table


def _spread(figures: Mapping[str, Figure]) -> Spread:
    values = {instance: value for instance, (value, _) in figures.items() if value is not None}
    several = list(values.values())
    finite = all(map(math.isfinite, several))
    spread = statistics.stdev(several) if finite and len(several) > 1 else None
    error = next(error for _, error in figures.values()) if spread is None else spread / math.sqrt(len(several))
    return Spread(statistics.fmean(several) if finite else math.nan, spread, values, error)
