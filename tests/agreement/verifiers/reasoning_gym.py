"""reasoning_gym: rows of the library's own data sets."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.agreement.answers import Items, asking, mutated_text, pick, read, styled
from tests.agreement.compare import FINAL_MESSAGE, Rule
from tests.agreement.gym import Gym

DATA_SETS = (
    "basic_arithmetic", "chain_sum", "countdown", "simple_equations", "polynomial_equations", "simple_integration",
    "polynomial_multiplication", "gcd", "lcm", "fraction_simplification", "prime_factorization", "number_sorting",
    "bitwise_arithmetic", "decimal_arithmetic", "power_function", "knights_knaves", "syllogism",
    "propositional_logic", "zebra_puzzles", "leg_counting", "letter_counting", "word_sorting", "spell_backward",
    "caesar_cipher", "base_conversion", "calendar_arithmetic", "time_intervals", "family_relationships", "n_queens",
    "spiral_matrix", "rotate_matrix", "binary_matrix", "mini_sudoku", "sudoku", "maze", "shortest_path",
    "course_schedule", "largest_island", "tower_of_hanoi", "string_insertion", "letter_jumble", "sentence_reordering",
    "game_of_life", "self_reference", "puzzle24", "rush_hour", "sokoban",
)  # fmt: skip

SHAPES = {
    "<answer>%A</answer>": 55,
    "<answer>\n%A\n</answer>": 8,
    "<answer> %A </answer>": 4,
    "%A": 10,
    "The answer is %A.": 5,
    "\\boxed{%A}": 8,
    "$\\boxed{%A}$": 3,
    "<answer>\\boxed{%A}</answer>": 3,
    "<answer>%O</answer> No: <answer>%A</answer>": 2,
    "<answer>%A": 1,
    "\\boxed{%O}, then \\boxed{%A}": 1,
    "**Answer:** %A": 2,
}


def rows(gym: Gym, rng: random.Random) -> list[dict[str, Any]]:
    import reasoning_gym

    made = []
    for name in DATA_SETS:
        for entry in reasoning_gym.create_dataset(name, size=2, seed=rng.randrange(1000)):
            plain = json.loads(json.dumps(entry, default=str))
            made.append(asking(plain["question"], **{key: plain[key] for key in ("question", "answer", "metadata")}))
    return [*read(gym.data("reasoning_gym")), *made]


def answer(row: dict[str, Any], rng: random.Random) -> tuple[str, Items]:
    right = row["answer"] or "[]"
    kind = pick(rng, {"right": 50, "mutated": 30, "spaced": 4, "nothing like it": 8, "number changed": 8})
    wrong = rng.choice(("42", "I do not know", "[1, 2]", "x**2 + 1"))
    chosen = right
    if kind == "mutated":
        chosen = mutated_text(right, rng)
    elif kind == "spaced":
        chosen = right.replace(",", ", ").replace("+", " + ")
    elif kind == "nothing like it":
        chosen = wrong
    elif kind == "number changed":
        digits = [place for place, character in enumerate(right) if character.isdigit()]
        place = rng.choice(digits) if digits else 0
        chosen = f"{right[:place]}{rng.randrange(10)}{right[place + 1 :]}"
    shape = pick(rng, SHAPES)
    core = shape.replace("%A", chosen).replace("%O", wrong)
    style, items = styled(core, shape.replace("%A", wrong).replace("%O", chosen), rng)
    return f"{kind}, {style}", items


def theirs(gym: Gym) -> Any:
    return gym.grader("reasoning_gym", "ReasoningGym")


RULES = (
    FINAL_MESSAGE,
    Rule(
        "the last complete box counts (there the first, up to its first closing brace)",
        lambda answer: "\\boxed" in answer.final,
    ),
)
