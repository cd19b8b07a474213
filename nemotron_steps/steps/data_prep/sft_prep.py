"""data_prep/sft_prep: chats to imitate, or comparisons for a generative reward model; optionally with a tokenizer that
is trained on them, for models that start from nothing."""

import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from nemotron_steps.artifacts.checkpoints import tokenizer_digest
from nemotron_steps.config.schema.data_prep import (
    AnswerStyle,
    DemonstrationConfig,
    ReasoningControlConfig,
    ReasoningGymSource,
    SftPrepConfig,
    SplitRows,
    SweDemonstrations,
    TokenizerTrainingConfig,
)
from nemotron_steps.engine.rollouts.data import with_instruction
from nemotron_steps.environments.responses import THINK_CLOSE, THINK_OPEN, content_text, split_reasoning
from nemotron_steps.rows.layouts import read_chat
from nemotron_steps.rows.lines import Row, read_rows
from nemotron_steps.rows.messages import is_list, written
from nemotron_steps.runs.context import StepContext
from nemotron_steps.steps.data_prep.blends.prepare import prepare, sources_of
from nemotron_steps.steps.data_prep.blends.shards import RowFunction, RowWork
from nemotron_steps.steps.data_prep.blends.splits import (
    FILES,
    SPLITS,
    TOKENIZER_FOLDER,
    Split,
    wanted_rows,
    write_splits,
)
from nemotron_steps.steps.data_prep.comparisons import ComparisonMaker, comparison_rows
from nemotron_steps.steps.data_prep.gym_tasks import Question, draw_questions, slip, write_answer
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
        work: RowWork = partial(chat_rows, config.reasoning, config.low_effort_instruction)
        if config.kind == "comparisons":
            work = partial(comparison_rows, config.comparisons)
        counts = prepare(context, sources_of(config), work, slot.path)
    summary: dict[str, int] = {f"{split}_chats": count for split, count in counts.items()}
    if config.tokenizer is not None:
        folder = slot.path / TOKENIZER_FOLDER
        rows = (row for _, row in read_rows(slot.path / FILES["train"]))
        summary["vocabulary"] = write_tokenizer(rows, config.tokenizer, folder)
        slot.attributes["tokenizer"] = tokenizer_digest(folder)
    context.tracker.summary(summary)


def gym_chats(config: SftPrepConfig, source: ReasoningGymSource) -> dict[Split, list[Row]]:
    """Chats about reasoning-gym questions."""
    repeats, wanted = config.chats_per_question, wanted_rows(config.rows)
    questions = draw_questions(source, SplitRows(**{split: -(-rows // repeats) for split, rows in wanted.items()}))
    make: Callable[[Question, random.Random], Row]
    if config.kind == "comparisons":
        make = ComparisonMaker(config.comparisons, questions["train"]).chat
    else:

        def make(question: Question, rng: random.Random) -> Row:
            return demonstration(question, config.demonstrations, rng)

    chats: dict[Split, list[Row]] = {}
    for split in SPLITS:
        numbered = list(enumerate(questions[split] * repeats))[: wanted[split]]
        chats[split] = [make(question, random.Random(f"{source.seed}:{split}:{i}")) for i, question in numbered]
    return chats


def with_swe_chats(config: SftPrepConfig, source: SweDemonstrations) -> dict[Split, list[Row]]:
    """Demonstrations of an agent's harness, mixed with those of reasoning-gym's questions if there are some."""
    whole = wanted_rows(config.rows)
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


def write_tokenizer(rows: Iterable[Row], config: TokenizerTrainingConfig, folder: Path) -> int:
    """Train a tokenizer on the first texts of `rows`, write it, and return the size of its vocabulary."""
    from nemotron_steps.models.tokenizers import save_tokenizer, train_tokenizer

    texts = list(islice((text for row in rows for text in _texts(row)), config.texts))
    tokenizer = train_tokenizer(texts, min_share=config.min_share, max_phrases=config.max_phrases)
    save_tokenizer(tokenizer, folder)
    return len(tokenizer)


def _texts(row: Row) -> Iterator[str]:
    """A chat's messages, as its template writes them where it has tools; of a comparison also the question alone."""
    if row.get("tools"):
        from nemotron_steps.models.tokenizers import template_texts

        yield from template_texts(row["messages"], row["tools"])
        return
    for message in row["messages"]:
        yield content_text(message.get("content"))
    if isinstance(row.get("question"), str):
        yield row["question"]


def chat_rows(reasoning: ReasoningControlConfig, low_effort_instruction: str) -> RowFunction:
    """Of chats of the user's own: reasoning stripped or cut for a share, the low-effort instruction added."""
    control = ReasoningControl(reasoning)

    def become(where: str, row: Row) -> list[Row] | None:
        chat = read_chat(row, where)
        read = {**row, "messages": written(chat.messages), **({"tools": chat.tools} if chat.tools else {})}
        changed = control(read)
        if row.get("reasoning_effort") == "low":
            messages = with_instruction((changed or read)["messages"], low_effort_instruction)
            changed = {**(changed or read), "messages": messages}
        # A chat that its trainer reads as it is stays so, byte for byte.
        return None if changed is None and is_list(row.get("messages")) else [changed or read]

    return become


_FIELD = "reasoning_content"


class ReasoningControl:
    """Strips or cuts the reasoning of a share of chats."""

    def __init__(self, config: ReasoningControlConfig) -> None:
        self._config = config
        self._tokenizer: Any = None
        if config.tokenizer is not None:
            from nemotron_steps.models.chat import ChatFormat

            self._tokenizer = ChatFormat.from_folder(config.tokenizer).tokenizer

    def __call__(self, row: Row) -> Row | None:
        """The changed row, or None where it stays as it is: most do, and those without reasoning."""
        config = self._config
        digest = blake2b(msgspec.json.encode(row["messages"]), key=str(config.seed).encode(), digest_size=8).hexdigest()
        rng = random.Random(digest)
        draw = rng.random()
        if draw < config.strip_share:
            return _stripped(row)
        if draw >= config.strip_share + config.truncate_share:
            return None
        budget, messages = rng.choice(config.budgets), [dict(message) for message in row["messages"]]
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        reasoning, answer = reasoning_of(messages[last])
        cut = self._cut(reasoning, budget)
        if cut == reasoning:
            return None
        own = {_FIELD: cut} if messages[last].get(_FIELD) else {"content": f"{THINK_OPEN}{cut}{THINK_CLOSE}{answer}"}
        messages[last] = {**messages[last], **own}
        return {**row, "messages": messages, "reasoning_budget": budget}

    def _cut(self, text: str, budget: int) -> str:
        if self._tokenizer is None:
            words = text.split(maxsplit=budget)
            return text if len(words) <= budget else text[: len(text) - len(words[budget])].rstrip()
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = encoded["offset_mapping"]
        return text if len(offsets) <= budget else text[: offsets[budget][0]]


def reasoning_of(message: Row) -> tuple[str, str]:
    """(reasoning, answer) of an assistant message."""
    text = content_text(message.get("content"))
    if message.get(_FIELD):
        return str(message[_FIELD]), text
    return split_reasoning(text) if THINK_CLOSE in text else ("", text)


def _stripped(row: Row) -> Row | None:
    messages = []
    changed = False
    for message in row["messages"]:
        reasoning, answer = reasoning_of(message) if message["role"] == "assistant" else ("", "")
        if reasoning:
            message = {key: value for key, value in message.items() if key != _FIELD} | {"content": answer}
            changed = True
        messages.append(message)
    if not changed:
        return None
    template_kwargs = {**(row.get("chat_template_kwargs") or {}), "enable_thinking": False}
    return {**row, "messages": messages, "chat_template_kwargs": template_kwargs}
