"""Checks of a stage's results: the numbers it reported against the bounds that its pipeline states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemotron_steps.artifacts.jsonable import as_float
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.config.names import nearest
from nemotron_steps.errors import CheckFailedError
from nemotron_steps.manifest.pipeline_models import StageCheck
from nemotron_steps.resolver.plan import PlannedStep
from nemotron_steps.runs.lines import number
from nemotron_steps.runs.run_folder import keys_of, read_events


@dataclass(frozen=True)
class FailedCheck:
    """A check that does not hold, and what was found."""

    check: StageCheck
    found: str

    def __str__(self) -> str:
        return f"{self.check.metric}: {self.found}, should be {self.check.expected}"


def failed_checks(
    checks: Sequence[StageCheck], summary: Mapping[str, Any], store: ArtifactStore, made_by: str, cache_key: str
) -> list[FailedCheck]:
    """Every check that does not hold. A number that is not there fails its check.

    Args:
        made_by: the run whose metrics are the step's, under whatever key it had there.
    """
    values = flat_numbers(summary)
    if any(check.metric not in values for check in checks):
        values = {**_last_metrics(store, made_by, cache_key), **values}
    failed = []
    for check in checks:
        value = values.get(check.metric)
        if value is None:
            close = nearest(check.metric, list(values))
            failed.append(FailedCheck(check, "no such number" + (f" (near: {', '.join(close)})" if close else "")))
        elif not check.holds(value):
            failed.append(FailedCheck(check, number(value)))
    return failed


def blocked(failed: Sequence[FailedCheck], planned: PlannedStep, run_id: str) -> CheckFailedError:
    """What ends a pipeline at a stage, with how to go on all the same."""
    one = len(failed) == 1
    return CheckFailedError(
        f"'{planned.key}' does not pass its check{'' if one else 's'}; its results are kept",
        where=f"stage {planned.key}: {', '.join(each.check.metric for each in failed)}",
        expected="; ".join(each.check.expected for each in failed),
        found="; ".join(each.found for each in failed),
        hints=(f"steps run --resume {run_id} --ignore-checks {planned.key}   # go on all the same",),
    )


def flat_numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a summary: NAME, of a change what it came to, of nested values NAME/ROW/COLUMN.

    NaN and infinities among them: a number that ended as NaN is not the one before it.
    """
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            if "before" in value and (after := as_float(value.get("after"))) is not None:
                found[f"{prefix}{name}"] = after
            found.update(flat_numbers(value, f"{prefix}{name}/"))
        elif (single := as_float(value)) is not None:
            found[f"{prefix}{name}"] = single
    return found


def _last_metrics(store: ArtifactStore, run_id: str, cache_key: str) -> dict[str, float]:
    """The last value of each metric of the step that worked under a cache key in a run; none of a run that is gone."""
    keys = keys_of(store, run_id, cache_key)
    values: dict[str, float] = {}
    for record in read_events(store, run_id, "metrics") if keys else ():
        if record.get("step") in keys:
            values.update(flat_numbers(record["values"]))
    return values
