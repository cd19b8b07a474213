import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.environments.base import Response, Session
from nemotron_steps.environments.registry import create
from nemotron_steps.environments.text.instruction_following import CHECKS, sentences
from nemotron_steps.errors import DataError

PROMPT = {"prompt_to_repeat": "Say hi."}

# instruction id, its arguments, a text that follows it, a text that does not
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:word_once", {"keyword": "once"}, "once", "once once"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "A b. C d!", "Dr. No ran."),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "two words", "three words here"),
    ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
    ("detectable_format:square_brackets", {}, "[so] [it]", "[so] it"),
    ("punctuation:no_comma", {}, "a b", "a, b"),
    ("punctuation:punctuation_dot", {}, "a!", "a."),
    ("punctuation:punctuation_exclamation", {}, "a.", "a!"),
    ("copy:copy", PROMPT, " say hi. ", "hi"),
    ("copy:copying_simple", PROMPT, "Say hi.", "Say hi. ok"),
    ("paragraphs:paragraphs", {}, "a\n***\nb", "a"),
    ("letters:letter_counting2", {"letter": "a", "let_frequency": 1, "let_relation": "less than"}, "b", "a"),
    ("keywords:word_count_different_numbers", {"keyword": "x", "frequency": 1, "relation": "at least"}, "x", "y"),
]


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES)
def test_each_check_tells_following_from_not(name: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    assert CHECKS[name](good, **arguments) is True
    assert CHECKS[name](bad, **arguments) is False


def test_every_check_has_a_case() -> None:
    assert {case[0] for case in (*CASES, *EDGES)} == set(CHECKS) - {"language:response_language"}


def row(ids: list[str], kwargs: list[Any], **more: Any) -> dict[str, Any]:
    return {
        "responses_create_params": {"input": "Write."},
        "instruction_id_list": ids,
        "kwargs": kwargs,
        **more,
    }


TWO = (["punctuation:no_comma", "count:lowercase_counting"], [None, {"N": 2, "num_words": None}])


@pytest.mark.parametrize(
    ("text", "mode", "reward"),
    [
        ("Two low WORDS here", None, 1.0),
        ("Two, low WORDS here", None, 0.0),
        ("Two, low WORDS here", "fraction", 0.5),
        ("", None, 0.0),
        ("  ", "fraction", 0.0),
    ],
)
def test_all_or_the_fraction(text: str, mode: str | None, reward: float) -> None:
    environment = create("instruction_following")
    both = row(*TWO, **({"grading_mode": mode} if mode else {}))
    environment.check_row(both, "f:1")
    assert asyncio.run(environment.verify(both, Response(text), Session())).reward == reward


# instruction id, its arguments, texts that just follow it, texts that just do not
EDGES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("keywords:frequency", {"keyword": "x", "frequency": 2, "relation": "less than"}, ["", "x"], ["x x", "x x x"]),
    ("keywords:frequency", {"keyword": "x", "frequency": 2, "relation": "at least"}, ["x x", "x x x"], ["", "x"]),
    ("keywords:frequency", {"keyword": "x", "frequency": 2, "relation": "at most"}, ["x", "x x"], ["x x x"]),
    ("keywords:existence", {"keywords": [" cat "]}, ["concat"], ["dog"]),
    ("keywords:forbidden_words", {"forbidden_words": ["cat", "dog"]}, ["cats dogma"], ["cat", "the Dog."]),
    ("keywords:letter_frequency", {"letter": " Q", "let_frequency": 1, "let_relation": "at most"}, ["q"], ["qQ"]),
    ("keywords:no_adjacent_consecutive", {}, ["b a", "a a c", ""], ["x a B", "a b"]),
    ("keywords:exclude_word_harder", {"keyword": " so "}, ["so it is so", "SO"], ["it so is"]),
    ("keywords:palindrome", {}, ["aa", "noon"], ["a b I", "Anna", ""]),
    (
        "keywords:keyword_specific_position",
        {"keyword": ["a", "b"], "n": 1, "m": 1},
        ["a b. b a."],
        ["b a. a b.", "", "A b."],
    ),
    ("keywords:keyword_specific_position", {"keyword": "a", "n": 2, "m": 2}, ["x. b a."], ["b a.", "x. a", "x. a b"]),
    ("keywords:keyword_specific_position", {"keyword": "a", "n": 0, "m": 1}, [], ["b. a."]),
    ("keywords:keyword_specific_position", {"keyword": "a", "n": 1, "m": 0}, [], ["b a"]),
    ("keywords:start_end", {}, ["Go go", "go, then Go "], ["go", "go away", "go go!"]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, ["a***b", "***a***b***"], ["a", "a***b***c"]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 3}, [], ["a *** *** b"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "go"},
        ["GO. now\n\nb", '"go" a\n\nb'],
        ["go", "go\n\nb\n\nc", "b\n\ngo", "going\n\nb", "\n\ngo\n\nb"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "go"},
        [],
        ["a\n\n\n\ngo"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 1, "nth_paragraph": 0, "first_word": "go"},
        [],
        ["go", "go\n\n"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[a][b]", "[]\n[b] x"],
        ["[a", "[a [b]", "[a\n] [b]"],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["p. p. s", "P.P.S"], ["P.S. x"]),
    ("detectable_content:postscript", {"postscript_marker": "N.B. "}, ["x n.b. y"], ["nxb", "P.S."]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, [" - a\n\t* b", "-a\n-b\nc - d"], ["- a", "-\n-\n-"]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 1}, ["*a*", "**a**"], ["* *", "*a\nb*", "a"]),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": " Part ", "num_sections": 2},
        ["Part 1 Part2"],
        ["Part 1 Part", "part 1 part 2"],
    ),
    ("detectable_format:json_format", {}, ["1", "```JSON\n[]```", "```\n{}\n```\n"], ["", "a {}", "[" * 9999]),
    ("detectable_format:title", {}, ["x\n<<a>>", "<<<a>>>", ">> <<a>>"], ["<<a", "a>>", "<< >>", ">>a<<", "<<<>>>"]),
    ("combination:two_responses", {}, ["a******b", "******a******b******"], ["a", "a******b******c", "a****** a"]),
    ("startend:end_checker", {"end_phrase": " Bye. "}, ["bye.", "so BYE.\n"], ["bye", "Bye. x"]),
    ("startend:quotation", {}, ['""', ' "a" '], ['"', '"a', 'a"', "'a'", ""]),
    ("change_case:capital_word_frequency", {"capital_frequency": 1, "capital_relation": "at most"}, ["A b"], ["A B"]),
    ("change_case:english_capital", {}, ["ABCDEFGHIÄ"], ["ABCDEFGHÄ", "", "Ab", "12"]),
    ("change_case:english_lowercase", {}, ["abcdefghiä"], ["abcdefghä", "", "Ab", "12"]),
    (
        "copy:repeat_phrase",
        {"phrase": "a b c", "small_n": 2},
        ["a x c a y c", "a b c\na y c"],
        ["a x c", "a x c a b c", "a b c a b c", "a x c a y z c", "a x c a y c a z c", "a x\n c a y c"],
    ),
    ("copy:copying_multiple", {"prompt_to_repeat": "a", "N": 2.0}, ["a******A "], ["a", "a******a******a", "a******b"]),
    ("new:copy_span_idx", {"prompt_to_repeat": "abcd", "n_start": 1, "n_end": 3}, ["bc", " BC"], ["abc", "bcd", "b"]),
    ("paragraphs:paragraphs2", {}, ["a\n\nb", "\n\na\n\nb\n\n"], ["a", "a\n\n\n\nb"]),
    ("first_word:first_word_sent", {"first_word": ["So", "x"]}, ["so a. So b.", ""], ["so a. b so."]),
    ("first_word:first_word_answer", {"first_word": " So "}, ["so a"], ["", "a so", "so, a"]),
    ("last_word:last_word_sent", {"last_word": ["It", "x"]}, ["a it. b 'IT'!"], ["it a.", "it. it a"]),
    ("last_word:last_word_answer", {"last_word": " It "}, ["a it!", '"IT"'], ["", "it a", "ait"]),
    ("count:lowercase_counting", {"N": 1}, ["A b", "B1c"], ["a b", "A b c"]),
    (
        "count:counting_composition",
        {"n_sent": 2.0, "n_words": 1},
        ["a. b.***c. d.***e. f."],
        ["a. b.***c. d.", "a. b.***c. d.***e.", "a. b.***c. d.***e. f g.", "a. b.***c d.***e. f."],
    ),
    ("count:count_unique", {}, ["", "a A"], ["a b a"]),
    ("count:count_increment_word", {"keyword1": "a", "keyword2": "b"}, ["a b b"], ["a a b b", "a b", "a b b b"]),
    ("letters:letter_counting", {"N": 2, "relation": "less than"}, ["a1 2"], ["aZ", "abc"]),
    ("detectable_format:sentence_hyphens", {}, ["A b.-C d."], ["A b.- C d.", "a-b. C."]),
    ("detectable_format:bigram_wrapping", {}, ["<<a b>>", "<<a b>> c"], ["<<a b", "a b>>", "<<a b>> c d"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": " Hi. "}, ["hi. x", "HI."], ["x hi.", "hi"]),
]


def test_the_fields_may_stand_under_verifier_metadata() -> None:
    fields = {"instruction_id_list": ["punctuation:no_comma", "keywords:word_once"], "kwargs": [None, {"keyword": "a"}]}
    row = {"responses_create_params": {"input": "Say."}, "verifier_metadata": {**fields, "grading_mode": "fraction"}}
    environment = create("instruction_following")
    environment.check_row(row, "f:1")
    assert asyncio.run(environment.verify(row, Response("a, b"), Session())).reward == 0.5
    broken = {**row, "verifier_metadata": {**fields, "kwargs": []}}
    with pytest.raises(DataError, match="kwargs"):
        environment.check_row(broken, "f:1")


@pytest.mark.parametrize(("name", "arguments", "follow", "break_"), EDGES)
def test_a_check_changes_its_answer_where_its_rule_says(
    name: str, arguments: dict[str, Any], follow: list[str], break_: list[str]
) -> None:
    check = CHECKS[name]
    assert [text for text in follow if check(text, **arguments) is not True] == []
    assert [text for text in break_ if check(text, **arguments) is not False] == []


@pytest.mark.parametrize(
    "short",
    [
        *("Mr.", "Mrs.", "Ms.", "Dr.", "Prof.", "St.", "Sr.", "Jr.", "PROF."),
        *("vs.", "etc.", "e.g.", "i.e.", "a.m.", "p.m.", "No.", "Fig."),
    ],
)
def test_an_abbreviation_ends_no_sentence_but_the_last_of_its_line(short: str) -> None:
    assert sentences(f"It is {short} so. Yes.") == [f"It is {short} so.", "Yes."]
    assert sentences(f"It is {short}\nYes.") == [f"It is {short}", "Yes."]
    assert len(sentences(f"It is x{short} so.")) == 2, "another word that ends like one"


def test_the_language_is_what_langdetect_says_and_nothing_to_tell_it_from_is_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class UnknownError(Exception):
        pass

    def detect(text: str) -> str:
        if not text.strip("1"):
            raise UnknownError
        return "de" if text.startswith("Hallo") else "en"

    factory = SimpleNamespace(seed=None)
    told = SimpleNamespace(DetectorFactory=factory, detect=detect, LangDetectException=UnknownError)
    monkeypatch.setitem(sys.modules, "langdetect", told)  # it is not installed everywhere
    check = CHECKS["language:response_language"]
    assert [check(text, language="de") for text in ("Hallo Welt", "Hello", "111")] == [True, False, True]
    assert factory.seed == 0
