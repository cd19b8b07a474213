"""Recorded rollouts graded again: rows of NeMo-Gym's files have the prompt's fields, `response` and `reward`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from nemotron_steps.environments.base import FLOAT32_MAX
from nemotron_steps.environments.responses import Response, conversation, text_of
from nemotron_steps.errors import DataError, UnsupportedError, show_line

if TYPE_CHECKING:
    from nemotron_steps.environments.base import Environment, GradeResult

Placed = tuple[dict[str, Any], str]

TASK_INDEX = "_ng_task_index"
"""NeMo-Gym's key: rollouts of one prompt have one number."""
_AT_ONCE = 64


@dataclass(frozen=True)
class Regraded:
    """One recorded rollout and what it is worth here."""

    where: str
    recorded: float | None
    """None: the recording was masked, or has no reward."""
    verdict: GradeResult

    def agrees(self, tolerance: float) -> bool:
        if self.recorded is None or self.verdict.reward is None:
            return self.recorded is self.verdict.reward
        return abs(self.recorded - self.verdict.reward) <= tolerance


async def regrade(environment: Environment, rollouts: Iterable[Placed]) -> AsyncIterator[Regraded]:
    """Grade recorded rollouts, in their order, some at once; neighbours of one prompt together where groups are judged.
    The environment is started and closed."""
    if environment.runs_agent:
        raise UnsupportedError(
            f"`{environment.name}` cannot grade recorded rollouts again: each carries its agent's own verdict",
            where=environment.name,
            expected="an environment that judges answers",
            hints=("steps env list",),
        )
    await environment.start()
    groups, tasks = _groups(environment, rollouts), list[asyncio.Task[list[Regraded]]]()
    try:
        while batch := list(islice(groups, _AT_ONCE)):
            tasks = [asyncio.ensure_future(_grade(environment, group)) for group in batch]
            for graded in await asyncio.gather(*tasks):
                for each in graded:
                    yield each
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await environment.close()


async def _grade(environment: Environment, group: list[Placed]) -> list[Regraded]:
    row = group[0][0]
    responses = []
    for rollout, _ in group:
        response = rollout["response"]
        cut = bool(response.get("incomplete_details"))
        responses.append(Response.from_output(response["output"], truncated=cut))
    sessions = [await environment.seed_recorded(row) for _ in group]
    try:
        verdicts = await environment.judge_group(row, responses, sessions)
    finally:
        for session in sessions:
            await environment.release(session)
    graded = []
    for (rollout, where), verdict in zip(group, verdicts, strict=True):
        instance, reward = rollout.get("instance_config"), rollout.get("reward")
        masked = rollout.get("mask_sample") or (isinstance(instance, Mapping) and instance.get("mask_sample"))
        graded.append(Regraded(where, None if masked or reward is None else float(reward), verdict))
    return graded


def _groups(environment: Environment, rollouts: Iterable[Placed]) -> Iterator[list[Placed]]:
    group: list[Placed] = []
    for rollout, where in rollouts:
        _check(rollout, where)
        environment.check_row_with_resources(rollout, where)
        if group and not (environment.judges_groups and _prompt(group[0][0]) == _prompt(rollout)):
            yield group
            group = []
        group.append((rollout, where))
    if group:
        yield group


def _prompt(row: Mapping[str, Any]) -> Any:
    """What rollouts of one prompt have in common."""
    return row.get(TASK_INDEX) if TASK_INDEX in row else conversation(row)


def _check(rollout: Mapping[str, Any], where: str) -> None:
    response = rollout.get("response")
    output = response.get("output") if isinstance(response, Mapping) else None
    if not isinstance(output, list) or not all(isinstance(item, Mapping) for item in output):
        raise DataError(
            "the row is not a recorded rollout",
            where=f"{where} field response.output",
            expected="`response`: an OpenAI Responses object, with a list of output items",
            found=f"fields: {', '.join(sorted(rollout)) or 'none'}",
            hints=show_line(where),
        )
    reward = rollout.get("reward")
    number = isinstance(reward, int | float) and not isinstance(reward, bool) and abs(reward) <= FLOAT32_MAX
    if reward is not None and not number:
        raise DataError(
            "a recorded reward must be a finite float32",
            where=f"{where} field reward",
            expected="a finite float32, or null where it could not be judged",
            found=text_of(reward, 80, repr),
            hints=('"reward": null   # where it could not be judged', *show_line(where)),
        )
