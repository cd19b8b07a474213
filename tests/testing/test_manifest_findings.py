"""What the checks of a manifest look at: every table, every entry, every key. The manifest is told."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.errors import DataError
from nemotron_steps.testing import step_manifest
from nemotron_steps.testing.step_subject import CANARY, StepSubject, process_environment
from nemotron_steps.testing.suite import NotApplicable, Unmet
from tests.testing.config_models import Strict

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


@pytest.mark.parametrize("key", ["name", "category", "description", "version", "entry", "config_schema"])
def test_a_step_without_any_of_its_keys_is_found(key: str) -> None:
    found(step_manifest.manifest_is_complete, SimpleNamespace(manifest=manifest()), None)
    bare = SimpleNamespace(manifest=manifest({key: None}))
    found(step_manifest.manifest_is_complete, bare, f"has no {key}")


@pytest.mark.parametrize("table", ["consumes", "produces", "parameters"])
def test_an_entry_of_any_table_without_a_description_is_found(table: str) -> None:
    second = {table: [entry(), entry(name="bare", description="")]}
    found(step_manifest.manifest_is_complete, SimpleNamespace(manifest=manifest(**second)), "'bare' has no description")


@pytest.mark.parametrize(("hidden", "others", "told"), [(False, 0, None), (True, 0, "toy/step"), (False, 1, "mine")])
def test_a_step_that_hides_another_or_is_hidden_is_found(hidden: bool, others: int, told: str | None) -> None:
    made = manifest()
    made.hidden, made.pack = hidden, "here"
    rivals = [SimpleNamespace(step=made.step, pack="mine"), SimpleNamespace(step=SimpleNamespace(id="other"), pack="x")]
    registry = SimpleNamespace(
        hidden_steps=dict(enumerate(rivals[1 - others :])), steps={"toy/step": SimpleNamespace(pack="first")}
    )
    found(step_manifest.id_is_its_own, SimpleNamespace(manifest=made, registry=registry), told)


class Config(Strict):
    size: int = 1


def test_a_parameter_and_a_binding_that_are_no_keys_are_found() -> None:
    def subject(**tables: list[Any]) -> Any:
        return SimpleNamespace(schema=Config, manifest=manifest(**tables))

    good = entry(name="size"), entry(bindings=("size",))
    found(step_manifest.parameters_exist, subject(parameters=[good[0]], consumes=[good[1]]), None)
    found(step_manifest.parameters_exist, subject(parameters=[good[0], entry(name="sizes")]), "'sizes' is no key")
    found(step_manifest.parameters_exist, subject(consumes=[entry(bindings=("size", "siez"))]), "'siez' is no key")


@pytest.mark.parametrize(
    ("default", "value", "same"), [(3, 3, True), (0, 3, False), (False, True, False), (None, 3, True)]
)
def test_a_default_that_is_not_what_the_manifest_says_is_found(default: Any, value: Any, same: bool) -> None:
    made = manifest(parameters=[entry(name="first", default=1), entry(name="size", default=default)])
    made.config_names = ()
    composed = SimpleNamespace(flat={"first": 1, "size": value})
    subject = SimpleNamespace(manifest=made, compose=lambda **_: composed)
    found(step_manifest.parameters_tell_their_defaults, subject, None if same else "default of 'size'")
    made.config_names = ("tiny",)
    with pytest.raises(NotApplicable):
        step_manifest.parameters_tell_their_defaults(subject)  # type: ignore[arg-type]


@pytest.mark.parametrize("refused", [None, "size=1", 'size="b"', "size=null"])
def test_every_choice_is_tried_as_it_would_be_typed(refused: str | None) -> None:
    def compose(overrides: list[str]) -> None:
        if overrides == [refused]:
            raise DataError("no such size")

    made = manifest(parameters=[entry(name="size", choices=(1, "b", None))])
    told = None if refused is None else "refuses 'size="
    found(step_manifest.choices_are_accepted, SimpleNamespace(manifest=made, compose=compose), told)


@pytest.mark.parametrize("table", ["strategies", "errors"])
def test_an_override_that_is_advised_anywhere_and_refused_is_found(table: str) -> None:
    def compose(overrides: tuple[str, ...] = ()) -> Any:
        if "size=x" in overrides:
            raise DataError("no number")
        return SimpleNamespace(values={})

    def advised(*overrides: str) -> Any:
        return entry(overrides_for=lambda config: overrides)

    for overrides, told in ((("size=1",), None), (("size=1", "size=x"), "'size=1 size=x' is refused")):
        made = manifest(**{table: [advised(), advised(*overrides)]})
        found(step_manifest.overrides_can_be_pasted, SimpleNamespace(manifest=made, compose=compose), told)


@pytest.mark.parametrize(
    ("signal", "told"),
    [("out_of_memory", None), ("judge_unavailable", None), ("mine", None), ("min", "raises the signal 'min'")],
)
def test_a_signal_is_one_that_is_raised_here_or_by_the_step(
    signal: str, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_manifest, "_sources", lambda step: "report('mine')")
    made = manifest(strategies=[entry(signal=()), entry(signal=("out_of_memory", signal))])
    found(step_manifest.hints_are_reachable, SimpleNamespace(manifest=made), told)
    blind = manifest(errors=[entry(), entry(name="blind", match=())])
    found(step_manifest.hints_are_reachable, SimpleNamespace(manifest=blind), "'blind' matches nothing")


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
