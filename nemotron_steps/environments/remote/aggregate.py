"""NeMo-Gym's /aggregate_metrics: what a set of verify answers comes to, per task and over all.

Every number of an answer (and of its `response.usage`) is described by mean, max, min, median and standard deviation,
under keys like `mean/reward`. An answer that could not be judged counts as masked and adds nothing else.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from nemotron_steps.environments.recorded import TASK_INDEX

ROLLOUT_INDEX = "_ng_rollout_index"


def aggregate(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The body of NeMo-Gym's AggregateMetrics.

    Args:
        answers: verify answers, each with `reward`; those of one prompt share their `_ng_task_index`.

    Raises:
        TypeError, AttributeError: an answer is no object.
    """
    tasks: dict[int, list[dict[str, float]]] = defaultdict(list)
    masked = 0
    for answer in answers:
        numbers = _numbers(answer)
        if "reward" not in numbers or answer.get("mask_sample"):
            masked += 1
        else:
            tasks[int(answer.get(TASK_INDEX, 0))].append(numbers)
    everything = _described([numbers for rollouts in tasks.values() for numbers in rollouts])
    if masked:
        everything["masked"] = masked
    return {
        "group_level_metrics": [{**_described(tasks[task]), TASK_INDEX: task} for task in sorted(tasks)],
        "agent_metrics": everything,
        "key_metrics": {key: value for key, value in everything.items() if key.startswith("mean/")},
    }


def _numbers(answer: Mapping[str, Any]) -> dict[str, float]:
    response = answer.get("response") or {}
    fields = {**(response.get("usage") or {}), **(answer.get("components") or {}), **answer}
    return {
        name: float(value)
        for name, value in fields.items()
        if isinstance(value, int | float) and name not in (TASK_INDEX, ROLLOUT_INDEX)
    }


def _described(rollouts: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    columns: dict[str, list[float]] = defaultdict(list)
    for numbers in rollouts:
        for name, value in numbers.items():
            columns[name].append(value)
    described: dict[str, Any] = {}
    for name, values in sorted(columns.items()):
        described[f"mean/{name}"] = statistics.fmean(values)
        described[f"max/{name}"] = max(values)
        described[f"min/{name}"] = min(values)
        described[f"median/{name}"] = statistics.median(values)
        described[f"std/{name}"] = statistics.stdev(values) if len(values) > 1 else 0.0
    return described
