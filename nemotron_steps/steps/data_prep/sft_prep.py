"""data_prep/sft_prep: chats for supervised training, split so that no question is in two.

Chats are answers to imitate, or comparisons for a generative reward model; optionally a tokenizer trained on them is
written beside them (tokenizer/), for models that start from nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from nemotron_steps.artifacts.checkpoints import tokenizer_digest
from nemotron_steps.config.schema.data_prep import (
    AnswerStyle,
    DemonstrationConfig,
    ReasoningGymSource,
    SftPrepConfig,
    SplitRows,
    SweDemonstrations,
    TokenizerTrainingConfig,
)
from nemotron_steps.environments.responses import content_text
from nemotron_steps.rows.lines import Row, read_rows
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.data_prep.answers import slip, write_answer
from nemotron_steps.steps.data_prep.blends.prepare import prepare, sources_of
from nemotron_steps.steps.data_prep.chat_work import ChatWork
from nemotron_steps.steps.data_prep.comparisons import ComparisonMaker
from nemotron_steps.steps.data_prep.gym_tasks import Question, draw_questions
from nemotron_steps.steps.data_prep.judged_pairs import ComparisonWork
from nemotron_steps.steps.data_prep.split_files import FILES, SPLITS, TOKENIZER_FOLDER, Split, write_splits
from nemotron_steps.steps.data_prep.swe.demonstrations import swe_chats


def run(context: StepContext[SftPrepConfig]) -> None:
    """Write the `chats` output."""
    config = context.config
    slot = context.outputs["chats"]
    if config.swe is not None:
        counts = write_splits(slot.path, FILES, with_swe_chats(config, config.swe))
    elif config.reasoning_gym is not None:
        counts = write_splits(slot.path, FILES, gym_chats(config, config.reasoning_gym))
    else:
        counts = prepare_own(context)
    summary: dict[str, int] = {f"{split}_chats": count for split, count in counts.items()}
    if config.tokenizer is not None:
        folder = slot.path / TOKENIZER_FOLDER
        rows = (row for _, row in read_rows(slot.path / FILES["train"]))
        summary["vocabulary"] = write_tokenizer(rows, config.tokenizer, folder)
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


def with_swe_chats(config: SftPrepConfig, source: SweDemonstrations) -> dict[Split, list[Row]]:
    """Demonstrations of an agent's harness, mixed with those of reasoning-gym's questions if there are some."""
    whole = {"train": config.rows.train or 0, "validation": config.rows.validation, "heldout": config.rows.heldout}
    wanted: dict[Split, int] = {split: round(source.share * whole[split]) for split in SPLITS}
    chats = swe_chats(source, wanted)
    if config.reasoning_gym is not None:
        rest = {split: whole[split] - wanted[split] for split in SPLITS}
        others = gym_chats(config.model_copy(update={"rows": SplitRows(**rest)}), config.reasoning_gym)
        for split in SPLITS:
            chats[split] += others[split]
    for split in SPLITS:
        random.Random(f"{source.made_up.seed}:{split}").shuffle(chats[split])
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


def prepare_own(context: StepContext[SftPrepConfig]) -> dict[str, int]:
    """The user's own chats, every field kept, or comparisons of the user's own pairs. Returns split → rows."""
    config = context.config
    chats = ChatWork(config.reasoning, config.low_effort_instruction)
    return prepare(
        sources_of(config),
        ComparisonWork(config.comparisons) if config.kind == "comparisons" else chats,
        config,
        folder=context.outputs["chats"].path,
        files=FILES,
        staging=context.work / "shards",
        tracker=context.tracker,
    )


def write_tokenizer(rows: Iterable[Row], config: TokenizerTrainingConfig, folder: Path) -> int:
    """Train a tokenizer on the first texts of `rows`, write it, and return the size of its vocabulary."""
    from nemotron_steps.models.tokenizers import save_tokenizer, train_tokenizer

    texts = list(islice((text for row in rows for text in _texts(row)), config.texts))
    tokenizer = train_tokenizer(texts, min_share=config.min_share, max_phrases=config.max_phrases)
    save_tokenizer(tokenizer, folder)
    return len(tokenizer)


def _texts(row: Row) -> Iterator[str]:
    """The messages of a chat. Of a comparison also the question by itself: an answer may repeat it, and must not
    then cost the judge a token a letter. Tools and calls as the template writes them."""
    if row.get("tools"):
        from nemotron_steps.models.tokenizers import template_texts

        yield from template_texts(row["messages"], row["tools"])
        return
    for message in row["messages"]:
        yield content_text(message.get("content"))
    if isinstance(row.get("question"), str):
        yield row["question"]
