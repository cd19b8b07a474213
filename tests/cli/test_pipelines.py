"""Pipelines: stages, their checks, and fan-out."""

import json
import statistics

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


CHECKED_STAGES = """
[pipeline]
name = "gated"

[[stages]]
step = "toy/make"

[[stages]]
step = "toy/train"
config = "tiny"
inputs = {{ rows = "make" }}
{fan_out}
{checks}

[[stages]]
step = "toy/score"
inputs = {{ export = "train" }}
"""


@pytest.fixture
def gated(workplace):
    (workplace / "manifests").mkdir()

    def write(*checks: str, fan_out: str = "") -> None:
        text = "".join(f"[[stages.checks]]\n{check}\n" for check in checks)
        (workplace / "manifests" / "gated.toml").write_text(CHECKED_STAGES.format(checks=text, fan_out=fan_out))

    return write


def states(cli):
    steps = json.loads(cli("status", "--json").out)["steps"]
    return {key: step["state"] for key, step in steps.items()}


@pytest.mark.parametrize(
    "check",
    [
        'metric = "held_out_reward"\nat_least = 0.8',  # of the summary, after training: 0.75
        'metric = "held_out_reward/before"\nat_most = 0.2',
        'metric = "kl_penalty"\nat_most = 0.002',  # the last of the metrics: 0.003
    ],
)
def test_a_failed_check_ends_the_pipeline_there_and_keeps_what_is_committed(check, cli, gated):
    gated(check)
    blocked = cli("run", "gated")
    assert blocked.code == 1 and "error[E640]" in blocked.err
    assert {key: state for key, state in states(cli).items() if not key.startswith("toy")} == {
        "make": "ran",
        "train": "ran",
        "score": "pending",
    }
    assert cli("artifacts", "show", "toy/train/model:v1").code == 0


def test_the_error_says_what_where_and_how_to_go_on_and_pasting_the_hint_does(cli, gated):
    gated('metric = "held_out_reward"\nat_least = 0.8')
    error = json.loads(cli("run", "gated", "--json").out)["error"]
    assert error["where"] == "stage train: held_out_reward"
    assert (error["expected"], error["found"]) == ("at least 0.8", "0.75")
    (hint,) = [hint for hint in error["hints"] if "--ignore-checks" in hint]
    went_on = cli(*hint.partition("#")[0].split()[1:])
    assert went_on.code == 0 and "held_out_reward: 0.75, should be at least 0.8" in went_on.out
    assert states(cli)["score"] == "ran"


def test_an_instance_that_fails_its_check_blocks_only_what_reads_it(cli, gated):
    gated('metric = "seeded_reward"\nat_least = 0.5', fan_out="fan_out = { seed = [4, 6] }")
    assert cli("run", "gated").code == 1
    after = states(cli)
    assert (after["score-4"], after["score-6"]) == ("pending", "ran")
    assert cli("run", "gated", "--ignore-checks", "train").code == 0


FANNED_STAGES = """
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
    (workplace / "manifests" / "seeds.toml").write_text(FANNED_STAGES)
    (workplace / "configs" / "toy" / "compare").mkdir(parents=True)
    (workplace / "configs" / "toy" / "compare" / "default.yaml").write_text("models: {}\n")
    (workplace / "base").mkdir()
    (workplace / "base" / "export.json").write_text("{}")
    assert cli("artifacts", "add", "base", "--type", "toy_export").code == 0
    return workplace


def steps_of(result):
    return {step["key"]: step for step in result.json["steps"]}


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
    assert list(table) == ["lr=0.1", "lr=0.2"]
    assert list(table["lr=0.2"]["seeded_reward"]["values"]) == ["train-0_2-1", "train-0_2-2"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("toy/train", "--over", "seed=1,1"), "two instances would be the same"),
        (("toy/train", "--over", "seed=1,2", "--over", "seed=3,4"), "'seed' of train is fanned out over twice"),
        (("toy/make", "toy/train", "--over", "seed=1,2"), "a list of steps is neither"),
        (("seeds", "--over", "seed=1,2"), "--over '*.seed=1,2'"),
        (("seeds", "--over", "*.sede=1,2"), "no stage has a config key 'sede'"),
        (("toy/train", "--over", "seed=7,8", "train-9.end=bug"), "unknown key 'train-9'"),
    ],
)
def test_what_cannot_be_fanned_out_is_refused_with_what_can(arguments, said, cli, seeds):
    wrong = cli("plan", *arguments)
    assert wrong.code == 2 and said in wrong.err and "*.*" not in wrong.err
