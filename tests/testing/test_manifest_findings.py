"""What the checks of a manifest look at: every table, every entry, every key. The manifest is told."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemotron_steps.errors import DataError
from nemotron_steps.testing import pipeline, pipeline_file, step_manifest
from nemotron_steps.testing.step_subject import CANARY, StepSubject
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


def test_what_is_remembered_is_made_once_and_a_process_has_a_home_of_its_own(tmp_path: Path, monkeypatch: Any) -> None:
    made = subject(tmp_path)
    first = made.remember("a", lambda _: object())
    assert made.remember("a", lambda _: object()) is first
    monkeypatch.setenv("STEPS_HOME", "/elsewhere")
    monkeypatch.setenv("TOY", "kept")
    monkeypatch.setattr(sys, "path", ["", "/a", "/b"])
    pack = SimpleNamespace(base="/pack", origin="working directory")
    made.__dict__["registry"] = SimpleNamespace(packs=[pack, SimpleNamespace(base="/site", origin="installed")])
    variables = made._environment(tmp_path, {"PYTHONHASHSEED": "2"})
    assert "STEPS_HOME" not in variables and variables["TOY"] == "kept"
    assert (variables["PYTHONPATH"], variables["PYTHONHASHSEED"]) == ("/a:/b", "2")
    assert (variables["STEPS_PATH"], variables["KIT_API_KEY"]) == ("/pack", CANARY)
    assert variables["HOME"] == f"{tmp_path}/user" and variables["TMPDIR"] == f"{tmp_path}/tmp"


# -- pipelines ---------------------------------------------------------------------------------------------------


def stage(name: str = "train", **fields: Any) -> Any:
    made = {"step": "toy/train", "inputs": {}, "overrides": (), "fan_out": {}, "checks": (), "description": "d"}
    return SimpleNamespace(name=name, **{**made, **fields})


def source(stage: str | None, port: str | None = None) -> Any:
    return SimpleNamespace(stage=stage, port=port, ref=None)


def output(name: str, kind: str, **becomes: str) -> Any:
    return SimpleNamespace(name=name, type=kind, becomes=becomes)


def step(name: str, inputs: dict[str, Any] | None = None, *produces: Any) -> Any:
    ports = {port: SimpleNamespace(type=kind, many=many) for port, (kind, many) in (inputs or {}).items()}
    return SimpleNamespace(id=name, inputs=ports, outputs={each.name: each for each in produces}, produces=produces)


def a_pipeline(steps: list[Any], *stages: Any, **fields: Any) -> Any:
    known = {each.id: each for each in steps}
    made = {"stages": list(stages), "configs": {}, "pipeline": SimpleNamespace(name="toy", description="d"), **fields}
    told = SimpleNamespace(where=lambda *place: "here", name="toy", **made)
    types = SimpleNamespace(path=lambda kind, wanted: [kind] if kind == wanted else None)
    bench = SimpleNamespace(registry=SimpleNamespace(step=known.__getitem__, types=types))

    def step_of(each: Any, config: str | None = None) -> Any:
        variant = told.configs.get(config or "", {}).get(each.name)
        return known[(variant.step if variant else None) or each.step]

    return SimpleNamespace(manifest=told, bench=bench, step_of=step_of, configs=lambda: [None, *told.configs])


def test_a_pipeline_each_stage_and_each_config_is_described_and_can_be_typed() -> None:
    two = (stage(), stage("eval"))
    found(pipeline_file.stages_are_described, a_pipeline([], *two), None)
    bare = SimpleNamespace(name="toy", description="")
    found(pipeline_file.stages_are_described, a_pipeline([], *two, pipeline=bare), "pipeline has no description")
    undescribed = a_pipeline([], two[0], stage("eval", description=""))
    found(pipeline_file.stages_are_described, undescribed, "stage 'eval' has no")
    found(pipeline_file.names_can_be_typed, a_pipeline([], *two, configs={"tiny": {}, "8x-gpu_1": {}}), None)
    found(pipeline_file.names_can_be_typed, a_pipeline([], *two, configs={"tiny": {}, "a b": {}}), "'a b' cannot")
    found(pipeline_file.names_can_be_typed, a_pipeline([], two[0], stage("-x")), "'-x' cannot")


@pytest.mark.parametrize(
    ("port", "told"),
    [
        ("one", None),
        ("many.a", None),
        ("one.a", "no input 'one.a'"),
        ("many", "no input 'many'"),
        ("x", "no input 'x'"),
    ],
)
def test_an_input_that_takes_many_is_given_under_a_name_and_no_other_is(port: str, told: str | None) -> None:
    takes = step("toy/train", {"one": ("rows", False), "many": ("rows", True)})
    subject = a_pipeline([takes], stage(), stage("eval", inputs={"one": source(None), port: source(None)}))
    found(pipeline_file.stages_take_what_they_are_given, subject, told)


@pytest.mark.parametrize(
    ("made", "port", "told"),
    [
        ([output("a", "rows")], None, None),
        ([output("a", "x"), output("b", "rows")], None, None),
        ([output("a", "x", flag="rows")], None, None),
        ([output("a", "x"), output("b", "rows")], "a", "stage 'prep' makes none"),
        ([output("a", "x"), output("b", "rows")], "b", None),
        ([output("a", "x")], None, "stage 'prep' makes none"),
    ],
)
def test_what_a_stage_reads_is_what_another_makes_or_it_may_become(
    made: Any, port: str | None, told: str | None
) -> None:
    steps = [step("toy/prep", {}, *made), step("toy/train", {"rows": ("rows", True)})]
    subject = a_pipeline(steps, stage("prep", step="toy/prep"), stage(inputs={"rows.a": source("prep", port)}))
    found(pipeline_file.types_chain, subject, told)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (step("toy/other", {"rows": ("rows", False)}, output("model", "model"), output("more", "x")), None),
        (step("toy/other", {}, output("model", "model")), "has no input 'rows'"),
        (step("toy/other", {"rows": ("rows", False)}, output("other", "model")), "makes no model 'model'"),
        (step("toy/other", {"rows": ("rows", False)}, output("model", "x")), "makes no model 'model'"),
    ],
)
def test_a_step_in_anothers_place_reads_and_makes_what_that_does(other: Any, told: str | None) -> None:
    usual = step("toy/train", {"rows": ("rows", False)}, output("model", "model"))
    configs = {"tiny": {}, "large": {"train": SimpleNamespace(step="toy/other")}}
    subject = a_pipeline([usual, other], stage(inputs={"rows": source(None)}), configs=configs)
    found(pipeline_file.variants_make_the_same, subject, told)


def test_where_no_stage_reads_another_none_is_left_over() -> None:
    with pytest.raises(NotApplicable):
        pipeline_file.no_stage_is_left_over(a_pipeline([], stage(), stage("eval")))
    chained = a_pipeline([], stage("prep"), stage(inputs={"rows": source("prep")}))
    pipeline_file.no_stage_is_left_over(chained)
    chained.manifest.stages.append(stage("eval", inputs={"rows": source(None)}))
    found(pipeline_file.no_stage_is_left_over, chained, "stage 'eval' reads no other")


@pytest.mark.parametrize(("gpus", "told"), [(0, None), (1, "asks for 1 GPUs"), (8, "asks for 8 GPUs")])
def test_a_gpu_of_any_stage_under_tiny_is_found(gpus: int, told: str | None) -> None:
    subject = a_pipeline([], stage(), configs={"tiny": {}})
    configs = [{}, {"cluster": None}, {"cluster": {"gpus_per_node": gpus}}]
    steps = [SimpleNamespace(key=str(n), config=config) for n, config in enumerate(configs)]
    subject.plan = lambda config: SimpleNamespace(steps=steps)
    found(pipeline.tiny_needs_no_gpu, subject, told)
    subject.manifest.configs = {"large": {}}
    with pytest.raises(NotApplicable):
        pipeline.tiny_needs_no_gpu(subject)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({"a.x": "1"}, {"a.x": "1"}, None),
        ({"a.x": "1"}, {"a.x": "2"}, "a.x"),
        ({"a.x": "1", "b.y": "1"}, {"a.x": "1"}, "b.y"),
        ({"a.x": "1"}, {"a.x": "1", "b.y": "1"}, "b.y"),
    ],
)
def test_what_a_pipeline_makes_after_a_kill_is_all_that_it_makes_else(
    before: dict[str, str], after: dict[str, str], told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = (SimpleNamespace(commands=[{"code": 0}]) for _ in range(2))
    monkeypatch.setattr(pipeline, "_outputs", lambda ran: before if ran is first else after)
    asked: list[Any] = []

    def process(name: str, commands: Any, home: Path, **watch: Any) -> Any:
        asked.append(watch)
        return SimpleNamespace(commands=[]) if watch else last

    subject = a_pipeline([step("toy/train")], stage("prep"), stage())
    subject.first, subject.process, subject.config, subject.folder = first, process, None, tmp_path
    subject.words = lambda home: ["run"]
    found(pipeline.goes_on_after_a_kill, subject, told)
    assert asked == [{"step": "toy/train", "at_write": 1}, {}]
