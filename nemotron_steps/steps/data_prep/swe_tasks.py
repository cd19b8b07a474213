"""data_prep/swe_tasks: software engineering tasks with hidden tests, in the NeMo-Gym row shape with SWE-bench's fields.

Out of pure-Python packages with their tests (packages.*), of small packages made here (made_up.*), both by faults that
the tests notice, each proven in the sandbox; or out of rows in the shape of SWE-bench and SWE-Gym (jsonl.*), which name
container images. kind=steps records the calls that solve mined tasks instead, for SWE 1.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Any, TypeVar

from nemotron_steps.artifacts.rows import prompt_row
from nemotron_steps.config.schema.data_prep import JsonlSource, SplitRows
from nemotron_steps.config.schema.swe_packages import MadeUpPackages
from nemotron_steps.config.schema.swe_tasks import PackageSource, SweTasksConfig
from nemotron_steps.environments.registry import create
from nemotron_steps.environments.swe.harness import task_prompt
from nemotron_steps.errors import DataError, show_line
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.data_prep.gym_tasks import SPLITS, Split
from nemotron_steps.steps.data_prep.row_files import Row, keep_usable, read_source, write_splits
from nemotron_steps.steps.data_prep.swe.made_up import failing_test, made_up_tasks
from nemotron_steps.steps.data_prep.swe.mining import AGENT, STEPS_AGENT, Miner, Task, issue_of, row_of
from nemotron_steps.steps.data_prep.swe.mutations import Mutation, mutations_of
from nemotron_steps.steps.data_prep.swe.packages import Package, packages_in
from nemotron_steps.steps.data_prep.swe.trajectories import recorded_steps

FILES: dict[Split, str] = {"train": "train-split.jsonl", "validation": "val-split.jsonl", "heldout": "heldout.jsonl"}

Item = TypeVar("Item")
Result = TypeVar("Result")


def run(context: StepContext[SweTasksConfig]) -> None:
    """Write the `prompts` output."""
    config = context.config
    if config.jsonl is not None:
        splits = own_rows(context, config.jsonl)
    elif config.packages is not None:
        splits = asyncio.run(mined_rows(context, config.packages))
    else:
        assert config.made_up is not None  # the config has exactly one source
        splits = asyncio.run(made_up_rows(context, config.made_up))
    counts = write_splits(context.outputs["prompts"].path, FILES, splits)
    context.tracker.summary({f"{split}_prompts": count for split, count in counts.items()})


async def made_up_rows(context: StepContext[SweTasksConfig], source: MadeUpPackages) -> dict[Split, list[Row]]:
    """Rows out of packages made here.

    Raises:
        DataError: there are not so many different ones.
    """
    config = context.config
    wanted: dict[Split, int] = {
        "train": config.rows.train or 0,
        "validation": config.rows.validation,
        "heldout": config.rows.heldout,
    }
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
    """Rows out of a folder's packages. Faults of one line stay in one split.

    Raises:
        DataError: there is no package, or too few faults that tests notice.
    """
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
            by_line.setdefault((task.mutation.path, task.mutation.line), []).extend(_rows(task, config))
        groups += by_line.values()
        context.tracker.progress("packages", number + 1, len(packages))
    await miner.close()
    context.tracker.summary({"packages_refused": len(refused), **miner.refused})
    groups.sort(key=lambda group: hashlib.sha256(json.dumps(group[0], sort_keys=True).encode()).digest())
    return split_groups(groups, config.rows)


def _rows(task: Task, config: SweTasksConfig) -> list[Row]:
    if config.kind == "steps":
        return recorded_steps(
            issue_of(task.mutation, task.fail_to_pass, task.error, config), task.mutation, STEPS_AGENT
        )
    return [row_of(task, config)]


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


def split_groups(groups: Sequence[list[Row]], sizes: SplitRows) -> dict[Split, list[Row]]:
    """Whole groups: validation and held-out rows first, the rest trains. A split may get a few rows more.

    Raises:
        DataError: too few rows are left for training.
    """
    splits: dict[Split, list[Row]] = {split: [] for split in SPLITS}
    wanted: dict[Split, int] = {"validation": sizes.validation, "heldout": sizes.heldout}
    for group in groups:
        split: Split = next((s for s, count in wanted.items() if len(splits[s]) < count), "train")
        splits[split] += group
    if len(splits["train"]) < (sizes.train or 1):
        raise DataError(
            "too few faults that tests notice for the splits",
            where="rows",
            expected=f"{sizes.train or 1} for training + {sizes.validation} + {sizes.heldout}",
            found=f"{sum(map(len, splits.values()))} tasks",
            hints=("rows.validation=0 rows.heldout=0", "packages.max_tasks=500"),
        )
    splits["train"] = splits["train"][: sizes.train]
    return splits


def own_rows(context: StepContext[SweTasksConfig], source: JsonlSource) -> dict[Split, list[Row]]:
    """The user's rows in the shape of SWE-bench: every field kept, a prompt and an agent added where they have none."""
    config = context.config
    environment = create(AGENT)

    def check(where: str, row: Row) -> None:
        complete(row)
        problem = prompt_row(row)
        if problem is not None:
            raise DataError(problem, where=f"{where} field problem_statement", hints=show_line(where))
        environment.check_row(row, where)

    rows = keep_usable(
        read_source(source.path, config.sample),
        check,
        max_refused_share=config.max_refused_share,
        tracker=context.tracker,
    )
    kept = config.rows.validation + config.rows.heldout
    room = len(rows) - kept
    wanted = config.rows.train or max(1, room)
    if room < wanted:
        raise DataError(
            f"{len(rows)} rows are too few for the splits",
            where="rows",
            expected=f"{wanted} for training + {config.rows.validation} + {config.rows.heldout}",
            found=str(len(rows)),
            hints=("rows.validation=0 rows.heldout=0",),
        )
    # As published blends are split: the last rows are kept apart.
    end = len(rows) - config.rows.heldout
    return {"train": rows[:wanted], "validation": rows[room:end], "heldout": rows[end:]}


def complete(row: Row) -> None:
    """Give a row of SWE-bench the fields that a prompt has. Fields within `instance_dict` come to the top."""
    params: dict[str, Any] = row.setdefault("responses_create_params", {})
    told = params.get("metadata")
    metadata: dict[str, Any] = told if isinstance(told, dict) else {}
    nested = row.get("instance_dict") or metadata.get("instance_dict") or {}
    if isinstance(nested, str):
        nested = json.loads(nested)
    for key, value in {**metadata, **nested}.items():
        if key != "instance_dict":
            row.setdefault(key, value)
    if not params.get("input") and row.get("problem_statement"):
        params["input"] = [{"role": "user", "content": task_prompt(str(row["problem_statement"]))}]
    row.setdefault("agent_ref", {"type": "responses_api_agents", "name": AGENT})
