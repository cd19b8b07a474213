"""Chats in which an agent that knows the fault solves tasks of made-up packages: what supervised training learns the
harness from. Nothing runs: what the tools answer follows from the files alone."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from nemotron_steps.config.schema.data_prep import SweDemonstrations
from nemotron_steps.environments.swe.harness import TOOLS, replaced, task_prompt, view_text
from nemotron_steps.errors import DataError
from nemotron_steps.rows.lines import Row
from nemotron_steps.steps.data_prep.blends.splits import SPLITS, Split
from nemotron_steps.steps.data_prep.swe.mining import issue_text
from nemotron_steps.steps.data_prep.swe.packages import Mutation, failing_test, made_up_tasks

SAID = "Done."
SHORT = 80
"""Lines of a file that is looked at as a whole; of others, AROUND lines on each side of the fault."""
AROUND = 20

Step = tuple[str, dict[str, Any], str]
"""Tool, arguments, what it answers."""


def solving_steps(mutation: Mutation, replacement: str | None = None) -> list[Step]:
    """The calls that put the line right."""
    lines = mutation.source.split("\n")
    seen: dict[str, Any] = {"path": mutation.path}
    if len(lines) > SHORT:
        seen["view_range"] = [max(1, mutation.line - AROUND), min(len(lines), mutation.line + AROUND)]
    old, new = _unique(lines, mutation.line, mutation.correct if replacement is None else replacement)
    answer = replaced(mutation.path, mutation.source, old, new)[1]
    return [
        ("view", seen, view_text(mutation.path, mutation.source, seen.get("view_range"))),
        ("edit", {"path": mutation.path, "old_str": old, "new_str": new}, answer),
    ]


def demonstration(
    issue: str, mutation: Mutation, others: Sequence[Mutation], slip_rate: float, rng: random.Random
) -> Row:
    """A chat that solves a task; a share of them slips: the line becomes another wrong one, or is left as it is."""
    steps = solving_steps(mutation)
    if rng.random() < slip_rate:
        wrong = sorted(
            {m.broken for m in others if (m.path, m.line) == (mutation.path, mutation.line)} - {mutation.broken}
        )
        steps = solving_steps(mutation, rng.choice(wrong)) if wrong and rng.random() < 0.8 else steps[:1]
    messages: list[Row] = [{"role": "user", "content": task_prompt(issue)}]
    for name, arguments, answer in steps:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": answer},
        ]
    return {"messages": [*messages, {"role": "assistant", "content": SAID}], "tools": [dict(tool) for tool in TOOLS]}


def recorded_steps(issue: str, mutation: Mutation, agent: str) -> list[Row]:
    """One prompt for each call of a solution, with the calls before it: rows of `swe_pivot`."""
    items: list[Row] = [{"role": "user", "content": task_prompt(issue)}]
    rows = []
    for number, (name, arguments, answer) in enumerate(solving_steps(mutation)):
        call = {"type": "function_call", "name": name, "arguments": json.dumps(arguments), "call_id": f"call_{number}"}
        rows.append(
            {
                "responses_create_params": {"input": list(items), "tools": [dict(tool) for tool in TOOLS]},
                "expected_action": {key: call[key] for key in ("type", "name", "arguments")},
                "agent_ref": {"type": "responses_api_agents", "name": agent},
            }
        )
        items += [call, {"type": "function_call_output", "call_id": call["call_id"], "output": answer}]
    return rows


def _unique(lines: Sequence[str], number: int, right: str) -> tuple[str, str]:
    """The least text with the line that occurs once, and the same with the line put right."""
    source, line = "\n".join(lines), lines[number - 1]
    bare = line.strip()
    if bare and source.count(bare) == 1:
        return bare, right.strip()
    for begin in range(number - 1, -1, -1):
        old = "\n".join(lines[begin:number])
        if source.count(old) == 1:
            return old, "\n".join([*lines[begin : number - 1], right])
    old = source
    return old, "\n".join([*lines[: number - 1], right, *lines[number:]])


def swe_chats(source: SweDemonstrations, wanted: Mapping[Split, int]) -> dict[Split, list[Row]]:
    """Demonstrations of so many chats a split. Tasks are not proven, and worded as `tell_error=false` words them."""
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
