"""Forms of a made-up question: asked plainly, with an instruction about how to answer, or for a reply in JSON.

The same question under another form is graded by another environment, so that stages of a curriculum can differ in
what they reward while a small model can learn all of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nemotron_steps.config.schema.data_prep import QuestionForm


@dataclass(frozen=True)
class Asked:
    """How a question is asked.

    Attributes:
        suffix: what is said after the question.
        reply: a reply that does as asked, with {answer} in it; None where any reply with the answer does.
        agent: what grades it; None for the preparation's own.
        fields: verifier fields beside the question's own.
    """

    suffix: str = ""
    reply: str | None = None
    agent: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


PLAIN = Asked()

_INSTRUCTIONS: tuple[tuple[str, dict[str, Any] | None, str, str], ...] = (
    ("detectable_format:title", None, "Put it in angular brackets, like <<this>>.", "<<{answer}>>"),
    ("startend:quotation", None, "Wrap your whole reply in quotation marks.", '"{answer}"'),
    ("startend:end_checker", {"end_phrase": "That is all."}, "End with: That is all.", "{answer} That is all."),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 1},
        "Highlight it, like *this*.",
        "*{answer}*",
    ),
)
"""Instruction id, its arguments, how it is said, and a reply that follows it."""


def ask(form: QuestionForm, text: str, answer: str) -> Asked:
    """A question in a form. Which instruction it gets follows from its text alone."""
    if form == "instructed":
        place = int.from_bytes(hashlib.sha256(f"form:{text}".encode()).digest()[:4], "big") % len(_INSTRUCTIONS)
        name, arguments, said, reply = _INSTRUCTIONS[place]
        # The answer has to be there too: an instruction by itself is followed as well by a wrong one.
        fields = {
            "instruction_id_list": [name, "keywords:existence"],
            "kwargs": [arguments, {"keywords": [answer]}],
            "grading_mode": "binary",
        }
        return Asked(f" {said}", reply, "instruction_following_simple_agent", fields)
    if form == "structured":
        schema = {"type": "object", "properties": {"answer": {"type": "string", "const": answer}}}
        fields = {"schema_str": json.dumps(schema), "schema_type": "json"}
        said = ' Reply in JSON, like {"answer": "this"}.'
        return Asked(said, '{"answer": "{answer}"}', "structured_outputs_simple_agent", fields)
    return PLAIN
