from nemotron_steps.runs.report.data import StepReport
from nemotron_steps.runs.report.page import arranged


def test_what_was_measured_once_is_no_curve() -> None:
    curves = {"loss": [(1.0, 2.0), (2.0, 0.5)], "rows": [(3.0, 7.0)]}
    found = arranged(StepReport("a", {}, curves=curves))
    assert (list(found.shown), list(found.once)) == (["loss"], ["rows"])
