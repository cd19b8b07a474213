"""data_prep/tool_preference_prep: preference pairs against tool hallucination, out of single-step tool-use rows.

Chosen is the row's expected action: its call or calls, or a message where no tool fits. Rejected is a hallucinated one
(hallucinations.py). Rows of one conversation, which repeat each other's turns, stay in one split.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemotron_steps.config.schema.data_prep import SplitRows
from nemotron_steps.config.schema.tool_preferences import ToolPreferencePrepConfig
from nemotron_steps.engine.rollouts.data import PromptRows
from nemotron_steps.environments.responses import content_text
from nemotron_steps.environments.tools.single_step_tool_use import SingleStepToolUse, SingleStepToolUseConfig
from nemotron_steps.errors import DataError, show_line
from nemotron_steps.rows.layouts import read_request
from nemotron_steps.rows.lines import Row
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.data_prep.blends.prepare import REFUSALS, jsonl_source, prepare
from nemotron_steps.steps.data_prep.blends.row_work import RowFunction
from nemotron_steps.steps.data_prep.hallucinations import Calls, HallucinationMaker, calls_of, tools_of
from nemotron_steps.steps.data_prep.split_files import FILES, SPLITS, Split, split_groups, write_splits
from nemotron_steps.steps.data_prep.tool_tasks import tool_rows


def run(context: StepContext[ToolPreferencePrepConfig]) -> None:
    """Write the `preferences` output. In memory are places of rows, one row, names of tools and
    arguments, and of each argument as many values as hallucinations.ROOM holds."""
    config, folder = context.config, context.outputs["preferences"].path
    rows = PromptRows(usable_rows(context))
    splits = split_conversations(rows, config.rows, config.seed)
    summary: dict[str, Any] = {}
    kinds: Counter[str] = Counter()
    chosen_messages = 0
    # Names and values to borrow come from training rows alone: no validation row shows in another split.
    maker = HallucinationMaker(rows[place].row for place in splits["train"])
    for split in SPLITS:
        pairs = (pair for place in splits[split] for pair in pairs_of(rows[place].row, maker, config))
        written = 0
        with (folder / FILES[split]).open("w", encoding="utf-8") as file:
            for pair in pairs:
                file.write(json.dumps(pair, ensure_ascii=False) + "\n")
                written += 1
                kinds[pair["hallucination"]] += 1
                chosen_messages += not pair["chosen"].get("tool_calls")
        if not written:
            (folder / FILES[split]).unlink()
        if splits[split]:
            summary[f"{split}_rows"] = len(splits[split])
            summary[f"{split}_pairs"] = written
    if not summary["train_pairs"]:
        raise DataError(
            "no row gives a training pair",
            where="hallucinations",
            expected="rows with an expected call, or needless_call for rows with an expected message",
            found=", ".join(config.hallucinations),
            hints=("hallucinations=[unknown_tool,unknown_argument,missing_argument,made_up_value,needless_call]",),
        )
    context.tracker.summary(
        {
            **summary,
            **{f"pairs_{kind}": kinds[kind] for kind in config.hallucinations},
            "chosen_messages": chosen_messages,
            "chosen_calls": kinds.total() - chosen_messages,
        }
    )


def usable_rows(context: StepContext[ToolPreferencePrepConfig]) -> Path:
    """A file in the work folder with the source's usable rows. Refused ones are named beside the pairs."""
    config, folder = context.config, context.work / "usable"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / FILES["train"]
    if config.tool_tasks is not None:
        assert config.rows.train is not None  # the config requires it
        count = config.rows.train + config.rows.validation + config.rows.heldout
        made = tool_rows(config.tool_tasks, count, config.seed)
        write_splits(folder, FILES, {"train": made, "validation": [], "heldout": []})
        return file
    assert config.jsonl is not None  # the config has exactly one source
    prepare(
        [jsonl_source(config.jsonl)],
        ToolRows(),
        config.model_copy(update={"rows": SplitRows(validation=0)}),
        folder=folder,
        files=FILES,
        staging=context.work / "shards",
        tracker=context.tracker,
    )
    if (folder / REFUSALS).is_file():
        shutil.copyfile(folder / REFUSALS, context.outputs["preferences"].path / REFUSALS)
    return file


@dataclass(frozen=True)
class ToolRows:
    """See RowWork: single-step tool-use rows, checked and left as they are."""

    def function(self) -> RowFunction:
        """See RowWork."""
        environment = SingleStepToolUse(SingleStepToolUseConfig(), {})

        def become(where: str, row: Row) -> None:
            environment.check_row(row, where)
            read_request(row, where)
            offered = [tool["name"] for tool in tools_of(row)]
            for name, _ in calls_of(row):
                if name not in offered:
                    raise DataError(
                        "the expected call names a tool that the row does not offer",
                        where=f"{where} field expected_action.name",
                        expected=", ".join(offered) or "a tool in responses_create_params.tools",
                        found=name,
                        hints=show_line(where),
                    )
            if not calls_of(row) and not message_text(row):
                field = f"{where} field expected_action.content"
                raise DataError("the expected message is empty", where=field, hints=show_line(where))

        return become


def split_conversations(rows: PromptRows, sizes: SplitRows, seed: int) -> dict[Split, list[int]]:
    """Places of the rows of each split: whole conversations in an order drawn from the seed.

    Raises:
        DataError: too few rows are left for training.
    """
    conversations: dict[bytes, list[int]] = {}
    for each in rows:
        conversations.setdefault(_conversation(each.row, seed), []).append(each.index)
    in_order = (conversations[key] for key in sorted(conversations))
    return split_groups(in_order, sizes, of=f"rows of {len(conversations)} conversations")


def pairs_of(row: Row, maker: HallucinationMaker, config: ToolPreferencePrepConfig) -> Iterable[Row]:
    """Up to `pairs_per_row` pairs of one row, each with another hallucination."""
    request = row["responses_create_params"]
    rng = random.Random(f"{config.seed}:{json.dumps([request['input'], row['expected_action']], sort_keys=True)}")
    expected = calls_of(row)
    kinds = list(config.hallucinations)
    rng.shuffle(kinds)
    made = 0
    for kind in kinds:
        if made == config.pairs_per_row:
            return
        rejected = maker.make(kind, row, rng)
        if rejected is None:
            continue
        made += 1
        yield {
            "prompt": read_request(row, "row").messages,
            "tools": tools_of(row),
            "chosen": call_message(expected) if expected else {"role": "assistant", "content": message_text(row)},
            "rejected": call_message(rejected),
            "hallucination": kind,
        }


def call_message(calls: Calls) -> Row:
    """An assistant message that makes calls."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls
        ],
    }


def message_text(row: Row) -> str:
    """The expected message."""
    return content_text(row["expected_action"].get("content")).strip()


def _conversation(row: Row, seed: int) -> bytes:
    """A digest, drawn with the seed, of what the rows of one conversation share: all up to the first user message."""
    opening = []
    for message in read_request(row, "row").messages:
        opening.append([message["role"], message["content"]])
        if message["role"] == "user":
            break
    return hashlib.sha256(f"{seed}:{json.dumps(opening)}".encode()).digest()
