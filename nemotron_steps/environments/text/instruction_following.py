"""instruction_following: does the answer follow every verifiable instruction of the row (`binary`), or what fraction
of them (`fraction`)?

The fields are the row's own, or those of its `verifier_metadata`.

`CHECKS` has one rule an instruction id, in the vocabulary of IFEval and of its open-instruct extension (IFEvalG).
Words are runs of letters, digits, hyphens and apostrophes; sentences end at . ! or ?. Those libraries use NLTK there,
so counts may differ on unusual punctuation. Where a text is too short or plain for a check, the answer is no. Every
check takes time linear in the text.
"""

import importlib.util
import inspect
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from nemotron_steps.environments.base import Environment, EnvironmentConfig, GradeResult, Row, RowError, Session
from nemotron_steps.environments.responses import Response
from nemotron_steps.errors import UnsupportedError

LANGUAGE = "language:response_language"

Check = Callable[..., bool]

_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|vs|etc|e\.g|i\.e|a\.m|p\.m|No|Fig)\.$", re.IGNORECASE)
_LONGEST_ABBREVIATION = len("Prof.")
# Possessive, and only where a run of marks begins: tried from each of them, a long run would take quadratic time.
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++[\"')\]”’]*+(?=\s|$)")
_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")

LANGUAGE_LENGTH = 20_000

CONSTRAINED_RESPONSES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def words(text: str) -> list[str]:
    """Words of a text, in order."""
    return _WORD.findall(text)


def sentences(text: str) -> list[str]:
    """Sentences of a text, in order, stripped; a line break does not end one, nor do decimal points and abbreviations
    within a line."""
    found: list[str] = []
    start = 0
    for match in _SENTENCE_END.finditer(text):
        begin = max(start, match.end() - _LONGEST_ABBREVIATION)
        if text[match.end() : match.end() + 1] not in ("", "\n") and _ABBREVIATION.search(text, begin, match.end()):
            continue
        found.append(text[start : match.end()].strip())
        start = match.end()
    found.append(text[start:].strip())
    return [sentence for sentence in found if sentence]


def _related(count: int, threshold: int, relation: str) -> bool:
    if relation == "less than":
        return count < threshold
    if relation == "at least":
        return count >= threshold
    if relation == "at most":
        return count <= threshold
    raise ValueError(f"relation must be 'less than', 'at least' or 'at most', found {relation!r}")


def _occurrences(keyword: str, text: str) -> int:
    return len(re.findall(re.escape(keyword.strip()), text, re.IGNORECASE))


def _divided(text: str, divider: str) -> list[str] | None:
    """Parts between dividers; empty ones are dropped at the ends, and make the whole thing None in between."""
    parts = [part.strip() for part in re.split(divider, text)]
    if parts and not parts[0]:
        parts = parts[1:]
    if parts and not parts[-1]:
        parts = parts[:-1]
    return parts if all(parts) else None


ASTERISKS = r"\s?\*\*\*\s?"
_POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
_BULLETS = (r"^[^\S\n]*\*[^*].*$", r"^[^\S\n]*-.*$")


def _has_parts(text: str, divider: str, count: int) -> bool:
    parts = _divided(text, divider)
    return parts is not None and len(parts) == count


def keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    """The keyword occurs so often."""
    return _related(_occurrences(keyword, text), frequency, relation)


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """The letter occurs so often, case ignored."""
    return _related(text.lower().count(letter.strip().lower()), let_frequency, let_relation)


def response_language(text: str, language: str) -> bool:
    """By langdetect, as an ISO 639-1 code."""
    import langdetect

    langdetect.DetectorFactory.seed = 0  # else it draws its own, and a grade is not the same twice
    try:
        return bool(langdetect.detect(text[:LANGUAGE_LENGTH]) == language)
    except langdetect.LangDetectException:
        return True  # nothing to detect a language from: IFEval counts it as followed


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Exactly so many paragraphs between blank lines, and the nth (from 1) begins with the word."""
    paragraphs = text.split("\n\n")
    if sum(bool(paragraph.strip()) for paragraph in paragraphs) != num_paragraphs:
        return False
    if not 1 <= nth_paragraph <= num_paragraphs or not paragraphs[nth_paragraph - 1].strip():
        return False
    found = re.split(r"[.,?!'\"]", paragraphs[nth_paragraph - 1].split()[0].lstrip("'\""))[0]
    return found.lower() == first_word.lower()


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """At least so many *highlighted* or **highlighted** pieces."""
    single = re.findall(r"\*[^\n*]*\*", text)
    double = re.findall(r"\*\*[^\n*]*\*\*", text)
    return sum(bool(piece.strip("*").strip()) for piece in [*single, *double]) >= num_highlights


def json_format(text: str) -> bool:
    """The whole text, in a code fence or not."""
    bare = re.sub(r"^```(?:json)?|```$", "", text.strip(), flags=re.IGNORECASE)
    try:
        json.loads(bare)
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    """A <<title>> occurs: in some line, text between the first << and the last >>."""
    for line in text.split("\n"):
        begin, end = line.find("<<"), line.rfind(">>")
        if begin != -1 and end > begin + 2 and line[begin:end].strip("<>").strip():
            return True
    return False


def _is_latin(text: str) -> bool:
    letters = [character for character in text if character.isalpha()]
    return sum(character.isascii() for character in letters) >= 0.9 * len(letters)


def repeat_phrase(text: str, phrase: str, small_n: int) -> bool:
    """The phrase occurs exactly small_n times, each time with at most one word changed and at least one change."""
    reference = phrase.split()
    found = [piece for line in text.split("\n") for piece in _from_to(line, reference[0] + " ", " " + reference[-1])]
    if len(found) != small_n or any(len(piece.split()) != len(reference) for piece in found):
        return False
    changes = [sum(a != b for a, b in zip(piece.split(), reference, strict=True)) for piece in found]
    return bool(changes) and max(changes) <= 1 and changes[-1] == 1


def _from_to(line: str, opening: str, closing: str) -> list[str]:
    """The pieces of a line from an opening text to the next closing one, both included."""
    pieces, end = [], 0
    while (begin := line.find(opening, end)) != -1:
        close = line.find(closing, begin + len(opening))
        if close == -1:
            break
        end = close + len(closing)
        pieces.append(line[begin:end])
    return pieces


def _copy(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower() == prompt_to_repeat.strip().lower()


def _bare(word: str) -> str:
    return re.sub(r"[^\w\s]", "", word).lower()


def _one(word: str | list[str]) -> str:
    return (word if isinstance(word, str) else word[0]).strip()


def postscript(text: str, postscript_marker: str) -> bool:
    """A postscript with the marker."""
    marker = postscript_marker.strip()
    return re.search(_POSTSCRIPTS.get(marker, re.escape(marker.lower())), text.lower()) is not None


def counting_composition(text: str, n_sent: int, n_words: int) -> bool:
    """Three paragraphs between *** dividers, each of n_sent sentences of n_words words."""
    parts = _divided(text, ASTERISKS)
    if parts is None or len(parts) != 3:
        return False
    counts = [[len(words(sentence)) for sentence in sentences(part)] for part in parts]
    return all(len(found) == n_sent and all(n == n_words for n in found) for found in counts)


def keyword_specific_position(text: str, keyword: str | list[str], n: int, m: int) -> bool:
    """The keyword is the m-th word of the n-th sentence (from 1)."""
    found = sentences(text)
    inside = words(found[n - 1]) if 1 <= n <= len(found) else []
    return 1 <= m <= len(inside) and inside[m - 1] == _one(keyword)


def start_end(text: str) -> bool:
    """The text begins and ends with the same word, with nothing after it."""
    found = words(text)
    return len(found) > 1 and found[0].lower() == found[-1].lower() and text.strip().endswith(found[-1])


CHECKS: Mapping[str, Check] = {
    "keywords:existence": lambda text, keywords: all(_occurrences(keyword, text) > 0 for keyword in keywords),
    "keywords:frequency": keyword_frequency,
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)
    ),
    "keywords:letter_frequency": letter_frequency,
    "keywords:no_adjacent_consecutive": lambda text: all(
        ord(second[0].lower()) - ord(first[0].lower()) != 1 for first, second in itertools.pairwise(text.split())
    ),
    "keywords:word_once": lambda text, keyword: _occurrences(keyword, text) == 1,
    "keywords:word_count_different_numbers": keyword_frequency,
    "keywords:exclude_word_harder": lambda text, keyword: f" {keyword.strip()} " not in text,
    "keywords:palindrome": lambda text: any(len(word) > 1 and word == word[::-1] for word in text.split()),
    "keywords:keyword_specific_position": keyword_specific_position,
    "keywords:start_end": start_end,
    "language:response_language": response_language,
    "length_constraints:number_sentences": lambda text, num_sentences, relation: _related(
        len(sentences(text)), num_sentences, relation
    ),
    "length_constraints:number_paragraphs": lambda text, num_paragraphs: _has_parts(text, ASTERISKS, num_paragraphs),
    # Runs of letters, digits and underscores, as IFEval counts words here.
    "length_constraints:number_words": lambda text, num_words, relation: _related(
        len(re.findall(r"\w+", text)), num_words, relation
    ),
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        sum(len(_from_to(line, "[", "]")) for line in text.split("\n")) >= num_placeholders
    ),
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        sum(len(re.findall(bullet, text, re.MULTILINE)) for bullet in _BULLETS) == num_bullets
    ),
    "detectable_format:constrained_response": lambda text: any(option in text for option in CONSTRAINED_RESPONSES),
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections
    ),
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "detectable_format:sentence_hyphens": lambda text: all(
        part == want for part, want in zip(text.split("-"), sentences(text.replace("-", " ")), strict=False)
    ),
    "detectable_format:square_brackets": lambda text: all(
        word.startswith("[") and word.endswith("]") for word in text.split()
    ),
    "detectable_format:bigram_wrapping": lambda text: all(
        first.startswith("<<") and second.endswith(">>")
        for first, second in zip(text.split()[::2], text.split()[1::2], strict=False)
    ),
    "combination:two_responses": lambda text: (
        _has_parts(text, r"\*{6}", 2) and len({*(_divided(text, r"\*{6}") or ())}) == 2
    ),
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda text: re.fullmatch(r'".*"', text.strip(), re.DOTALL) is not None,
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: _related(
        sum(word.isupper() for word in words(text)), capital_frequency, capital_relation
    ),
    "change_case:english_capital": lambda text: text.isupper() and _is_latin(text),
    "change_case:english_lowercase": lambda text: text.islower() and _is_latin(text),
    "punctuation:no_comma": lambda text: "," not in text,
    "punctuation:punctuation_dot": lambda text: "." not in text,
    "punctuation:punctuation_exclamation": lambda text: "!" not in text,
    "copy:repeat_phrase": repeat_phrase,
    "copy:copy": _copy,
    "copy:copying_simple": _copy,
    "copy:copying_multiple": lambda text, prompt_to_repeat, N: (
        len(parts := text.split("******")) == N and all(_copy(part, prompt_to_repeat) for part in parts)
    ),
    "new:copy_span_idx": lambda text, prompt_to_repeat, n_start, n_end: _copy(text, prompt_to_repeat[n_start:n_end]),
    "paragraphs:paragraphs": lambda text: _has_parts(text, ASTERISKS, 2),
    "paragraphs:paragraphs2": lambda text: _has_parts(text, r"\n\n", 2),
    "first_word:first_word_sent": lambda text, first_word: all(
        sentence.split()[0].lower() == _one(first_word).lower() for sentence in sentences(text)
    ),
    "first_word:first_word_answer": lambda text, first_word: (
        text.split()[:1] != [] and text.split()[0].lower() == first_word.strip().lower()
    ),
    "last_word:last_word_sent": lambda text, last_word: all(
        _bare(sentence.split()[-1]) == _one(last_word).lower() for sentence in sentences(text)
    ),
    "last_word:last_word_answer": lambda text, last_word: (
        text.split()[:1] != [] and _bare(text.split()[-1]) == last_word.strip().lower()
    ),
    "count:lowercase_counting": lambda text, N: len(re.findall(r"\b[a-z]+\b", text)) <= N,
    "count:counting_composition": counting_composition,
    "count:count_unique": lambda text: max(Counter(words(text)).values(), default=1) == 1,
    "count:count_increment_word": lambda text, keyword1, keyword2: (
        _occurrences(keyword1, text) == 1 and _occurrences(keyword2, text) == 2
    ),
    "letters:letter_counting": lambda text, N, relation: _related(len(re.findall(r"[a-zA-Z]", text)), N, relation),
    "letters:letter_counting2": letter_frequency,
}


class InstructionFollowingConfig(EnvironmentConfig):
    """Settings."""

    grading_mode: Literal["binary", "fraction"] = "binary"
    """Where the row names none."""


class InstructionFollowing(Environment):
    """See the module docstring."""

    name: ClassVar[str] = "instruction_following"
    config_class = InstructionFollowingConfig
    config: InstructionFollowingConfig

    def check_values(self, row: Row) -> None:
        ids, kwargs = _field(row, "instruction_id_list"), _field(row, "kwargs")
        if not isinstance(ids, list) or not ids:
            raise RowError("instruction_id_list", "at least one instruction id", repr(ids)[:80])
        if not isinstance(kwargs, list) or len(kwargs) != len(ids):
            raise RowError("kwargs", f"a list of {len(ids)} objects or nulls", repr(kwargs)[:80])
        for index, (name, given) in enumerate(zip(ids, kwargs, strict=True)):
            if name not in CHECKS:
                raise RowError(f"instruction_id_list[{index}]", "a known instruction id", repr(name))
            try:
                arguments = arguments_of(CHECKS[name], given)
                if name != LANGUAGE:
                    CHECKS[name]("Well, it is fine.\n\nSo it is.", **arguments)  # arguments of another type
            except (TypeError, ValueError, IndexError, AttributeError, KeyError) as error:
                raise RowError(f"kwargs[{index}]", f"the arguments of {name}", str(error)) from error
            if name == LANGUAGE and importlib.util.find_spec("langdetect") is None:
                message = f"the instruction {LANGUAGE} needs the langdetect package"
                raise UnsupportedError(message, hints=("pip install langdetect",))
        mode = _field(row, "grading_mode")
        if mode not in (None, "binary", "fraction"):
            raise RowError("grading_mode", "binary or fraction", repr(mode))

    async def verify(self, row: Row, response: Response, session: Session) -> GradeResult:
        followed = {}
        asked = zip(_field(row, "instruction_id_list"), _field(row, "kwargs"), strict=True)
        for index, (name, given) in enumerate(asked):
            kept = bool(response.text.strip()) and CHECKS[name](response.text, **arguments_of(CHECKS[name], given))
            followed[f"{index}:{name}"] = float(kept)
        fraction = sum(followed.values()) / len(followed)
        mode = _field(row, "grading_mode") or self.config.grading_mode
        reward = fraction if mode == "fraction" else float(fraction == 1.0)
        return GradeResult(reward, {"followed": fraction}, details={"instructions": followed})


def _field(row: Row, name: str) -> Any:
    """A verifier field, which newer public rows keep under `verifier_metadata` and older ones at the top."""
    metadata = row.get("verifier_metadata")
    inside = metadata.get(name) if isinstance(metadata, Mapping) else None
    return row.get(name) if inside is None else inside


def arguments_of(check: Check, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments of `check` among a row's kwargs, nulls dropped."""
    names = list(inspect.signature(check).parameters)[1:]
    present = {name: (given or {}).get(name) for name in names}
    missing = [name for name, value in present.items() if value is None]
    if missing:
        raise ValueError(f"missing {', '.join(missing)}")
    return present
