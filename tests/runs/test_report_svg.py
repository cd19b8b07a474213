from __future__ import annotations

import re

from nemotron_steps.runs.report.svg import Node, headlines, moving_average, plan_graph


def test_a_moving_average_is_over_as_many_points_on_both_sides() -> None:
    assert moving_average([(0.0, 0.0), (1.0, 3.0), (2.0, 9.0)]) == [(0.0, 0.0), (1.0, 4.0), (2.0, 9.0)]
    steps = [(float(at), float(at >= 50)) for at in range(100)]
    assert [x for x, y in moving_average(steps) if 0 < y < 1] == [45.0 + at for at in range(10)]


def test_a_plan_has_an_edge_for_every_input_that_a_step_makes() -> None:
    """The farther it goes, the farther out it runs."""
    reads = {"a": ("",), "b": ("a",), "c": ("a", "")}
    nodes = [Node(name, "ran", "ran", tuple((parent, "x") for parent in parents)) for name, parents in reads.items()]
    near, far = (float(x) for x in re.findall(r'class="edge"[^>]* d="M[\d.]+,[\d.]+ C([\d.]+),', plan_graph(nodes)))
    assert 4 <= far < near < 56


def test_of_the_metrics_of_a_word_the_mean_comes_first_then_the_least_deep_then_the_shortest() -> None:
    def first(*names: str) -> str:
        return headlines(names)[0]

    assert first("reward/a", "reward/b/mean") == "reward/b/mean"
    assert first("reward/a/b", "reward/abcdef") == "reward/abcdef"
    assert first("reward/ab", "reward/b") == "reward/b"
    assert headlines(["ankle", "loss"])[0] == "loss", "two letters are a word and no part of one"
    many = [*(f"other/{at}" for at in range(12)), "loss_reward", "policy_loss_of_both"]
    assert headlines(many) == ["loss_reward", "policy_loss_of_both"], "each once, though it holds two of the words"
