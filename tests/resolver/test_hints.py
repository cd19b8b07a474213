"""What is told with a problem, and which steps are named as those that make what is needed."""

from __future__ import annotations

import pytest

from nemotron_steps.errors import PlanError
from nemotron_steps.resolver.problems import PlanProblem, raise_all


def test_one_problem_is_counted_as_one_and_none_raises_nothing() -> None:
    raise_all([], "cannot plan 'x'")
    for count, said in ((1, "cannot plan 'x': 1 problem, nothing"), (2, "cannot plan 'x': 2 problems, nothing")):
        with pytest.raises(PlanError, match=said):
            raise_all([PlanProblem("it")] * count, "cannot plan 'x'")
