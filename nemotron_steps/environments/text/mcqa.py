"""mcqa: multiple choice. The letter the answer settles on must equal the key.

Where it is looked for, first hit wins: the row's own regular expressions (`template_metadata.output_regex`, one or a
list), then the way that `grading_mode` names.
"""

import re
import unicodedata
from itertools import pairwise
from typing import ClassVar, Literal, get_args

from nemotron_steps.environments.base import Environment, EnvironmentConfig, GradeResult, Row, RowError, Session
from nemotron_steps.environments.responses import Response
from nemotron_steps.environments.text.extraction import (
    last_boxed,
    last_captures,
    output_regexes,
    regex_problem,
)

GradingMode = Literal["strict_single_letter_boxed", "lenient_boxed", "lenient_answer_colon", "lenient_answer_colon_md"]

_ONE_LETTER = re.compile(r"[^A-Za-z]*([A-Z])[^A-Za-z]*")
_LABEL = re.compile(r"([A-Z])\s*[:).\-]")
_TEXT_WRAP = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{\s*")
_ANSWER_COLON = re.compile(r"answer\s*:\s*(.+)", re.IGNORECASE)
_ANSWER_COLON_MARKDOWN = re.compile(r"answer[*_]{0,2}\s*:[*_\s]{0,2}(.+)", re.IGNORECASE)
_STANDALONE = re.compile(r"(?<![A-Za-z0-9])[A-Za-z](?![A-Za-z0-9])")
_CHOICE_SEPARATOR = re.compile(r"\s*[/|&,;]\s*|\s+(?:or|and)\s+|\s+", re.IGNORECASE)
"""Between two letters: then both are offered, and neither is the answer."""
_LOCAL_LETTERS = str.maketrans(dict(zip("أبجدঅবডঢ", "ABCDABCD", strict=True)))


class McqaConfig(EnvironmentConfig):
    """Settings."""

    grading_mode: GradingMode | None = None
    """None: the row's own, else strict_single_letter_boxed."""


class Mcqa(Environment):
    """See the module docstring.

    A row has `options`, a list of objects LETTER → text, and `expected_answer`, a letter of them.
    """

    name: ClassVar[str] = "mcqa"
    required_fields: ClassVar[tuple[str, ...]] = ("expected_answer",)
    config_class = McqaConfig
    config: McqaConfig

    def check_values(self, row: Row) -> None:
        letters, patterns, key = options_of(row), output_regexes(row), _key(row)
        problem = regex_problem(patterns)
        if problem is not None:
            raise RowError("template_metadata.output_regex", "regular expressions", problem)
        if not letters and not patterns:
            raise RowError("options", 'a list like [{"A": "text"}, ...]', repr(row.get("options"))[:80])
        if key not in letters and not (patterns and len(key) == 1 and key.isalpha()):
            raise RowError("expected_answer", f"one of {', '.join(letters)}", repr(row["expected_answer"]))
        mode = row.get("grading_mode")
        if mode is not None and mode not in get_args(GradingMode):
            raise RowError("grading_mode", f"one of {', '.join(get_args(GradingMode))}", repr(mode))

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        text, options, letter = response.text, options_of(row), None
        patterns = output_regexes(row)
        if patterns and text.strip():
            found = await self.in_helper(last_captures, text, patterns, re.IGNORECASE)
            for local in [_localized(capture) for capture in found if capture is not None]:
                # A single letter is believed even where the options lack it: these rows may list them incompletely.
                single = local.upper() if len(local) == 1 and local.isalpha() else None
                letter = letter or single or _letter_or_text(_unwrap(local), options)
        if letter is None:
            mode = self.config.grading_mode or row.get("grading_mode")
            if mode == "lenient_answer_colon":
                matches = _ANSWER_COLON.findall(text)
                letter = _letter_or_text(_unwrap(matches[-1]), options) if matches else None
            elif mode == "lenient_answer_colon_md":
                payloads = reversed(_ANSWER_COLON_MARKDOWN.findall(text))
                letter = next(filter(None, (_single_letter(payload, options) for payload in payloads)), None)
            else:
                letter = _by_box(text, options, lenient=mode == "lenient_boxed")
        correct = letter is not None and letter == _key(row)
        components = {"extracted": float(letter is not None)}
        return GradeResult(float(correct), components, details={"extracted_answer": letter})


def options_of(row: Row) -> dict[str, str]:
    """Letter → option text of a row; options without text, or whose name is not a single letter, are left out."""
    options: dict[str, str] = {}
    entries = row.get("options")
    for entry in entries if isinstance(entries, list) else []:
        for key, text in entry.items() if isinstance(entry, dict) else []:
            if len(key) == 1 and key.isalpha() and text is not None:
                options[key.upper()] = str(text)
    return options


def _key(row: Row) -> str:
    return str(row["expected_answer"]).strip().upper()


def _by_box(text: str, options: dict[str, str], *, lenient: bool) -> str | None:
    box = last_boxed(text)
    if box is None:
        return None
    inside = _unwrap(box)
    match = _ONE_LETTER.fullmatch(inside) or _LABEL.match(inside)
    if match and match.group(1) in options:
        return match.group(1)
    if not lenient:
        return None
    shown = _normalized(inside)
    found = {letter for letter, option in options.items() if _normalized(option) and _normalized(option) in shown}
    return found.pop() if len(found) == 1 else None


def _single_letter(payload: str, options: dict[str, str]) -> str | None:
    """The letter that a payload begins with, else its last capital that stands alone; None for a list of letters."""
    text = _localized(payload).strip("*_` \t\n\r.,;:")
    letters = [match for match in _STANDALONE.finditer(text) if match.group().upper() in options]
    for first, second in pairwise(letters):
        between = text[first.end() : second.start()]
        if first.group().upper() != second.group().upper() and _CHOICE_SEPARATOR.fullmatch(between):
            return None
    begin = _STANDALONE.match(text)
    capitals = [match for match in _STANDALONE.finditer(text) if match.group().isupper()]
    found = begin or (capitals[-1] if capitals else None)
    return found.group().upper() if found is not None and found.group().upper() in options else None


def _localized(text: str) -> str:
    return unicodedata.normalize("NFKC", text).translate(_LOCAL_LETTERS).strip()


def _letter_or_text(candidate: str, options: dict[str, str]) -> str | None:
    if len(candidate) == 1:
        return candidate.upper() if candidate.upper() in options else None
    wanted = _normalized(candidate)
    found = [letter for letter, option in options.items() if _normalized(option) == wanted]
    return found[0] if len(found) == 1 else None


def _unwrap(text: str) -> str:
    r"""A text without the \text{…} like commands around all of it."""
    text = text.strip()
    begin, end = 0, len(text)
    while end and text[end - 1] == "}" and (match := _TEXT_WRAP.match(text, begin)) is not None:
        begin, end = match.end(), end - 1
        while end > begin and text[end - 1].isspace():
            end -= 1
    return text[begin:end].strip()


def _normalized(text: str) -> str:
    return " ".join(text.lower().split())
