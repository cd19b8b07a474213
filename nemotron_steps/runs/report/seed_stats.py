"""What the instances of a fanned-out stage came to, side by side, and mean and spread over seeds."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemotron_steps.artifacts.files import as_float, plain
from nemotron_steps.runs.log_format import is_table, number

MEANING = "mean ± standard deviation over seeds"
_SEED = "seed"


@dataclass(frozen=True)
class Outcome:
    """A step of a run: its key, its summary, and what it was fanned out over (key of the config → label), if it was."""

    key: str
    summary: Mapping[str, Any]
    stage: str = ""
    labels: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Spread:
    """One measure over seeds: its values by instance, their mean and sample standard deviation (n − 1).

    `spread` is None where there is one value. Where one is not finite (an instance that diverged) the mean is NaN
    and `spread` None: a mean of the others would hide it.
    """

    mean: float
    spread: float | None
    values: Mapping[str, float]

    def __str__(self) -> str:
        if self.spread is None:
            return number(self.mean)
        return f"{number(float(self.mean))} ± {number(float(self.spread))}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable form; what is not finite as text."""
        fields: dict[str, Any] = plain({"mean": self.mean, "spread": self.spread, "values": self.values})
        return fields


Table = Mapping[str, Mapping[str, Spread]]
"""Row → column → measure. A row is a fanned-out stage, or a row of a table that a later step made of its instances."""


def spread_tables(outcomes: Iterable[Outcome]) -> dict[str, Table]:
    """Title → table: of the instances themselves, and of each table in which a later step has a row for each.

    Instances that differ in a seed alone share a row. Empty for a run without fan-out.
    """
    found = list(outcomes)
    fanned = [outcome for outcome in found if outcome.labels]
    if not fanned:
        return {}
    tables: dict[str, Table] = {}
    over = " and ".join(dict.fromkeys(name for outcome in fanned for name in outcome.labels or ()))
    own = _table((each.stage + _suffix(_rest(each.labels or {})), each.key, _measures(each.summary)) for each in fanned)
    if own:
        tables[f"over {over}"] = own
    endings = {_suffix(each.labels or {}): _suffix(_rest(each.labels or {})) for each in fanned}
    for outcome in found:
        for name, table in outcome.summary.items():
            if outcome.labels or not is_table(table):
                continue
            rows = [(shared, row, cells) for row, cells in table.items() if (shared := _shared(row, endings))]
            gathered = _table((shared, row, _measures(cells)) for shared, row, cells in rows)
            if len(gathered) < len(rows):
                tables[f"{outcome.key}: {name.replace('_', ' ')}"] = gathered
    return tables


def as_text(table: Table) -> dict[str, dict[str, str]]:
    """A table for reading."""
    return {row: {name: str(cell) for name, cell in cells.items()} for row, cells in table.items()}


def _table(cells: Iterable[tuple[str, str, Mapping[str, float]]]) -> Table:
    """(row, instance, measure → value) of each instance as a table."""
    values: dict[str, dict[str, dict[str, float]]] = {}
    for row, instance, measures in cells:
        for measure, value in measures.items():
            values.setdefault(row, {}).setdefault(measure, {})[instance] = value
    return {row: {name: _spread(by) for name, by in measures.items()} for row, measures in values.items()}


def _spread(values: Mapping[str, float]) -> Spread:
    several = list(values.values())
    if not all(map(math.isfinite, several)):
        return Spread(math.nan, None, values)
    return Spread(statistics.fmean(several), statistics.stdev(several) if len(several) > 1 else None, values)


def _measures(summary: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a summary; of a change, what it came to."""
    numbers = {}
    for name, value in summary.items():
        if isinstance(value, Mapping) and "before" in value:
            value = value.get("after")
        if (single := as_float(value)) is not None:
            numbers[name] = single
    return numbers


def _rest(labels: Mapping[str, str]) -> dict[str, str]:
    return {name: label for name, label in labels.items() if not name.endswith(_SEED)}


def _suffix(labels: Mapping[str, str]) -> str:
    return "".join(f"-{label}" for label in labels.values())


def _shared(row: str, endings: Mapping[str, str]) -> str | None:
    """The row that a row of an instance is averaged into; None for one of no instance."""
    longest: Sequence[str] = sorted((ending for ending in endings if row.endswith(ending)), key=len)
    return row.removesuffix(longest[-1]) + endings[longest[-1]] if longest else None
