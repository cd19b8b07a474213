from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron_steps.environments.base import Response, Session
from nemotron_steps.environments.registry import create
from nemotron_steps.environments.text.instruction_checks import CHECKS, arguments_of, sentences, words
from nemotron_steps.errors import DataError

PROMPT = {"prompt_to_repeat": "Say hi."}

# instruction id, its arguments, a text that follows it, a text that does not
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "A Cat and a dog.", "A cat."),
    ("keywords:frequency", {"keyword": "a.b", "frequency": 2, "relation": "at least"}, "a.b A.B", "a.b axb"),
    ("keywords:frequency", {"keyword": "x", "frequency": 2, "relation": "less than"}, "x", "x x"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "concatenate", "a Cat!"),
    ("keywords:letter_frequency", {"letter": "Z", "let_frequency": 2, "let_relation": "at least"}, "zZ", "z"),
    ("keywords:no_adjacent_consecutive", {}, "apple cat", "apple banana"),
    ("keywords:word_once", {"keyword": "once"}, "once", "once once"),
    ("keywords:exclude_word_harder", {"keyword": "so"}, "also", "is so good"),
    ("keywords:palindrome", {}, "see level here", "see here a"),
    ("keywords:keyword_specific_position", {"keyword": "red", "n": 2, "m": 3}, "One. It is red.", "It is red. No."),
    ("keywords:start_end", {}, "Home is my home", "Home is my home."),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "A b. C d!", "Dr. No ran."),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "two words", "three words here"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Go"},
        "a\n\n'Go, now",
        "Go\n\nnow",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "x\nP.S. y", "x"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n** b **"),
    ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and *b*", "*a* and **"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1 a SECTION 2 b",
        "SECTION 1",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<Poem>>\nx", "<<>> x"),
    ("detectable_format:square_brackets", {}, "[so] [it]", "[so] it"),
    ("detectable_format:bigram_wrapping", {}, "<<I am>> <<at home>>", "I am at home"),
    ("detectable_format:sentence_hyphens", {}, "One two.-Three four.", "One two. - Three four."),
    ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
    ("combination:repeat_prompt", PROMPT, "say HI. Hi!", "Hi! Say hi."),
    ("startend:end_checker", {"end_phrase": "The end."}, 'x "the END."', "The end. No."),
    ("startend:quotation", {}, '"x"', '"x'),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, "AB CD e", "AB c"),
    ("change_case:english_capital", {}, "ALL CAPS 1.", "Not CAPS"),
    ("change_case:english_lowercase", {}, "all low.", "Not low"),
    ("punctuation:no_comma", {}, "a b", "a, b"),
    ("punctuation:punctuation_dot", {}, "a!", "a."),
    ("punctuation:punctuation_exclamation", {}, "a.", "a!"),
    ("copy:repeat_phrase", {"phrase": "one two three", "small_n": 2}, "one 2 three one X three", "one 2 three"),
    ("copy:copy", PROMPT, " say hi. ", "hi"),
    ("copy:copying_simple", PROMPT, "Say hi.", "Say hi. ok"),
    ("copy:copying_multiple", {**PROMPT, "N": 2}, "Say hi.\n******\nSay hi.", "Say hi."),
    ("new:copy_span_idx", {**PROMPT, "n_start": 4, "n_end": 6}, "hi", "say"),
    ("paragraphs:paragraphs", {}, "a\n***\nb", "a"),
    ("paragraphs:paragraphs2", {}, "a\n\nb", "a\n\nb\n\nc"),
    ("first_word:first_word_sent", {"first_word": "so"}, "So it is. So be it.", "So it is. Be it."),
    ("first_word:first_word_answer", {"first_word": "so"}, "So it is.", "It is so."),
    ("last_word:last_word_sent", {"last_word": "it"}, "Do it. Be it!", "Do it. Be good."),
    ("last_word:last_word_answer", {"last_word": "it"}, "Do it.", "It is."),
    ("count:lowercase_counting", {"N": 2}, "Two low WORDS here", "all these are low"),
    ("count:counting_composition", {"n_sent": 1, "n_words": 2}, "A b.\n***\nC d.\n***\nE f.", "A b.\n***\nC d."),
    ("count:count_unique", {}, "each word once", "each word word"),
    ("count:count_increment_word", {"keyword1": "aa", "keyword2": "bb"}, "aa bb bb", "aa bb"),
    ("letters:letter_counting", {"N": 3, "relation": "at least"}, "abc", "a1b"),
    ("letters:letter_counting2", {"letter": "a", "let_frequency": 1, "let_relation": "less than"}, "b", "a"),
    ("keywords:word_count_different_numbers", {"keyword": "x", "frequency": 1, "relation": "at least"}, "x", "y"),
]


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES)
def test_each_check_tells_following_from_not(name: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    assert CHECKS[name](good, **arguments) is True
    assert CHECKS[name](bad, **arguments) is False


def test_every_check_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(CHECKS) - {"language:response_language"}


@given(text=st.text(max_size=80), case=st.sampled_from(CASES))
@settings(max_examples=400)
def test_checks_answer_on_any_text(text: str, case: tuple[str, dict[str, Any], str, str]) -> None:
    assert CHECKS[case[0]](text, **case[1]) in (True, False)


def test_words_and_sentences() -> None:
    assert words("Don't split well-known, 3.5 words_x") == ["Don't", "split", "well-known", "3", "5", "words", "x"]
    assert sentences('Mr. Smith paid 3.50. Why? "Yes." ok\nnew') == [
        "Mr. Smith paid 3.50.",
        "Why?",
        '"Yes."',
        "ok\nnew",
    ]


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


def test_arguments_are_picked_by_name() -> None:
    check = CHECKS["length_constraints:number_words"]
    assert arguments_of(check, {"num_words": 3, "relation": "at least", "N": 7}) == {
        "num_words": 3,
        "relation": "at least",
    }


def test_the_fields_may_stand_under_verifier_metadata() -> None:
    fields = {"instruction_id_list": ["punctuation:no_comma", "keywords:word_once"], "kwargs": [None, {"keyword": "a"}]}
    row = {"responses_create_params": {"input": "Say."}, "verifier_metadata": {**fields, "grading_mode": "fraction"}}
    environment = create("instruction_following")
    environment.check_row(row, "f:1")
    assert asyncio.run(environment.verify(row, Response("a, b"), Session())).reward == 0.5
    broken = {**row, "verifier_metadata": {**fields, "kwargs": []}}
    with pytest.raises(DataError, match="kwargs"):
        environment.check_row(broken, "f:1")


def graded(row: dict[str, Any], text: str, **config: Any) -> float | None:
    environment = create("instruction_following", config)
    environment.check_row(row, "f:1")
    return asyncio.run(environment.verify(row, Response(text), Session())).reward


def test_the_mode_is_the_rows_or_the_settings() -> None:
    half = "Two, low WORDS here"
    assert graded(row(*TWO), half, grading_mode="fraction") == 0.5
    assert graded(row(*TWO, grading_mode="binary"), half, grading_mode="fraction") == 0.0
    assert graded(row(*TWO, verifier_metadata={"grading_mode": "fraction"}, grading_mode="binary"), half) == 0.5


def test_an_instruction_that_is_given_twice_counts_twice() -> None:
    often = ["keywords:word_once"] * 2
    twice = row(often, [{"keyword": "a"}, {"keyword": "b"}], grading_mode="fraction")
    assert [graded(twice, text) for text in ("a b", "a", "b", "c")] == [1.0, 0.5, 0.5, 0.0]


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
    ("copy:copying_multiple", {"prompt_to_repeat": "a", "N": 2}, ["a******A "], ["a", "a******a******a", "a******b"]),
    ("new:copy_span_idx", {"prompt_to_repeat": "abcd", "n_start": 1, "n_end": 3}, ["bc", " BC"], ["abc", "bcd", "b"]),
    ("paragraphs:paragraphs2", {}, ["a\n\nb", "\n\na\n\nb\n\n"], ["a", "a\n\n\n\nb"]),
    ("first_word:first_word_sent", {"first_word": ["So", "x"]}, ["so a. So b.", ""], ["so a. b so."]),
    ("first_word:first_word_answer", {"first_word": " So "}, ["so a"], ["", "a so", "so, a"]),
    ("last_word:last_word_sent", {"last_word": ["It", "x"]}, ["a it. b 'IT'!"], ["it a.", "it. it a"]),
    ("last_word:last_word_answer", {"last_word": " It "}, ["a it!", '"IT"'], ["", "it a", "ait"]),
    ("count:lowercase_counting", {"N": 1}, ["A b", "B1c"], ["a b", "A b c"]),
    (
        "count:counting_composition",
        {"n_sent": 2, "n_words": 1},
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


@pytest.mark.parametrize(("name", "arguments", "follow", "break_"), EDGES)
def test_a_check_changes_its_answer_where_its_rule_says(
    name: str, arguments: dict[str, Any], follow: list[str], break_: list[str]
) -> None:
    check = CHECKS[name]
    assert [text for text in follow if check(text, **arguments) is not True] == []
    assert [text for text in break_ if check(text, **arguments) is not False] == []


def test_a_relation_nobody_defined_is_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        CHECKS["length_constraints:number_words"]("a b", num_words=2, relation="exactly")


@pytest.mark.parametrize(("text", "follows"), [("[a] [b]", True), ("[a] [b", False), ("[a] b]", False), ("a", False)])
def test_square_brackets_are_on_both_sides_of_every_word(text: str, follows: bool) -> None:
    assert CHECKS["detectable_format:square_brackets"](text) is follows


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
