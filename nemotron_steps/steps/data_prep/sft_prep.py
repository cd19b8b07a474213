"""data_prep/sft_prep: chats for supervised training, split so that no question is in two.

Chats are answers to imitate, or comparisons for a generative reward model; optionally a tokenizer trained on them is
written beside them (tokenizer/), for models that start from nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from nemotron_steps.artifacts.checkpoints import tokenizer_digest
from nemotron_steps.artifacts.rows import chat_row
from nemotron_steps.config.schema.data_prep import (
    AnswerStyle,
    DemonstrationConfig,
    JsonlSource,
    ReasoningGymSource,
    SftPrepConfig,
    SplitRows,
    TokenizerTrainingConfig,
)
from nemotron_steps.environments.responses import content_text
from nemotron_steps.errors import DataError, show_line
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.data_prep.answers import slip, write_answer
from nemotron_steps.steps.data_prep.comparisons import ComparisonMaker
from nemotron_steps.steps.data_prep.gym_tasks import SPLITS, Question, Split, draw_questions
from nemotron_steps.steps.data_prep.row_files import (
    Row,
    keep_usable,
    read_source,
    split_by_position,
    write_splits,
)

FILES: dict[Split, str] = {"train": "train.jsonl", "validation": "validation.jsonl", "heldout": "heldout.jsonl"}
TOKENIZER_FOLDER = "tokenizer"


def run(context: StepContext[SftPrepConfig]) -> None:
    """Write the `chats` output."""
    config = context.config
    if config.reasoning_gym is not None:
        splits = gym_chats(config, config.reasoning_gym)
    else:
        assert config.jsonl is not None  # the config has exactly one source
        splits = own_chats(context, config.jsonl)
    slot = context.outputs["chats"]
    counts = write_splits(slot.path, FILES, splits)
    summary: dict[str, int] = {f"{split}_chats": count for split, count in counts.items()}
    if config.tokenizer is not None:
        folder = slot.path / TOKENIZER_FOLDER
        summary["vocabulary"] = write_tokenizer(splits["train"], config.tokenizer, folder)
        slot.attributes["tokenizer"] = tokenizer_digest(folder)
    context.tracker.summary(summary)


def gym_chats(config: SftPrepConfig, source: ReasoningGymSource) -> dict[Split, list[Row]]:
    """Chats about reasoning-gym questions."""
    repeats = config.chats_per_question
    questions = draw_questions(source, _questions_for(config.rows, repeats))
    make: Callable[[Question, random.Random], Row]
    if config.kind == "comparisons":
        make = ComparisonMaker(config.comparisons, questions["train"]).chat
    else:

        def make(question: Question, rng: random.Random) -> Row:
            return demonstration(question, config.demonstrations, rng)

    wanted = {"train": config.rows.train or 0, "validation": config.rows.validation, "heldout": config.rows.heldout}
    chats: dict[Split, list[Row]] = {}
    for split in SPLITS:
        numbered = list(enumerate(questions[split] * repeats))[: wanted[split]]
        chats[split] = [make(question, random.Random(f"{source.seed}:{split}:{i}")) for i, question in numbered]
    return chats


def _questions_for(rows: SplitRows, repeats: int) -> SplitRows:
    """Questions needed for so many chats, rounded up."""
    return SplitRows(
        train=-(-(rows.train or 0) // repeats),
        validation=-(-rows.validation // repeats),
        heldout=-(-rows.heldout // repeats),
    )


def demonstration(question: Question, config: DemonstrationConfig, rng: random.Random) -> Row:
    """One question and an answer to imitate, not always a right one."""
    answer = slip(question.answer, rng) if rng.random() < config.slip_rate else question.answer
    styles = config.styles
    if question.asked.reply is not None and rng.random() < config.follow_rate:
        styles = (AnswerStyle(template=question.asked.reply),)
    return {
        "messages": [
            {"role": "user", "content": question.text},
            {"role": "assistant", "content": write_answer(answer, styles, rng)},
        ]
    }


def own_chats(context: StepContext[SftPrepConfig], source: JsonlSource) -> dict[Split, list[Row]]:
    """The user's own chats, every field kept."""

    def check(where: str, row: Row) -> None:
        problem = chat_row(row)
        if problem is not None:
            fields = "fields " + (", ".join(sorted(row)[:12]) or "none")
            raise DataError(problem, where=f"{where} field messages", found=fields, hints=show_line(where))

    config = context.config
    rows = keep_usable(
        read_source(source.path, config.sample),
        check,
        max_refused_share=config.max_refused_share,
        tracker=context.tracker,
    )
    return split_by_position(rows, config.rows)


def write_tokenizer(rows: Sequence[Row], config: TokenizerTrainingConfig, folder: Path) -> int:
    """Train a tokenizer on the first texts of `rows`, write it, and return the size of its vocabulary."""
    from nemotron_steps.models.tokenizers import save_tokenizer, train_tokenizer

    texts = list(islice((text for row in rows for text in _texts(row)), config.texts))
    tokenizer = train_tokenizer(texts, min_share=config.min_share, max_phrases=config.max_phrases)
    save_tokenizer(tokenizer, folder)
    return len(tokenizer)


def _texts(row: Row) -> Iterator[str]:
    """The messages of a chat. Of a comparison also the question by itself: an answer may repeat it, and must not
    then cost the judge a token a letter."""
    for message in row["messages"]:
        yield content_text(message.get("content"))
    if isinstance(row.get("question"), str):
        yield row["question"]
