"""data_prep/swe_tasks: software engineering tasks with hidden tests, in the NeMo-Gym row shape with SWE-bench's fields:
of packages with tests, of small ones made here, or of rows of SWE-bench. kind=steps records the calls that solve
tasks instead, for SWE 1."""

import asyncio
import hashlib
import json
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Any, TypeVar

from nemotron_steps.config.schema.data_prep import MadeUpPackages
from nemotron_steps.config.schema.swe_tasks import PackageSource, SweTasksConfig
from nemotron_steps.environments.registry import create
from nemotron_steps.environments.swe.harness import task_prompt
from nemotron_steps.errors import DataError
from nemotron_steps.rows.layouts import read_request
from nemotron_steps.rows.lines import Row
from nemotron_steps.rows.messages import wrong
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.data_prep.blends.prepare import jsonl_source, prepare
from nemotron_steps.steps.data_prep.blends.shards import RowFunction
from nemotron_steps.steps.data_prep.blends.splits import (
    PROMPT_FILES,
    SPLITS,
    Split,
    split_groups,
    wanted_rows,
    write_splits,
)
from nemotron_steps.steps.data_prep.swe.demonstrations import recorded_steps
from nemotron_steps.steps.data_prep.swe.mining import AGENT, STEPS_AGENT, Miner, issue_of, row_of
from nemotron_steps.steps.data_prep.swe.packages import (
    Mutation,
    Package,
    failing_test,
    made_up_tasks,
    mutations_of,
    packages_in,
)

Item = TypeVar("Item")
Result = TypeVar("Result")


def run(context: StepContext[SweTasksConfig]) -> None:
    """Write the `prompts` output."""
    config = context.config
    folder = context.outputs["prompts"].path
    if config.jsonl is not None:
        counts = prepare(context, [jsonl_source(config.jsonl)], swe_rows, folder, PROMPT_FILES)
    elif config.packages is not None:
        counts = write_splits(folder, PROMPT_FILES, asyncio.run(mined_rows(context, config.packages)))
    else:
        assert config.made_up is not None  # the config has exactly one source
        counts = write_splits(folder, PROMPT_FILES, asyncio.run(made_up_rows(context, config.made_up)))
    context.tracker.summary({f"{split}_prompts": count for split, count in counts.items()})


async def made_up_rows(context: StepContext[SweTasksConfig], source: MadeUpPackages) -> dict[Split, list[Row]]:
    """Rows out of packages made here."""
    config, wanted = context.config, wanted_rows(context.config.rows)
    rows: dict[Split, list[Row]] = {split: [] for split in SPLITS}
    miner = Miner(config)
    tasks = made_up_tasks(source, str(source.seed))

    async def make(item: tuple[Split, Package, Mutation, list[Mutation]]) -> list[Row]:
        _, package, mutation, _ = item
        if config.kind == "steps":
            issue = issue_of(mutation, (failing_test(package, mutation),), "", config)
            return recorded_steps(issue, mutation, STEPS_AGENT)
        task = await miner.task(package, mutation, await miner.passing(package))
        return [row_of(task, config)] if task is not None else []

    while any(len(rows[split]) < count for split, count in wanted.items()):
        begun = list(islice((t for t in tasks if len(rows[t[0]]) < wanted[t[0]]), 8 * (os.cpu_count() or 1)))
        if not begun:
            split = next(split for split in SPLITS if len(rows[split]) < wanted[split])
            raise DataError(
                f"there are too few different packages for the {split} split",
                where=f"rows.{split}",
                expected=str(wanted[split]),
                found=str(len(rows[split])),
                hints=(f"rows.{split}={len(rows[split])}", "made_up.functions=2"),
            )
        for (split, *_), made in zip(begun, await asyncio.gather(*map(make, begun)), strict=True):
            rows[split] += made[: wanted[split] - len(rows[split])]
        context.tracker.progress("tasks", sum(map(len, rows.values())), sum(wanted.values()))
    await miner.close()
    context.tracker.summary(dict(miner.refused))
    return rows


async def mined_rows(context: StepContext[SweTasksConfig], source: PackageSource) -> dict[Split, list[Row]]:
    """Rows out of a folder's packages. Faults of one line stay in one split."""
    config = context.config
    packages, refused = packages_in(source.path, source.test_command, source.max_bytes)
    for name, why in refused.items():
        context.tracker.event("package_refused", package=name, reason=why)
    miner = Miner(config)
    groups: list[list[Row]] = []
    for number, package in enumerate(packages):
        faults = [m for path in package.modules for m in mutations_of(path, package.files[path], source.mutations)]
        random.Random(f"{source.seed}:{package.name}").shuffle(faults)
        passing = await miner.passing(package)
        if not passing:
            context.tracker.event("package_refused", package=package.name, reason="no test passes as it is")
            continue
        tasks = await _first(faults, lambda m, p=package, t=passing: miner.task(p, m, t), source.max_tasks)  # type: ignore[misc]
        by_line: dict[tuple[str, int], list[Row]] = {}
        for task in tasks:
            made = [row_of(task, config)]
            if config.kind == "steps":
                issue = issue_of(task.mutation, task.fail_to_pass, task.error, config)
                made = recorded_steps(issue, task.mutation, STEPS_AGENT)
            by_line.setdefault((task.mutation.path, task.mutation.line), []).extend(made)
        groups += by_line.values()
        context.tracker.progress("packages", number + 1, len(packages))
    await miner.close()
    context.tracker.summary({"packages_refused": len(refused), **miner.refused})
    groups.sort(key=lambda group: hashlib.sha256(json.dumps(group[0], sort_keys=True).encode()).digest())
    return split_groups(groups, config.rows, of="tasks", hints=("packages.max_tasks=500",))


async def _first(
    items: Sequence[Item], attempt: Callable[[Item], Awaitable[Result | None]], count: int
) -> list[Result]:
    """The first results of attempts that have one, several attempts at once, in the items' order."""
    found: list[Result] = []
    step = 2 * (os.cpu_count() or 1)
    for begin in range(0, len(items), step):
        made = await asyncio.gather(*map(attempt, items[begin : begin + step]))
        found += [result for result in made if result is not None]
        if len(found) >= count:
            break
    return found[:count]


def swe_rows() -> RowFunction:
    """Of rows of SWE-bench and SWE-Gym: prompts of `swe_agent`, every field kept, what a prompt lacks added."""
    environment = create(AGENT)

    def become(where: str, row: Row) -> list[Row]:
        completed = complete(row, where)
        read_request(completed, where)
        environment.check_row(completed, where)
        return [completed]

    return become


def complete(row: Row, where: str) -> Row:
    """A row of SWE-bench with the fields that a prompt has. Fields within `instance_dict` come to the top."""
    params = _object(row.get("responses_create_params"), "responses_create_params", where)
    metadata = _object(params.get("metadata"), "responses_create_params.metadata", where)
    told = row.get("instance_dict") or metadata.get("instance_dict")
    nested = {**metadata, **_object(told, "instance_dict", where)}
    nested.pop("instance_dict", None)
    completed = {**nested, **row}
    if not params.get("input") and completed.get("problem_statement"):
        prompt = task_prompt(str(completed["problem_statement"]))
        params = {**params, "input": [{"role": "user", "content": prompt}]}
    agent = {"type": "responses_api_agents", "name": AGENT}
    return {"agent_ref": agent, **completed, "responses_create_params": params}


def _object(value: Any, field: str, where: str) -> dict[str, Any]:
    if not value:
        return {}
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise wrong("must be an object, or one as JSON text", where, field, found=value)
    return found
