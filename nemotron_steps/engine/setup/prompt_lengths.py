"""Prompts that leave no room for an answer, found before anything is loaded. Nothing here may import torch.

A prompt is counted by its texts alone, without what the chat template and an environment's tools add.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from nemotron_steps.config.schema.rl import RlConfig, VllmModelConfig
from nemotron_steps.engine.rollouts.data import PromptRow, PromptRows, Rows
from nemotron_steps.environments.judged.judges import Messages, longer_context
from nemotron_steps.errors import ArtifactError, DataError, show_line
from nemotron_steps.models.architecture import Architecture, hf_folder
from nemotron_steps.models.chat import COMMON_ROLES, ChatFormat
from nemotron_steps.rows.layouts import read_request

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_AT_ONCE = 256
"""Prompts tokenized together."""


def longer_than(limit: int, rows: PromptRows, model: str | Path) -> dict[int, int]:
    """Place of each row with more tokens than `limit` → its tokens; none where the model has no tokenizer.json."""
    suspects = [place for place in rows.places_over(limit) if len(_text(rows[place]).encode()) > limit]
    tokenizer = _tokenizer(hf_folder(model)) if suspects else None
    if tokenizer is None:
        return {}
    tokens: dict[int, int] = {}
    for start in range(0, len(suspects), _AT_ONCE):
        places = suspects[start : start + _AT_ONCE]
        encoded = tokenizer.encode_batch_fast([_text(rows[place]) for place in places], add_special_tokens=False)
        tokens.update((place, len(each.ids)) for place, each in zip(places, encoded, strict=True))
    return {place: count for place, count in tokens.items() if count > limit}


def short_enough(config: RlConfig, rows: PromptRows, left_out: Callable[[int], None]) -> Sequence[PromptRow]:
    """Rows within `data.max_input_seq_length`; without that all, and DataError if any fills the sequence."""
    limit, model = config.data.max_input_seq_length, config.policy.checkpoint
    if model is None:
        return rows
    if limit is None:
        _refuse_without_room(config, rows, model)
        return rows
    long = longer_than(limit, rows, model)
    if not long:
        return rows
    if len(long) == len(rows):
        place, tokens = next(iter(long.items()))
        raise DataError(
            f"none of {len(rows)} prompts is within data.max_input_seq_length",
            where=rows[place].where,
            expected=f"at most {limit} tokens",
            found=f"{tokens}, the shortest {min(long.values())}",
            hints=["data.max_input_seq_length=null   # leaves none out", *show_line(rows[place].where)],
        )
    left_out(len(long))
    chosen = array("Q", [place for place in range(len(rows)) if place not in long])
    return Rows(len(chosen), lambda place: rows[chosen[place]])


def _refuse_without_room(config: RlConfig, rows: PromptRows, model: str) -> None:
    policy = config.policy
    end = policy.max_total_sequence_length_end or 0
    key = f"policy.max_total_sequence_length{'_end' if end > policy.max_total_sequence_length else ''}"
    limit = max(policy.max_total_sequence_length, end)
    long = longer_than(limit - 1, rows, model)
    if not long:
        return
    place, tokens = next(iter(long.items()))
    most = max(long.values())
    room: float = most + policy.generation.max_new_tokens
    with suppress(ArtifactError):  # a longer one than the model was made for would be refused in turn
        room = min(room, Architecture.from_folder(hf_folder(model)).positions)
    hints = [f"{key}={room}   # room for all of them"] if room > most else []
    if len(long) < len(rows):
        # To leave out most prompts is hardly what was meant.
        at = len(hints) if len(long) > len(rows) / 2 else 0
        hints.insert(at, f"data.max_input_seq_length={limit - 1}   # leaves them out")
    raise DataError(
        f"{len(long)} of {len(rows)} prompts leave no room for an answer",
        where=rows[place].where,
        expected=f"fewer than {limit} tokens ({key})",
        found=f"{tokens}, the longest {most}",
        hints=[*hints, *show_line(rows[place].where)],
    )


def _tokenizer(folder: Path) -> Tokenizer | None:
    """Without its own bound on lengths; None where the folder has no tokenizer.json."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    return tokenizer


def _text(row: PromptRow) -> str:
    """The texts of a prompt, as far as it can be read: check_rows reports those that cannot."""
    try:
        return "\n".join(message["content"] for message in read_request(row.row, row.where).messages)
    except DataError:
        return ""


class JudgeToBe:
    """Stands for a judge that is not loaded yet."""

    def __init__(self, role: str, config: VllmModelConfig) -> None:
        self._role = role
        self._config = config
        self._unwritten: dict[tuple[str, ...], tuple[str, ...]] = {}

    async def complete(self, messages: Messages, *, temperature: float, top_p: float, max_tokens: int) -> str:
        """Never asked."""
        raise AssertionError("rows are checked without a judge")

    def refuse_longer(self, messages: Messages, where: str, *, max_tokens: int) -> None:
        """DataError for a question, of the row at `where`, that fills the context; see MeasuringJudge."""
        limit, texts = self._config.max_total_sequence_length, [message["content"] for message in messages]
        if sum(len(text.encode()) for text in texts) < limit or self._tokenizer is None:
            return
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        tokens = sum(len(each.ids) for each in encoded)
        if tokens < limit:
            return
        key = f"env.nemo_gym.{self._role}.responses_api_models.vllm_model.max_total_sequence_length"
        raise DataError(
            f"what {self._role} is asked about this row leaves no room for its answer",
            where=where,
            expected=f"fewer than {limit} tokens ({key})",
            found=f"{tokens}, without the answers that it is to judge",
            hints=(longer_context(key, tokens + max_tokens), *show_line(where)),
        )

    def unwritten(self, messages: Messages) -> tuple[str, ...]:
        """Roles of a question that the judge's template refuses or leaves out; see MeasuringJudge."""
        own = tuple(role for role in (message["role"] for message in messages) if role not in COMMON_ROLES)
        if own in self._unwritten or not own or self._folder is None:
            return self._unwritten.get(own, ())
        marked = [{"role": role, "content": f"what {role} said"} for role in ("user", *own)]
        try:
            text = ChatFormat.from_folder(self._folder).render_text(marked)
            self._unwritten[own] = tuple(each["role"] for each in marked if each["content"] not in text)
        except ArtifactError:  # without a template; who loads it says so
            self._unwritten[own] = ()
        except (TemplateError, TypeError, ValueError):  # `raise_exception` of a role that it does not know
            self._unwritten[own] = own
        return self._unwritten[own]

    @cached_property
    def _folder(self) -> Path | None:
        """None for a judge that somebody else serves, or that is not here yet."""
        if self._config.backend == "http" or self._config.model is None:
            return None
        folder = hf_folder(self._config.model)
        return folder if (folder / "tokenizer.json").is_file() else None

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        return _tokenizer(self._folder) if self._folder is not None else None
