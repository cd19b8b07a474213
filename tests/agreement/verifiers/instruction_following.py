"""instruction_following: every instruction, alone and with another, on texts that were written for it and for others.

NeMo-Gym's checks are the package of github.com/abukharin-nv/verifiable-instructions, which must be importable, with NLTK
and its punkt_tab.
"""

from __future__ import annotations

import random
from typing import Any

from tests.agreement.answers import Items, mutated_text, pick, styled
from tests.agreement.compare import LAST_MESSAGE, THINK_TAGS, Rule
from tests.agreement.gym import Gym
from tests.agreement.rows import asking, read

PROMPT = "Write about the harbour of Oslo."
PROSE = (
    "The harbour of Oslo lies at the end of a long fjord. Ferries leave every ten minutes, and the trip to the islands"
    " takes half an hour.\n\nIn summer people swim there. Is it cold? Not at all! Dr. Lie says the water is 19.5 degrees,"
    " e.g. near the opera."
)
LISTED = "## The harbour\n\n* Ferries\n* Bathing\n- The opera\n\n**Note:** bring a towel.\n\nP.S. The water is *cold*."
PLAIN = "harbour ships sail out at dawn and the city wakes"

INSTRUCTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "keywords:existence": ({"keywords": ["harbour", "ferries"]}, PROSE),
    "keywords:frequency": ({"keyword": "the", "frequency": 3, "relation": "at least"}, PROSE),
    "keywords:forbidden_words": ({"forbidden_words": ["boat", "sea"]}, PROSE),
    "keywords:letter_frequency": ({"letter": "e", "let_frequency": 20, "let_relation": "at least"}, PROSE),
    "keywords:no_adjacent_consecutive": ({}, "harbour ships call daily"),
    "keywords:word_once": ({"keyword": "opera"}, PROSE),
    "keywords:word_count_different_numbers": ({"keyword": "the", "frequency": 5, "relation": "less than"}, PROSE),
    "keywords:exclude_word_harder": ({"keyword": "boat"}, PROSE),
    "keywords:palindrome": ({}, "The level of the sea rises."),
    "keywords:keyword_specific_position": ({"keyword": "harbour", "n": 1, "m": 2}, PROSE),
    "keywords:start_end": ({}, "Ships come and go, and so do ships"),
    "language:response_language": ({"language": "en"}, PROSE),
    "length_constraints:number_sentences": ({"num_sentences": 5, "relation": "at least"}, PROSE),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, f"{PROSE}\n\n***\n\n{PLAIN}."),
    "length_constraints:number_words": ({"num_words": 45, "relation": "at least"}, PROSE),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "in"},
        PROSE,
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "Meet me at [place] on [date], please."),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, LISTED),
    "detectable_format:number_bullet_lists": ({"num_bullets": 3}, LISTED),
    "detectable_format:constrained_response": ({}, "My answer is yes."),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, LISTED),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2},
        f"Section 1\n{PLAIN}\n\nSection 2\n{PLAIN}",
    ),
    "detectable_format:json_format": ({}, '{"harbour": "Oslo", "ferries": 3}'),
    "detectable_format:title": ({}, f"<<The harbour>>\n\n{PROSE}"),
    "detectable_format:sentence_hyphens": ({}, "The harbour is old.-Ships come in.-They leave."),
    "detectable_format:square_brackets": ({}, "[ships] [come] [and] [go]"),
    "detectable_format:bigram_wrapping": ({}, "<<ships come>> <<and go>>"),
    "combination:two_responses": ({}, f"{PROSE}\n******\n{PLAIN}"),
    "combination:repeat_prompt": ({"prompt_to_repeat": PROMPT}, f"{PROMPT}\n\n{PROSE}"),
    "startend:end_checker": ({"end_phrase": "Is there anything else?"}, f"{PROSE} Is there anything else?"),
    "startend:quotation": ({}, f'"{PLAIN}"'),
    "change_case:capital_word_frequency": ({"capital_frequency": 2, "capital_relation": "at least"}, f"THE OSLO {PLAIN}"),
    "change_case:english_capital": ({}, PROSE.upper()),
    "change_case:english_lowercase": ({}, PROSE.lower()),
    "punctuation:no_comma": ({}, f"{PLAIN}."),
    "punctuation:punctuation_dot": ({}, PLAIN),
    "punctuation:punctuation_exclamation": ({}, f"{PLAIN}."),
    "copy:repeat_phrase": (
        {"phrase": "ships come and go daily", "small_n": 2},
        "ships come and stay daily\nships come and sail daily",
    ),
    "copy:copy": ({"prompt_to_repeat": PROMPT}, PROMPT),
    "copy:copying_simple": ({"prompt_to_repeat": PROMPT}, PROMPT),
    "copy:copying_multiple": ({"prompt_to_repeat": PROMPT, "N": 2}, f"{PROMPT}\n******\n{PROMPT}"),
    "new:copy_span_idx": ({"prompt_to_repeat": PROMPT, "n_start": 6, "n_end": 23}, PROMPT[6:23]),
    "paragraphs:paragraphs": ({}, f"{PROSE}\n***\n{PLAIN}"),
    "paragraphs:paragraphs2": ({}, f"{PLAIN}.\n\n{PLAIN}!"),
    "first_word:first_word_sent": ({"first_word": "ships"}, "Ships come. Ships go.\nShips sink."),
    "first_word:first_word_answer": ({"first_word": "the"}, PROSE),
    "last_word:last_word_sent": ({"last_word": "harbour"}, "They leave the harbour. They like the harbour!"),
    "last_word:last_word_answer": ({"last_word": "opera"}, PROSE),
    "count:lowercase_counting": ({"N": 12}, PLAIN),
    "count:counting_composition": ({"n_sent": 2, "n_words": 3}, "\n***\n".join(["Ships come in. Ships go out."] * 3)),
    "count:count_unique": ({}, PLAIN),
    "count:count_increment_word": ({"keyword1": "opera", "keyword2": "ships"}, "ships near the opera, ships at sea"),
    "letters:letter_counting": ({"N": 60, "relation": "at least"}, PROSE),
    "letters:letter_counting2": ({"letter": "e", "let_frequency": 8, "let_relation": "less than"}, PLAIN),
}
"""Instruction → (arguments, a text that follows it)."""


def rows(gym: Gym, rng: random.Random) -> list[dict[str, Any]]:
    made = []
    for name, (arguments, _) in INSTRUCTIONS.items():
        other = rng.choice(list(INSTRUCTIONS))
        pairs = [[name]] if rng.random() < 0.7 or other == name else [[name, other]]
        for ids in pairs:
            mode = pick(rng, {"binary": 3, "fraction": 1})
            made.append(
                asking(
                    PROMPT,
                    id=len(made),
                    instruction_id_list=ids,
                    prompt=PROMPT,
                    kwargs=[INSTRUCTIONS[each][0] for each in ids],
                    grading_mode=mode,
                )
            )
    return [*made, *read(gym.data("instruction_following"))]


def answer(row: dict[str, Any], rng: random.Random) -> tuple[str, Items]:
    ids = row["instruction_id_list"]
    kind = pick(rng, {"for it": 45, "changed": 30, "for another": 20, "cleaned": 5})
    text = INSTRUCTIONS[rng.choice(ids)][1]
    if kind == "changed":
        for _ in range(rng.choice((1, 1, 3))):
            text = mutated_text(text, rng)
    elif kind == "for another":
        text = rng.choice([*(each for _, each in INSTRUCTIONS.values()), PROSE, LISTED])
    elif kind == "cleaned":
        text = text.replace("\n", " ").strip(".!")
    style, items = styled(text, PLAIN, rng)
    return f"{kind}, {style}", items


def theirs(gym: Gym) -> Any:
    return gym.grader("instruction_following", "InstructionFollowing")


RULES = (THINK_TAGS, LAST_MESSAGE)
