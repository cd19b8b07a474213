"""mcqa: multiple choice. The letter the answer settles on must equal the key; how it may be written is the row's
`grading_mode` or `template_metadata.output_regex`."""

from __future__ import annotations

import re
from typing import ClassVar, Literal, get_args

from nemotron_steps.environments.base import (
    Environment,
    EnvironmentConfig,
    Response,
    Row,
    RowError,
    Session,
    Verdict,
)
from nemotron_steps.environments.text.extraction import boxed

GradingMode = Literal["strict_single_letter_boxed", "lenient_boxed", "lenient_answer_colon"]

_SINGLE_LETTER = re.compile(r"[^A-Za-z]*([A-Z])[^A-Za-z]*")
_TEXT_WRAP = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{(.*)\}", re.DOTALL)
_ANSWER_COLON = re.compile(r"answer\s*:\s*(.+)", re.IGNORECASE)


class McqaConfig(EnvironmentConfig):
    """Settings."""

    grading_mode: GradingMode = "strict_single_letter_boxed"
    """Where the row names none."""


class Mcqa(Environment):
    """See the module docstring."""

    name: ClassVar[str] = "mcqa"
    required_fields: ClassVar[tuple[str, ...]] = ("options", "expected_answer")
    config_class = McqaConfig
    config: McqaConfig

    def check_values(self, row: Row) -> None:
        """Options are letter → text, the key is one of them, the mode and the regex are usable."""
        letters = options_of(row)
        if not letters:
            raise RowError("options", 'a list like [{"A": "text"}, ...]', repr(row["options"])[:80])
        if str(row["expected_answer"]).strip().upper() not in letters:
            raise RowError("expected_answer", f"one of {', '.join(letters)}", repr(row["expected_answer"]))
        mode = row.get("grading_mode")
        if mode is not None and mode not in get_args(GradingMode):
            raise RowError("grading_mode", f"one of {', '.join(get_args(GradingMode))}", repr(mode))
        pattern = _template_regex(row)
        if pattern is not None:
            try:
                groups = re.compile(pattern).groups
            except re.error as error:
                raise RowError("template_metadata.output_regex", "a regular expression", str(error)) from error
            if groups < 1:
                raise RowError("template_metadata.output_regex", "one group around the answer", pattern)

    async def verify(self, row: Row, response: Response, session: Session) -> Verdict:
        """1 if the extracted letter equals the key, else 0."""
        options = options_of(row)
        pattern = _template_regex(row)
        mode = row.get("grading_mode") or self.config.grading_mode
        if pattern is not None:
            letter = _by_template(response.text, pattern, options)
        elif mode == "lenient_answer_colon":
            letter = _by_answer_colon(response.text, options)
        else:
            letter = _by_box(response.text, options, lenient=mode == "lenient_boxed")
        correct = letter is not None and letter == str(row["expected_answer"]).strip().upper()
        return Verdict(float(correct), {"extracted": float(letter is not None)}, details={"extracted_answer": letter})


def options_of(row: Row) -> dict[str, str]:
    """Letter → option text of a row; options that are not a single letter are left out."""
    options: dict[str, str] = {}
    for entry in row["options"] if isinstance(row["options"], list) else []:
        for key, text in entry.items() if isinstance(entry, dict) else []:
            if len(key) == 1 and key.isalpha():
                options[key.upper()] = str(text)
    return options


def _template_regex(row: Row) -> str | None:
    metadata = row.get("template_metadata")
    pattern = metadata.get("output_regex") if isinstance(metadata, dict) else None
    return str(pattern) if pattern else None


def _by_box(text: str, options: dict[str, str], *, lenient: bool) -> str | None:
    boxes = [_unwrap(content) for content in boxed(text)]
    if not boxes:
        return None
    match = _SINGLE_LETTER.fullmatch(boxes[-1])
    if match and match.group(1) in options:
        return match.group(1)
    if not lenient:
        return None
    inside = _normalized(boxes[-1])
    found = {letter for letter, option in options.items() if _normalized(option) and _normalized(option) in inside}
    return found.pop() if len(found) == 1 else None


def _by_answer_colon(text: str, options: dict[str, str]) -> str | None:
    matches = _ANSWER_COLON.findall(text)
    return _letter_or_text(_unwrap(matches[-1].strip().strip("*")), options) if matches else None


def _by_template(text: str, pattern: str, options: dict[str, str]) -> str | None:
    matches = list(re.finditer(pattern, text))
    return _letter_or_text(_unwrap((matches[-1].group(1) or "").strip()), options) if matches else None


def _letter_or_text(candidate: str, options: dict[str, str]) -> str | None:
    if len(candidate) == 1:
        return candidate.upper() if candidate.upper() in options else None
    wanted = _normalized(candidate)
    found = [letter for letter, option in options.items() if _normalized(option) == wanted]
    return found[0] if len(found) == 1 else None


def _unwrap(text: str) -> str:
    text = text.strip()
    while (match := _TEXT_WRAP.fullmatch(text)) is not None:
        text = match.group(1).strip()
    return text


def _normalized(text: str) -> str:
    return " ".join(text.lower().split())
