"""`plan` and `run` in Python: values, coded errors and results, whatever loop runs around them."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps import Artifacts, StepsError, open_run, plan, run
from nemotron_steps.cli.run import run_here
from nemotron_steps.errors import InterruptedRunError, NonFiniteLossError, PlanError, RequestError, UnknownNameError
from tests.cli.conftest import TOY_PACK


@pytest.fixture(autouse=True)
def toys(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS_PATH", str(TOY_PACK))
    monkeypatch.setenv("PYTHONPATH", str(TOY_PACK))
    monkeypatch.syspath_prepend(str(TOY_PACK))


def test_a_plan_is_looked_at_and_run() -> None:
    planned = plan("toy/train", config="tiny", optimizer={"lr": 0.5})
    assert planned.steps[-1] == "toy/train" and not planned.cached
    assert planned.config()["optimizer"]["lr"] == 0.5
    assert "toy/train" in str(planned) and planned.command in planned._repr_html_()
    assert planned.to_dict()["steps"][-1]["key"] == "toy/train"
    assert planned.config("toy/make") == {"count": 3} and len(planned.steps) == 2
    with pytest.raises(KeyError):
        planned.config("toy/score")
    result = planned.run(progress=False)
    assert plan("toy/train", config="tiny", overrides=["optimizer.lr=0.5"]).cached
    assert not plan("toy/train", config="tiny").cached  # its rows are there, and it is not
    assert result.status == "done" and result.folder.is_dir()


def test_a_result_has_what_the_run_recorded(capfd: pytest.CaptureFixture[str]) -> None:
    result = run("toy/train", config="tiny", steps=3, progress=False)
    assert "reward" not in capfd.readouterr().out
    assert result.metrics["loss"] == {1: 1.0, 2: 0.5, 3: pytest.approx(1 / 3)}
    assert result.summary["held_out_reward"] == {"before": 0.25, "after": 0.75}
    made = result.outputs["model"]
    assert json.loads((result.artifacts.path(made) / "model.json").read_text())["lr"] == 0.1
    with pytest.raises(UnknownNameError, match="no model") as refused:  # that it knows to be one
        result.save("copy")
    assert eval(refused.value.hints[0]) == Path("copy").absolute() and Path("copy/model.json").is_file()
    assert [step.state for step in result.steps.values()] == ["ran", "ran"]
    assert result.steps["toy/train"].hints[0]["name"] == "reward_saturated"
    links = Artifacts().lineage(made.ref)["ancestors"]
    assert [link["port"] for link in links] == ["rows"]
    assert made.ref in [artifact.ref for artifact in result.artifacts.list(type=made.type)]
    assert [artifact.ref for artifact in Artifacts().list(name="toy/make/rows")] == ["toy/make/rows:v1"]
    assert Artifacts().list(name="toy/make/rows", type=made.type) == [] and len(Artifacts().list()) == 2
    assert result.artifacts.find(made.digest).ref == made.ref
    # Cached, it is the same to whoever reads it.
    again = run("toy/train", config="tiny", steps=3, progress=False)
    assert again.id != result.id and again.metrics == result.metrics and again.outputs == result.outputs
    assert open_run("latest").id == again.id


def test_a_failure_is_raised_and_the_same_call_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NonFiniteLossError) as raised:
        plan("toy/train", config="tiny", end="diverge", name="shaky").run(progress=False)
    failed = open_run("shaky")
    assert any(f"steps logs {failed.id}" in hint for hint in raised.value.hints)
    assert failed.status == "failed" and failed.error is not None and failed.error["code"] == "E600"
    assert failed.metrics["loss"] and "error[E600]" in failed._repr_html_()
    with pytest.raises(StepsError, match="NaN"):
        failed.wait()
    monkeypatch.setattr("nemotron_steps.api.result.is_model", lambda *_: True)
    with pytest.raises(NonFiniteLossError):
        plan(["toy/make", "toy/train"], end="diverge", name="both").run(progress=False)
    for each in (failed, open_run("both")):
        with pytest.raises(UnknownNameError, match="no model"):  # the rows are of an earlier step
            each.save("copy")
    resumed = run("toy/train", config="tiny", resume="shaky", progress=False)
    assert resumed.id == failed.id == open_run("shaky").id and resumed.status == "done"
    again = plan("toy/train", config="tiny").run(name="again", progress=False)
    assert again.id == open_run("again").id != resumed.id


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"target": "toy/trian"}, PlanError, "toy/trian"),
        ({"target": "toy/train", "config": "tiny", "optimizer": {"lrr": 1}}, PlanError, "lrr"),
        ({"target": "toy/train", "config": "tiny", "inputs": {"row": "x"}}, PlanError, "row"),
        ({"target": "toy/train", "name": "a b"}, RequestError, "cannot name a run"),
        ({}, RequestError, "name a step"),
        ({"resume": "latest", "config": "tiny"}, RequestError, "resume alone"),
        ({"resume": "latest", "progres": False}, RequestError, "progres=False"),
        ({"target": "toy/train", "config": "tiny", "wait": False}, RequestError, "has to wait"),
        ({"target": "toy/train", "config": "tiny", "profile": "nowhere"}, PlanError, "nowhere"),
        ({"target": "toy/train", "config": "tiny", "over": {"steps": 3}}, RequestError, "a list of values"),
        ({"resume": "latest"}, UnknownNameError, "no run yet"),
    ],
)
def test_a_wrong_request_is_a_coded_error(arguments: dict[str, Any], error: type[StepsError], told: str) -> None:
    with pytest.raises(error) as raised:
        run(**arguments, progress=False)
    assert told in str(raised.value)


def test_a_local_profile_sets_its_variables_for_its_run_alone(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_FLAG", "before")
    (workplace / "env.toml").write_text(
        '[here]\nexecutor = "local"\nenv_vars = { OWN_FLAG = "during", NEW_FLAG = "1" }\n'
    )
    seen: list[str | None] = []

    def looked_at(*given: Any, **named: Any) -> Any:
        seen.extend([os.environ.get("OWN_FLAG"), os.environ.get("NEW_FLAG")])
        return run_here(*given, **named)

    monkeypatch.setattr("nemotron_steps.api.planned.run_here", looked_at)
    run("toy/train", config="tiny", profile="here", progress=False)
    assert seen == ["during", "1"]
    assert os.environ["OWN_FLAG"] == "before" and "NEW_FLAG" not in os.environ


def test_the_stop_button_ends_a_run_in_a_cell_and_the_cell_goes_on() -> None:
    main = threading.get_ident()

    def press() -> None:
        while sys._current_frames()[main].f_code.co_name != "train":  # which sleeps
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    async def cell() -> str:
        threading.Thread(target=press, daemon=True).start()
        with pytest.raises(InterruptedRunError):
            run("toy/train", config="tiny", seconds_per_step=5.0, progress=False)
        await asyncio.sleep(0)
        return open_run().status

    assert asyncio.run(cell()) == "interrupted"


TWICE = """
import os, signal, sys, threading, time
from nemotron_steps import open_run, run

def press():
    main, lines = threading.main_thread().ident, []
    while len(lines) < 3 or len(set(lines[-3:])) > 1 or lines[-1] is None:  # until the step waits
        time.sleep(0.2)
        frame = sys._current_frames()[main]
        lines.append(frame.f_lineno if frame.f_code.co_name == "train" else None)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

threading.Thread(target=press, daemon=True).start()
begin = time.monotonic()
try:
    run("toy/train", config="tiny", end="stubborn", progress=False)
except BaseException as error:
    print("the kernel goes on after", type(error).__name__, open_run().status, time.monotonic() - begin < 55)
"""


def test_the_stop_button_pressed_twice_leaves_the_kernel() -> None:
    ended = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=120, check=False)
    said = "the kernel goes on after InterruptedRunError interrupted True\n"
    assert ended.returncode == 0 and ended.stdout.endswith(said), ended.stdout + ended.stderr
