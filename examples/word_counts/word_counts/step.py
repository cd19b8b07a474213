"""data_prep/word_counts: count the words of a JSON Lines data set."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveInt

from nemotron_steps.errors import DataError
from nemotron_steps.runs.context import StepContext
from word_counts.counts import FILE

_WORD = re.compile(r"[^\W\d_]+")


class WordCountsConfig(BaseModel):
    """The step's config. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at_least: PositiveInt = 1
    """Words that occur less often are left out."""
    fold_case: bool = True
    """Whether capital letters do not matter."""


def run(context: StepContext[WordCountsConfig]) -> None:
    """Write the `counts` of every text in `rows`."""
    config = context.config
    source = context.inputs["rows"].require_jsonl("train")
    counts: Counter[str] = Counter()
    with source.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                for text in texts(json.loads(line)):
                    counts.update(_WORD.findall(text.casefold() if config.fold_case else text))
    kept = {word: counts[word] for word in sorted(counts) if counts[word] >= config.at_least}
    if not kept:
        raise DataError("no word occurs often enough", where=str(source), hints=("at_least=1",))
    with (context.outputs["counts"].path / FILE).open("w", encoding="utf-8") as file:
        json.dump(kept, file, ensure_ascii=False, indent=0)
    context.tracker.summary({"words": sum(kept.values()), "different_words": len(kept)})


def texts(value: Any) -> Iterator[str]:
    """Every text in a row, at any depth; keys are none."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner)
