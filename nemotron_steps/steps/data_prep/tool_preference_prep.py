"""data_prep/tool_preference_prep: preference pairs against tool hallucination, out of single-step tool-use rows.

Chosen is the row's expected action: its call or calls, or a message where no tool fits. Rejected is a hallucinated one
(hallucinations.py). Rows of one conversation, which repeat each other's turns, stay in one split.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from nemotron_steps.config.schema.data_prep import SplitRows
from nemotron_steps.config.schema.tool_preferences import ToolPreferencePrepConfig
from nemotron_steps.engine.rollouts.conversation import messages_of
from nemotron_steps.environments.responses import content_text
from nemotron_steps.environments.tools.single_step_tool_use import SingleStepToolUse, SingleStepToolUseConfig
from nemotron_steps.errors import DataError, show_line
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.data_prep.gym_tasks import SPLITS, Split
from nemotron_steps.steps.data_prep.hallucinations import Calls, HallucinationMaker, calls_of, tools_of
from nemotron_steps.steps.data_prep.row_files import Row, keep_usable, read_source, write_splits
from nemotron_steps.steps.data_prep.tool_tasks import tool_rows

FILES: dict[Split, str] = {"train": "train.jsonl", "validation": "validation.jsonl", "heldout": "heldout.jsonl"}


def run(context: StepContext[ToolPreferencePrepConfig]) -> None:
    """Write the `preferences` output."""
    config = context.config
    splits = split_conversations(read_rows(context), config.rows, config.seed)
    # Names and values to borrow come from training rows alone: no validation row shows in another split.
    maker = HallucinationMaker(splits["train"])
    pairs: dict[Split, list[Row]] = {}
    summary: dict[str, Any] = {}
    kinds: Counter[str] = Counter()
    for split in SPLITS:
        pairs[split] = [pair for row in splits[split] for pair in pairs_of(row, maker, config)]
        kinds.update(pair["hallucination"] for pair in pairs[split])
        if splits[split]:
            summary[f"{split}_rows"] = len(splits[split])
            summary[f"{split}_pairs"] = len(pairs[split])
    if not pairs["train"]:
        raise DataError(
            "no row gives a training pair",
            where="hallucinations",
            expected="rows with an expected call, or needless_call for rows with an expected message",
            found=", ".join(config.hallucinations),
            hints=("hallucinations=[unknown_tool,unknown_argument,missing_argument,made_up_value,needless_call]",),
        )
    write_splits(context.outputs["preferences"].path, FILES, pairs)
    chosen_messages = sum(not pair["chosen"].get("tool_calls") for split in SPLITS for pair in pairs[split])
    context.tracker.summary(
        {
            **summary,
            **{f"pairs_{kind}": kinds[kind] for kind in config.hallucinations},
            "chosen_messages": chosen_messages,
            "chosen_calls": kinds.total() - chosen_messages,
        }
    )


def read_rows(context: StepContext[ToolPreferencePrepConfig]) -> list[Row]:
    """The source's usable rows."""
    config = context.config
    if config.tool_tasks is not None:
        assert config.rows.train is not None  # the config requires it
        return tool_rows(
            config.tool_tasks, config.rows.train + config.rows.validation + config.rows.heldout, config.seed
        )
    assert config.jsonl is not None  # the config has exactly one source
    environment = SingleStepToolUse(SingleStepToolUseConfig(), {})

    def check(where: str, row: Row) -> None:
        environment.check_row(row, where)
        messages_of(row, where)
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
            raise DataError(
                "the expected message is empty", where=f"{where} field expected_action.content", hints=show_line(where)
            )

    return keep_usable(
        read_source(config.jsonl.path, config.sample),
        check,
        max_refused_share=config.max_refused_share,
        tracker=context.tracker,
    )


def split_conversations(rows: Sequence[Row], sizes: SplitRows, seed: int) -> dict[Split, list[Row]]:
    """Whole conversations in an order drawn from the seed: validation and held-out rows first, the rest trains.

    A split may get a few rows more than asked for, so that its last conversation stays whole.

    Raises:
        DataError: too few rows are left for training.
    """
    conversations: dict[str, list[Row]] = {}
    for row in rows:
        conversations.setdefault(_conversation(row), []).append(row)
    order = sorted(conversations, key=lambda key: hashlib.sha256(f"{seed}:{key}".encode()).digest())
    splits: dict[Split, list[Row]] = {split: [] for split in SPLITS}
    wanted: dict[Split, int] = {"validation": sizes.validation, "heldout": sizes.heldout}
    for key in order:
        split: Split = next((s for s, count in wanted.items() if len(splits[s]) < count), "train")
        splits[split] += conversations[key]
    if len(splits["train"]) < (sizes.train or 1):
        raise DataError(
            f"{len(rows)} rows of {len(conversations)} conversations are too few for the splits",
            where="rows",
            expected=f"{sizes.train or 1} for training + {sizes.validation} + {sizes.heldout}",
            found=f"{len(splits['train'])} left for training",
            hints=("rows.validation=0 rows.heldout=0",),
        )
    if sizes.train is not None:
        splits["train"] = splits["train"][: sizes.train]
    return splits


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
            "prompt": messages_of(row),
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


def _conversation(row: Row) -> str:
    """What the rows of one conversation share: everything up to the first user message."""
    opening = []
    for message in messages_of(row):
        opening.append([message["role"], message["content"]])
        if message["role"] == "user":
            break
    return json.dumps(opening)
