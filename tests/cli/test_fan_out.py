"""One stage over seeds, models or shards: `fan_out` of a pipeline file, and `--over`."""

from __future__ import annotations

import json
import statistics

import pytest

from nemotron_steps.session.fan_out import pipeline_axes
from tests.cli.test_pipelines import COMPARE

STAGES = """
[pipeline]
name = "seeds"

[[stages]]
step = "toy/make"

[[stages]]
step = "toy/train"
config = "tiny"
inputs = { rows = "make" }
fan_out = { "seed" = [7, 8, 9] }

[[stages]]
step = "toy/compare"
[stages.inputs]
models.base = { ref = "input/base:v1" }
models.train = "train"
"""


@pytest.fixture
def seeds(workplace, cli):
    (workplace / "manifests").mkdir()
    (workplace / "manifests" / "compare.toml").write_text(COMPARE)
    (workplace / "manifests" / "seeds.toml").write_text(STAGES)
    (workplace / "configs" / "toy" / "compare").mkdir(parents=True)
    (workplace / "configs" / "toy" / "compare" / "default.yaml").write_text("models: {}\n")
    (workplace / "base").mkdir()
    (workplace / "base" / "export.json").write_text("{}")
    assert cli("artifacts", "add", "base", "--type", "toy_export").code == 0
    return workplace


def steps_of(result):
    return {step["key"]: step for step in result.json["steps"]}


def test_each_value_is_a_stage_of_its_own_and_a_port_of_many_takes_all(cli, seeds):
    steps = steps_of(cli("plan", "seeds", "--json"))
    instances = {key: step["overrides"] for key, step in steps.items() if step["step"] == "toy/train"}
    assert instances == {f"train-{n}": [f"seed={n}"] for n in (7, 8, 9)}
    assert {steps[key]["inputs"]["rows"]["step"] for key in instances} == {"make"}
    assert list(steps["compare"]["inputs"]) == ["models.base", *(f"models.train-{n}" for n in (7, 8, 9))]
    assert steps["train-8"]["instance"] == {"stage": "train", "labels": {"train.seed": "8"}}
    assert "train-8" in cli("plan", "seeds").out


def test_mean_and_spread_over_seeds_stand_at_the_end_in_json_and_in_the_report(cli, seeds):
    made = cli("run", "seeds", "--json").json
    rewards = [0.25 + 0.05 * n for n in (7, 8, 9)]  # the toy's reward after training with a seed
    cell = made["fan_out"]["over train.seed"]["train"]["seeded_reward"]
    assert cell["mean"] == pytest.approx(statistics.fmean(rewards))
    assert cell["spread"] == pytest.approx(statistics.stdev(rewards))
    assert list(cell["values"]) == ["train-7", "train-8", "train-9"]
    gathered = made["fan_out"]["compare: sizes"]
    assert list(gathered) == ["train"] and list(gathered["train"]["files"]["values"]) == list(cell["values"])
    shown = cli("run", "seeds")
    assert "0.65 ± 0.05" in shown.out
    assert cli("run", "seeds", "--over", "train.seed=7,8").code == 0
    (*_, named) = sorted((seeds / "home" / "runs").glob("*/report.html"), key=lambda path: path.stat().st_mtime)
    assert "steps run seeds --over train.seed=7,8" in named.read_text()
    report = sorted((seeds / "home" / "runs").glob("*/report.html"), key=lambda path: path.stat().st_mtime)[1]
    assert "0.65 ± 0.05" in report.read_text()


def test_one_instance_that_fails_does_not_lose_the_others_and_is_retried_alone(cli, seeds):
    failed = cli("run", "seeds", "train-8.end=bug")
    assert failed.code == 1 and "a mistake of the step's author" in failed.err
    run = json.loads(cli("status", "--json").out)
    assert {key: step["state"] for key, step in run["steps"].items() if key.startswith("train")} == {
        "train-7": "ran",
        "train-8": "failed",
        "train-9": "ran",
    }
    assert run["steps"]["compare"]["state"] == "pending"
    states = {key: step["state"] for key, step in steps_of(cli("run", "seeds", "--json")).items()}
    assert (states["train-7"], states["train-8"], states["train-9"]) == ("cached", "ran", "cached")


def test_what_every_instance_would_run_into_stops_the_run(cli, seeds):
    stopped = cli("run", "seeds", "train-7.end=judge")
    assert stopped.code == 3
    run = json.loads(cli("status", "--json").out)
    assert [run["steps"][f"train-{n}"]["state"] for n in (8, 9)] == ["pending", "pending"]


def test_a_step_is_fanned_out_from_the_command_line(cli, workplace):
    plan = cli("plan", "toy/train", "-c", "tiny", "--over", "seed=range(1,4)", "steps=5", "--json")
    trained = {key: step["overrides"] for key, step in steps_of(plan).items() if step["step"] == "toy/train"}
    assert trained == {f"train-{n}": ["steps=5", f"seed={n}"] for n in (1, 2, 3)}
    assert plan.json["warnings"] == []
    assert sum(step["step"] == "toy/make" for step in plan.json["steps"]) == 1  # the config's source, shared


def test_inputs_are_fanned_out_over_too(cli, workplace):
    for name in ("a", "b"):
        (workplace / f"{name}.jsonl").write_text('{"number": 1}\n')
    steps = steps_of(cli("plan", "toy/train", "--over", "inputs.rows=a.jsonl,./b.jsonl", "--json"))
    assert {key: step["inputs"]["rows"]["ref"] for key, step in steps.items()} == {
        "train-a_jsonl": "a.jsonl",
        "train-b": "./b.jsonl",
    }


def test_several_fan_outs_are_every_combination_and_rates_are_not_averaged_with_seeds(cli, workplace):
    over = ("--over", "optimizer.lr=0.1,0.2", "--over", "seed=1,2")
    made = cli("run", "toy/train", "-c", "tiny", *over, "--json")
    assert [key for key in steps_of(made) if key.startswith("train")] == [
        "train-0_1-1",
        "train-0_1-2",
        "train-0_2-1",
        "train-0_2-2",
    ]
    ((_, table),) = made.json["fan_out"].items()
    assert list(table) == ["train-0_1", "train-0_2"]
    assert list(table["train-0_2"]["seeded_reward"]["values"]) == ["train-0_2-1", "train-0_2-2"]


def test_a_resumed_run_knows_what_it_was_fanned_out_over(cli, workplace):
    assert cli("run", "toy/train", "-c", "tiny", "--over", "seed=1,2", "train-2.end=bug").code == 1
    assert cli("run", "--resume", "latest").code == 1
    run = json.loads(cli("status", "--json").out)
    assert run["steps"]["train-1"]["state"] == "cached" and run["steps"]["train-2"]["state"] == "failed"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("toy/train", "--over", "seed"), "nothing to fan out over"),
        (("toy/train", "--over", "seed=1,1"), "two instances would be the same"),
        (("toy/train", "--over", "seed=1,2", "--over", "seed=3,4"), "'seed' of train is fanned out over twice"),
        (("toy/train", "--over", "seed,seed=1,2"), "'seed' of train is fanned out over twice"),
        (("toy/make", "toy/train", "--over", "seed=1,2"), "a list of steps is neither"),
        (("seeds", "--over", "seed=1,2"), "--over '*.seed=1,2'"),
        (("seeds", "--over", "*.sede=1,2"), "no stage has a config key 'sede'"),
        (("seeds", "--over", "trian.seed=1,2"), "--over train.seed=1,2"),
        (("toy/train", "--over", "seed=x,y"), "override 'seed=x'"),
    ],
)
def test_what_cannot_be_fanned_out_is_refused_with_what_can(arguments, said, cli, seeds):
    wrong = cli("plan", *arguments)
    assert wrong.code == 2 and said in wrong.err


@pytest.mark.parametrize("value", ["it's", "\\\\'", "ends in \\\\", "a, b", "x=1", "${x}", "", 1, 0.5, True, -3])
def test_a_value_of_a_pipeline_file_arrives_as_it_is(value):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    (axis,) = pipeline_axes([], {"train": {"key": [value]}}, lambda stage, key: True)
    read = OverridesParser.create().parse_override(f"key={axis.values[0]}").value()
    assert (str(read), type(read) is bool) == (str(value), type(value) is bool)


def test_what_is_said_of_one_instance_wins_over_what_it_is_fanned_out_over(cli, seeds):
    steps = steps_of(cli("plan", "seeds", "train.seed=4", "train-8.seed=5", "--json"))
    assert [steps[f"train-{n}"]["overrides"] for n in (7, 8)] == [["seed=4", "seed=7"], ["seed=4", "seed=8", "seed=5"]]


def test_what_stands_after_two_dashes_goes_to_every_instance(cli, workplace):
    plan = cli("plan", "toy/train", "-c", "tiny", "--over", "seed=1,2", "--", "--flag")
    assert plan.code == 2  # nothing of a plan is handed on
    shown = cli("run", "toy/train", "-c", "tiny", "--over", "seed=1,2", "-d", "--json", "--", "--flag", "x")
    assert shown.code == 0, shown.err
    handed = {key: config["passthrough"] for key, config in shown.json["configs"].items() if "train" in key}
    assert handed == {"train-1": ["--flag", "x"], "train-2": ["--flag", "x"]}
