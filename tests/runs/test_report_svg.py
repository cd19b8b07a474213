from __future__ import annotations

import re

from nemotron_steps.runs.report.svg import Node, plan_graph


def test_a_plan_has_an_edge_for_every_input_that_a_step_makes() -> None:
    """The farther it goes, the farther out it runs."""
    reads = {"a": ("",), "b": ("a",), "c": ("a", "")}
    nodes = [Node(name, "ran", "ran", tuple((parent, "x") for parent in parents)) for name, parents in reads.items()]
    near, far = (float(x) for x in re.findall(r'class="edge"[^>]* d="M[\d.]+,[\d.]+ C([\d.]+),', plan_graph(nodes)))
    assert 4 <= far < near < 56
