from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemotron_steps.environments.judged import genrm_scores as rule

DEFAULTS = (3.0, 3.5)


def parse(text: str) -> tuple[float, float, float] | None:
    return rule.parse_reply(text, *DEFAULTS)


def test_circular_pairs_give_every_member_each_position_once() -> None:
    assert rule.pairs("circular", 4) == [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert rule.pairs("circular", 2) == [(0, 1), (1, 0)]
    assert rule.pairs("all_pairs", 3) == [(0, 1), (0, 2), (1, 2)]
    assert rule.pairs("circular", 1) == []


def test_first_valid_fenced_json_wins_over_later_objects() -> None:
    reply = (
        '{"score_1": 1, "score_2": 1, "ranking": 1}\n'
        '```json\n{"notes": 1}\n```\n'
        '```json\n{"score_1": 4, "score_2": 2, "ranking": 2}\n```\n'
        '```json\n{"score_1": 2, "score_2": 4, "ranking": 5}\n```'
    )
    assert parse(reply) == (4.0, 2.0, 2.0)


def test_without_a_fence_the_last_valid_object_wins() -> None:
    reply = 'a {"score_1": 1, "score_2": 2, "ranking": 6} b {"score_1": 5, "score_2": 1, "ranking": 1} {broken'
    assert parse(reply) == (5.0, 1.0, 1.0)


def test_nested_overall_and_partial_verdicts() -> None:
    assert parse('{"rubric": [], "overall": {"score_1": 2, "score_2": 3, "ranking": 4}}') == (2.0, 3.0, 4.0)
    assert parse('{"ranking": 2}') == (3.0, 3.0, 2.0)
    assert parse('{"score_1": "4", "score_2": 2.5, "ranking": 2}') == (4.0, 2.5, 2.0)


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "the first is better",
        '{"score_1": 9, "score_2": 1, "ranking": 1}',
        '{"score_1": 5, "score_2": 1, "ranking": 0}',
        '{"score_1": NaN, "score_2": 1, "ranking": 1}',
        '{"score_1": true, "score_2": 1, "ranking": 1}',
        '{"score_1": [5], "score_2": 1, "ranking": 1}',
        '{"\\u0073core_1": 5, "\\u0073core_2": 1, "r\\u0061nking": 1}',
        "[1, 2, 3]",
        "{" * 50_000,
    ],
)
def test_a_reply_that_is_no_verdict_is_none(reply: str) -> None:
    assert parse(reply) is None


@given(st.text())
def test_parse_never_raises_and_stays_in_range(text: str) -> None:
    found = parse(text)
    assert found is None or (1 <= found[0] <= 5 and 1 <= found[1] <= 5 and 1 <= found[2] <= 6)


@given(
    st.text(alphabet=st.characters(blacklist_characters="{}`"), max_size=40),
    st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 6)),
    st.text(alphabet=st.characters(blacklist_characters="{}`"), max_size=40),
)
def test_a_verdict_is_found_in_any_prose(before: str, scores: tuple[int, int, int], after: str) -> None:
    verdict = json.dumps(dict(zip(("score_1", "score_2", "ranking"), scores, strict=True)))
    assert parse(f"{before}{verdict}{after}") == tuple(map(float, scores))
    assert parse(f"{before}\n```json\n{verdict}\n```{after}") == tuple(map(float, scores))


def test_base_scores_hand_computed() -> None:
    comparisons = [
        rule.Comparison(0, 1, 4.0, 2.0, 2.0),
        rule.Comparison(1, 2, 3.0, 3.0, 2.0),  # tie: +1.5 / -1.5
        rule.Comparison(2, 0, 1.0, 5.0, 6.0),
    ]
    assert rule.base_scores(comparisons, 4, 3.0) == [4.5, 3.25, 1.25, 3.0]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 6)), min_size=2, max_size=8))
def test_tie_break_moves_points_without_making_any(scores: list[tuple[int, int, int]]) -> None:
    n = len(scores)
    comparisons = [
        rule.Comparison(i, j, *map(float, s)) for (i, j), s in zip(rule.pairs("circular", n), scores, strict=True)
    ]
    base = rule.base_scores(comparisons, n, 3.0)
    assert math.isclose(sum(base) * 2, sum(s[0] + s[1] for s in scores), abs_tol=1e-9)


def test_shortest_bonus_needs_a_top_score_and_something_written() -> None:
    # N=10, top 20 %: the threshold is the second best score.
    scores = [5.0, 4.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    lengths = [50, 10, 0, 40, 40, 40, 40, 40, 40, 40]
    assert rule.shortest_bonus(scores, lengths, 0.5, 0.2)[1] == 0.5
    lengths[2] = 5
    assert rule.shortest_bonus(scores, lengths, 0.5, 0.2) == [0.0] * 10
    assert rule.shortest_bonus(scores, [0] * 10, 0.5, 0.2) == [0.0] * 10


def test_shortest_bonus_of_small_groups_goes_to_the_best_only() -> None:
    # N=4, top 20 %: max(0, int(0.8) - 1) = 0, so only the best score reaches the threshold.
    assert rule.shortest_bonus([4.0, 4.5, 3.0, 1.0], [3, 9, 9, 9], 0.5, 0.2) == [0.0] * 4
    assert rule.shortest_bonus([4.5, 4.5, 3.0, 1.0], [3, 9, 9, 9], 0.5, 0.2) == [0.5, 0.0, 0.0, 0.0]


def test_centred_weights_hand_computed() -> None:
    assert rule.centred_weights([10, 20, 40]) == pytest.approx([1 - 5 / 9, 2 / 3 - 5 / 9, -5 / 9])
    assert rule.centred_weights([7, 7]) == [0.0, 0.0]


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_centred_weights_sum_to_zero_and_prefer_the_shorter(lengths: list[int]) -> None:
    weights = rule.centred_weights(lengths)
    assert math.isclose(sum(weights), 0.0, abs_tol=1e-9)
    assert all(-1.0 < weight < 1.0 for weight in weights)
    order = sorted(range(len(lengths)), key=lambda k: lengths[k])
    assert all(weights[a] >= weights[b] for a, b in itertools.pairwise(order))


def test_style_density_counts_marks_outside_code_blocks() -> None:
    prose = "# T\n- a\n1. b\n**c** \U0001f600"
    assert rule.style_density(prose) == pytest.approx(5 / len(prose))
    assert rule.style_density(prose + "```\n# not a header\n- nor a list\n```") == pytest.approx(5 / len(prose))
    assert rule.style_density("**__a__**") == pytest.approx(2 / 9)
    assert rule.style_density("") == 0.0


@pytest.mark.parametrize(
    "mark",
    ["# a", "###### a", "- a", "* a", "+ a", "  3. a", "**a**", "__a__", "\u2600", "\u2b50", "\ufe0f", "\U0001f1e9"],
)
def test_each_mark_of_markdown_counts_once(mark: str) -> None:
    assert rule.style_density(mark) == pytest.approx(1 / len(mark.strip()))


@pytest.mark.parametrize(
    "text",
    ["####### a", "#a", "-a", "a - b", "1.a", "*a*", "_a_", "** **\n**", "\u7b54", "\u3042\u30a2", "\uff21", "\u2502"],
)
def test_what_looks_like_a_mark_and_is_none(text: str) -> None:
    assert rule.style_density(text) == 0.0 or text.startswith("** **")
