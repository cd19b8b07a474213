from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

from nemotron_steps.api.result import Plot, Result
from nemotron_steps.artifacts.models import Artifact


def test_a_run_is_told_by_what_its_steps_took_that_ran_and_what_the_last_one_came_to() -> None:
    steps = {
        name: SimpleNamespace(state=state, seconds=seconds)
        for name, state, seconds in (
            ("a", "ran", 40.0),
            ("b", "cached", 500.0),
            ("c", "ran", 2.0),
            ("d", "failed", None),
        )
    }
    model = Artifact("t", "d", Path("/home/x"), name="m", version=1)
    summary = {"held_out": {"before": 0.25, "after": 0.75}, "by": {"x": 1, "y": 0.5}, "rows": 1234}
    result = SimpleNamespace(
        id="r1", status="failed", steps=steps, summary=summary, outputs={"model": model},
        error={"code": "E600", "what": "a < b"}, plot=lambda: Plot({}),
    )  # fmt: skip
    page = Result._repr_html_(result)  # type: ignore[arg-type]
    assert "<b>r1</b> · failed · 42" in page and "<p>error[E600]: a &lt; b</p>" in page
    assert re.findall(r"<tr><td>([^<]*)</td><td>(.*?)</td></tr>", page) == [
        *(("held out", "0.25 → 0.75 (+0.5)"), ("by", "x 1, y 0.5"), ("rows", "1234"), ("model", "m:v1  /home/x"))
    ]
    result.error = None
    assert "<p>" not in Result._repr_html_(result)  # type: ignore[arg-type]
