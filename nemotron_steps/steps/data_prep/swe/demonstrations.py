"""Chats in which an agent solves tasks of made-up packages: what supervised training learns the harness from."""

from __future__ import annotations

import random
from collections.abc import Mapping

from nemotron_steps.config.schema.data_prep import SweDemonstrations
from nemotron_steps.errors import DataError
from nemotron_steps.rows.lines import Row
from nemotron_steps.steps.data_prep.split_files import SPLITS, Split
from nemotron_steps.steps.data_prep.swe.made_up import failing_test, made_up_tasks
from nemotron_steps.steps.data_prep.swe.mining import issue_text
from nemotron_steps.steps.data_prep.swe.trajectories import demonstration


def swe_chats(source: SweDemonstrations, wanted: Mapping[Split, int]) -> dict[Split, list[Row]]:
    """Demonstrations of so many chats a split. Tasks are not proven, and worded as `tell_error=false` words them.

    Raises:
        DataError: there are not so many different tasks.
    """
    chats: dict[Split, list[Row]] = {split: [] for split in SPLITS}
    for split, package, fault, faults in made_up_tasks(source.made_up, "demonstrations"):
        if all(len(chats[name]) >= count for name, count in wanted.items()):
            break
        for number in range(min(source.chats_per_task, wanted[split] - len(chats[split]))):
            issue = issue_text((failing_test(package, fault),), file=fault.path)
            rng = random.Random(f"{source.made_up.seed}:{package.digest}:{number}")
            chats[split].append(demonstration(issue, fault, faults, source.slip_rate, rng))
    short = next((split for split, count in wanted.items() if len(chats[split]) < count), None)
    if short is not None:
        raise DataError(
            f"there are too few different tasks for the {short} split",
            where=f"rows.{short}",
            expected=f"{wanted[short]} demonstrations",
            found=str(len(chats[short])),
            hints=(f"swe.chats_per_task={-(-wanted[short] // max(1, len(chats[short])))}",),
        )
    return chats
