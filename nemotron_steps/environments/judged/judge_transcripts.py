"""What judges said of an answer, kept beside its verdict for people to read: `GradeResult.details["judge"]`.

A note is a few short texts. However long a judge thinks, what is kept of an answer stays below
MAX_NOTES · (REASONING_CHARACTERS + VERDICT_CHARACTERS) characters and a few.
"""

import string
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from nemotron_steps.environments.responses import split_reasoning

JUDGE_NOTES = "judge"
"""Key of a verdict's details, of a rollout's metadata and of a sample: a list of notes."""
MAX_NOTES = 4
REASONING_CHARACTERS = 1000
VERDICT_CHARACTERS = 600

_GAP = " … "
_WORD = string.ascii_letters + string.digits + string.punctuation

Note = dict[str, str]
"""`reasoning` and `verdict` (what the judge wrote after it), and what else the environment says of the question."""

_notes: ContextVar[list[Note] | None] = ContextVar("notes on judges", default=None)


@contextmanager
def noting() -> Iterator[list[Note]]:
    """Collect the notes that are made inside, in the order in which the questions were asked."""
    notes: list[Note] = []
    before = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(before)


def begun_note() -> Note:
    """An empty note for a question that is about to be asked. It is dropped where nobody collects any, or enough."""
    notes, note = _notes.get(), Note()
    if notes is not None and len(notes) < MAX_NOTES:
        notes.append(note)
    return note


def note_of(reply: str, **about: str) -> Note:
    """A judge's reply, cut."""
    reasoning, verdict = split_reasoning(reply)
    said = {"reasoning": cut(reasoning, REASONING_CHARACTERS), "verdict": cut(verdict.strip(), VERDICT_CHARACTERS)}
    return {**about, **{name: text for name, text in said.items() if text}}


def notes_from(details: Any) -> list[Note]:
    """The notes in details that another process sent, cut; anything else is left out."""
    given = details.get(JUDGE_NOTES) if isinstance(details, Mapping) else None
    notes = []
    for note in given[:MAX_NOTES] if isinstance(given, list) else ():
        items = list(note.items())[:MAX_NOTES] if isinstance(note, dict) else []
        texts = {name: text for name, text in items if isinstance(text, str) and len(name) < 40}
        limits = {"reasoning": REASONING_CHARACTERS}
        notes.append({name: cut(text, limits.get(name, VERDICT_CHARACTERS)) for name, text in texts.items()})
    return [note for note in notes if note]


def cut(text: str, limit: int) -> str:
    """At most `limit` characters of a text, its middle left out; no word in part, as secrets are masked by their
    whole text, afterwards."""
    if len(text) <= limit:
        return text
    half = (limit - len(_GAP)) // 2
    return f"{text[:half].rstrip(_WORD)}{_GAP}{text[-half:].lstrip(_WORD)}"
