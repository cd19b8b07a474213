import re

from nemotron_steps.runs.report.data import StepReport
from nemotron_steps.runs.report.svg import Node, arranged, plan_graph


def test_a_plan_has_an_edge_for_every_input_that_a_step_makes() -> None:
    """The farther it goes, the farther out it runs."""
    reads = {"a": ("",), "b": ("a",), "c": ("a", "")}
    nodes = [Node(name, "ran", "ran", tuple((parent, "x") for parent in parents)) for name, parents in reads.items()]
    near, far = (float(x) for x in re.findall(r'class="edge"[^>]* d="M[\d.]+,[\d.]+ C([\d.]+),', plan_graph(nodes)))
    assert 4 <= far < near < 56


def test_what_was_measured_once_is_no_curve() -> None:
    curves = {"loss": [(1.0, 2.0), (2.0, 0.5)], "rows": [(3.0, 7.0)]}
    found = arranged(StepReport("a", {}, curves=curves))
    assert (list(found.shown), list(found.once)) == (["loss"], ["rows"])
