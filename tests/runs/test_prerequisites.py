"""Whose data is looked at before a run starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.errors import DataError, PlanError
from nemotron_steps.runs import prerequisites


def test_only_steps_that_are_still_to_run_are_asked_about_their_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(config: Any, inputs: Any) -> None:
        raise DataError("no rows")

    monkeypatch.setattr(prerequisites, "imported", lambda reference, planned: check)
    monkeypatch.setattr(prerequisites, "validated_config", lambda planned, opened: None)
    manifest = SimpleNamespace(step=SimpleNamespace(preflight="steps.own:check"))
    planned: Any = SimpleNamespace(key="own", cached={"rows": "digest"}, manifest=manifest, inputs={})
    plan: Any = [planned]
    nothing: Any = None
    prerequisites.refuse_unusable_data(plan, nothing, nothing)
    planned.cached = None
    with pytest.raises(PlanError) as caught:
        prerequisites.refuse_unusable_data(plan, nothing, nothing)
    assert [problem.what for problem in caught.value.problems] == ["no rows"]
