"""`-c` of a pipeline, `--from`, `--until`, ports that take many artifacts, and the table at the end."""

from __future__ import annotations

import json

import pytest

COMPARE = """
[step]
id = "toy/compare"
category = "eval"
entry = "toy_steps:compare"

[[consumes]]
name = "models"
type = "toy_export"
many = true
bind = "models"

[[produces]]
name = "score"
type = "toy_score"
"""
STAGES = """
[pipeline]
name = "curriculum"

[configs.tiny]
make = "default"
first = "tiny"
second = "tiny"
compare = "default"

[[stages]]
step = "toy/make"

[[stages]]
name = "first"
step = "toy/train"
inputs = { rows = "make" }

[[stages]]
name = "second"
step = "toy/train"
overrides = "optimizer.lr=0.2"
inputs = { rows = "make" }

[[stages]]
step = "toy/compare"
[stages.inputs]
models.first = "first"
models.second = "second"
"""


@pytest.fixture
def curriculum(workplace):
    (workplace / "manifests").mkdir()
    (workplace / "manifests" / "compare.toml").write_text(COMPARE)
    (workplace / "manifests" / "curriculum.toml").write_text(STAGES)
    (workplace / "configs" / "toy" / "compare").mkdir(parents=True)
    (workplace / "configs" / "toy" / "compare" / "default.yaml").write_text("models: {}\n")
    return workplace


def keys(plan):
    return [step["key"] for step in plan["steps"]]


def test_the_pipelines_own_table_says_what_a_config_name_means_for_each_stage(cli, curriculum):
    plan = cli("plan", "curriculum", "-c", "tiny", "--json").json
    configs = {step["key"]: step["config"] for step in plan["steps"] if not step["inserted"]}
    assert configs == {"make": "default", "first": "tiny", "second": "tiny", "compare": "default"}
    # A name that the table has not is that config of every stage, whatever the file says.
    plan = cli("plan", "toy_all", "-c", "default", "--json").json
    configs = {step["key"]: step["config"] for step in plan["steps"] if not step["inserted"]}
    assert configs == {"make": "default", "train": "default", "score": "default"}


def test_another_step_may_take_a_stages_place_under_a_config_name(cli, curriculum):
    other = STAGES.replace('make = "default"', 'make = { step = "toy/other", config = "default" }')
    (curriculum / "manifests" / "curriculum.toml").write_text(other)
    step = '[step]\nid = "toy/other"\nentry = "toy_steps:make"\n[[produces]]\nname = "rows"\ntype = "toy_rows"\n'
    (curriculum / "manifests" / "other.toml").write_text(step)
    (curriculum / "configs" / "toy" / "other").mkdir()
    (curriculum / "configs" / "toy" / "other" / "default.yaml").write_text("count: 1\n")
    steps = {flag: cli("plan", "curriculum", *flag, "--json").json["steps"][0]["step"] for flag in ((), ("-c", "tiny"))}
    assert steps == {(): "toy/make", ("-c", "tiny"): "toy/other"}


def test_a_step_takes_the_artifacts_of_several_stages_and_its_table_is_shown(cli, curriculum):
    result = cli("run", "curriculum", "-c", "tiny")
    assert result.code == 0
    lines = [line.split() for line in result.out.splitlines()]
    at = lines.index(["sizes", "files"])
    assert [lines[at + 1][0], lines[at + 2][0]] == ["first", "second"]
    (report,) = (curriculum / "home" / "runs").glob("*/report.html")
    assert "<th>sizes</th><th>files</th>" in report.read_text()
    again = cli("run", "curriculum", "-c", "tiny", "--json").json
    assert list(next(s for s in again["steps"] if s["key"] == "compare")["summary"]["sizes"]) == ["first", "second"]
    assert {step["state"] for step in again["steps"]} == {"cached"}


def test_many_artifacts_can_be_given_by_hand(cli, curriculum):
    cli("run", "curriculum", "-c", "tiny", "--until", "second")
    given = ("--input", "models.a=toy/train/model:v1", "--input", "models.b=toy/train/model:v1")
    made = cli("run", "toy/compare", *given, "--json")
    assert list(made.json["steps"][-1]["summary"]["sizes"]) == ["a", "b"]
    staged = cli("plan", "curriculum", "--input", "compare.models.first=toy/train/model:v1", "--json").json
    converted = [step["inputs"]["model"] for step in staged["steps"] if step["step"] == "toy/convert"]
    assert [source.get("ref") for source in converted] == ["toy/train/model:v1", None]
    unnamed = cli("plan", "toy/compare", "--input", "models=toy/train/model:v1")
    assert unnamed.code == 2 and "--input models.NAME=toy/train/model:v1" in unnamed.err
    nothing = cli("plan", "toy/compare")
    assert nothing.code == 2 and "--input models.NAME=PATH" in nothing.err


def test_until_ends_a_pipeline_after_a_stage(cli, curriculum):
    assert keys(cli("plan", "curriculum", "--until", "first", "--json").json) == ["make", "first"]
    # What is said of a later one may stay in the command.
    later = cli("plan", "curriculum", "--until", "first", "second.steps=2", "first.steps=4", "--json").json
    assert [step["overrides"] for step in later["steps"]] == [[], ["steps=4"]]


def test_from_reads_what_earlier_stages_left_and_never_runs_them(cli, curriculum):
    refused = cli("plan", "curriculum", "-c", "tiny", "--from", "second")
    assert refused.code == 2 and "'rows' of second is what make leaves" in refused.err
    assert "--input second.rows=PATH" in refused.err and "hint: --from make " in refused.err
    assert cli("run", "curriculum", "-c", "tiny", "--until", "first").code == 0
    plan = cli("plan", "curriculum", "-c", "tiny", "--from", "second", "--json").json
    assert {step["key"] for step in plan["steps"] if step["cached"]} >= {"make", "first"}
    assert plan["goals"] == ["second", "compare"]


def test_from_takes_another_input_for_what_earlier_stages_would_have_left(cli, curriculum):
    (curriculum / "rows.jsonl").write_text('{"number": 1}\n')
    plan = cli("plan", "curriculum", "--from", "second", "--input", "rows=rows.jsonl", "--json").json
    assert "first" not in keys(plan) and "make" not in keys(plan)
    assert set(plan["steps"][-1]["inputs"]) == {"models.second"}
    assert any("compare goes without models.first" in warning for warning in plan["warnings"])
    given = ("curriculum", "-c", "tiny", "--from", "second", "--input", "rows=rows.jsonl")
    assert cli("run", *given).code == 0
    assert all(step["cached"] for step in cli("plan", *given, "--json").json["steps"])


def test_a_dry_run_tells_what_an_earlier_stage_still_has_to_leave(cli, curriculum):
    shown = cli("run", "curriculum", "-c", "tiny", "--from", "second", "-d", "--json")
    assert shown.code == 0
    assert ["'rows' of second is what make leaves" in u["what"] for u in shown.json["unfilled"]] == [True]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--from", "secnod"), "hint: --from second"),
        (("--until", "nothing"), "there is no stage 'nothing'"),
        (("--from", "second", "--until", "first"), "'first' comes before 'second'"),
    ],
)
def test_stages_that_are_not_there_are_refused(flags, said, cli, curriculum):
    wrong = cli("plan", "curriculum", *flags)
    assert wrong.code == 2 and said in wrong.err


def test_a_run_goes_on_with_the_stages_it_was_asked_for(cli, curriculum):
    failed = cli("run", "curriculum", "-c", "tiny", "--until", "second", "second.end=diverge")
    assert failed.code == 1
    (folder,) = (curriculum / "home" / "runs").iterdir()
    assert json.loads((folder / "run.json").read_text())["request"]["until"] == "second"
    resumed = cli("run", "--resume", folder.name, "--json")
    assert resumed.code == 1  # it diverges again, and compares nothing
    assert [s["key"] for s in json.loads((folder / "plan.json").read_text())["steps"]] == ["make", "first", "second"]
