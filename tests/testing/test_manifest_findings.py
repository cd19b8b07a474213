"""What the checks of a manifest look at: every table, every entry, every key. The manifest is told."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.testing import step_manifest
from nemotron_steps.testing.step_subject import CANARY, StepSubject, process_environment
from nemotron_steps.testing.suite import Unmet

STEP = {
    "id": "toy/step", "name": "Toy", "category": "eval", "description": "d", "version": "1", "entry": "toy:run",
    "config_schema": "toy:Config",
}  # fmt: skip


def entry(**fields: Any) -> Any:
    made = {
        "name": "x",
        "description": "d",
        "bindings": (),
        "choices": (),
        "default": None,
        "signal": (),
        "match": ("E1",),
    }
    return SimpleNamespace(**{**made, **fields})


def manifest(step: dict[str, Any] | None = None, **tables: list[Any]) -> Any:
    made = {table: [] for table in ("consumes", "produces", "parameters", "strategies", "errors")}
    return SimpleNamespace(
        step=SimpleNamespace(**{**STEP, **(step or {})}),
        where=lambda *place: ".".join(map(str, place)),
        where_input=lambda *place: ".".join(place),
        **{**made, **tables},
    )


def found(check: Any, subject: Any, told: str | None) -> None:
    if told is None:
        check(subject)
    else:
        with pytest.raises(Unmet, match=told):
            check(subject)


@pytest.mark.parametrize(
    ("signal", "told"),
    [("out_of_memory", None), ("judge_unavailable", None), ("mine", None), ("min", "raises the signal 'min'")],
)
def test_a_signal_is_one_that_is_raised_here_or_by_the_step(
    signal: str, told: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "toy.py").write_text("report('mine')")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = manifest(strategies=[entry(signal=()), entry(signal=("out_of_memory", signal))])
    found(step_manifest.hints_are_reachable, SimpleNamespace(manifest=made, entry_module="toy"), told)
    blind = manifest(errors=[entry(), entry(name="blind", match=())])
    found(
        step_manifest.hints_are_reachable, SimpleNamespace(manifest=blind, entry_module=""), "'blind' matches nothing"
    )


def subject(folder: Path, **fields: Any) -> StepSubject:
    """A step whose manifest is told."""
    made = StepSubject("toy/step", folder, **fields)
    made.__dict__["manifest"] = manifest()
    return made


@pytest.mark.parametrize(
    ("names", "given", "chosen"),
    [(("default", "tiny"), None, "tiny"), (("default",), None, "default"), ((), None, None), (("tiny",), "own", "own")],
)
def test_runs_use_the_config_that_was_given_or_a_tiny_one(
    names: tuple[str, ...], given: str | None, chosen: str | None, tmp_path: Path
) -> None:
    made = subject(tmp_path, config=given)
    made.manifest.config_names = names
    assert made.config_name == chosen


def test_a_step_is_fed_what_was_given_and_samples_where_it_needs_them(tmp_path: Path, monkeypatch: Any) -> None:
    def port(name: str, kind: str, *, required: bool = True) -> Any:
        return SimpleNamespace(name=name, type=kind, required=required)

    made = subject(tmp_path, inputs={"mine": tmp_path / "mine", "made": lambda folder: folder / "here"})
    made.manifest.consumes = [
        port("mine", "unknown"), port("made", "unknown", required=False), port("rows", "training_jsonl"),
        port("more", "training_jsonl", required=False), port("wired", "unknown"),
    ]  # fmt: skip
    monkeypatch.setattr(StepSubject, "compose", lambda self: SimpleNamespace(inputs={"wired": "another"}))
    assert made.fed == {
        "mine": tmp_path / "mine",
        "made": tmp_path / "inputs/made/here",
        "rows": tmp_path / "inputs/rows",
    }
    assert (tmp_path / "inputs/made").is_dir() and (tmp_path / "inputs/rows/train.jsonl").is_file()


def test_a_process_has_a_home_of_its_own(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("STEPS_HOME", "/elsewhere")
    monkeypatch.setenv("TOY", "kept")
    monkeypatch.setattr(sys, "path", ["", "/a", "/b"])
    pack = SimpleNamespace(base="/pack", origin="working directory")
    registry: Any = SimpleNamespace(packs=[pack, SimpleNamespace(base="/site", origin="installed")])
    variables = process_environment(tmp_path, tmp_path / "cache", registry)
    assert "STEPS_HOME" not in variables and variables["TOY"] == "kept"
    assert (variables["PYTHONPATH"], variables["PYTHONHASHSEED"]) == ("/a:/b", "1")
    assert (variables["STEPS_PATH"], variables["KIT_API_KEY"]) == ("/pack", CANARY)
    assert variables["HOME"] == f"{tmp_path}/user" and variables["TMPDIR"] == f"{tmp_path}/tmp"
