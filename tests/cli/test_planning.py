"""`steps plan` and dry runs: what would run, and what is refused."""

import json
import shlex
from pathlib import Path

import pytest
import yaml

from nemotron_steps.cli.main import nemotron
from tests.cli.conftest import Cli
from tests.hints.pasting import hints_in


def test_a_plan_shows_sources_converters_and_what_is_cached(cli):
    result = cli("plan", "toy/train", "toy/score", "-c", "tiny")
    assert result.code == 0
    lines = [line.split() for line in result.out.splitlines()]
    assert lines[0][-4:] == ["4", "steps,", "nothing", "cached"]
    assert lines[1][:3] == ["●", "1", "toy/make"]
    assert lines[2][1:4] == ["2", "toy/train", "tiny"]
    assert "inserted: toy/score.export needs toy_export" in result.out


def test_every_problem_at_once(cli):
    result = cli("plan", "toy/train", "toy/score", "toy/train.steps=two", "toy/train.stepz=1")
    assert result.code == 2
    assert "'steps' has a wrong value" in result.err
    assert "unknown key 'stepz'" in result.err
    result = cli("plan", "toy/train", "toy/score", "toy/train.steps=two", "toy/train.optimizer.name=lion")
    assert "'steps' has a wrong value" in result.err
    assert "'optimizer.name' has a wrong value" in result.err
    errors = cli("plan", "toy/train", "toy/nothing", "steps=1", "--json").json["error"]
    assert errors["code"] == "E300"
    assert {problem["code"] for problem in errors["problems"]} >= {"E110", "E303"}


def test_inputs_can_be_supplied(cli, workplace):
    rows = workplace / "rows"
    rows.mkdir()
    (rows / "train.jsonl").write_text('{"number": 1}\n')
    added = cli("artifacts", "add", str(rows), "--type", "toy_rows", "--name", "mine")
    assert added.code == 0, added.err
    plan = cli("plan", "toy/train", "--input", "rows=mine:v1", "--json").json
    assert plan["steps"][0]["inputs"]["rows"]["ref"] == "mine:v1"
    missing = cli("plan", "toy/train", "--input", "rows=./nowhere")
    assert missing.code == 2
    assert "neither a path nor an artifact" in missing.err
    for wrong in ("rows", "=x", "rows="):
        assert cli("plan", "toy/train", "--input", wrong).code == 2
    assert "given twice" in cli("plan", "toy/train", "--input", "rows=a", "--input", "rows=b").err


def test_a_pipeline_by_name_with_overrides_for_its_stages(cli):
    plan = cli("plan", "toy_all", "train.steps=2", "--json").json
    assert [step["key"] for step in plan["steps"]] == ["make", "train", "toy/convert", "score"]
    assert plan["steps"][1]["overrides"] == ["steps=2"]
    added = cli("plan", "toy_all", "++train.steps=2", "--json").json
    assert added["steps"][1]["overrides"] == ["++steps=2"]
    wrong = cli("plan", "toy_all", "steps=2")
    assert wrong.code == 2
    assert "hint: score.steps=2" in wrong.err
    assert "run alone" in cli("plan", "toy_all", "toy/make").err


def test_dry_run_prints_the_merged_config_and_the_plan_and_runs_nothing(cli, workplace):
    result = cli("run", "toy/train", "-c", "tiny", "--dry-run", "optimizer.lr=0.5")
    assert result.code == 0
    config, _, plan = result.out.partition("\n\n")
    values = yaml.safe_load(config)
    assert values["steps"] == 3
    assert values["optimizer"] == {"name": "adam", "lr": 0.5}
    assert values["judge"]["model"] == "hub/judge"
    assert "toy/make" in plan
    assert not (workplace / "home" / "runs").exists()


def test_arguments_after_two_dashes_go_to_a_step_that_takes_them(cli):
    shown = cli("run", "toy/train", "-c", "tiny", "-d", "--json", "--", "--limit", "it's 5", "a\\'\\").json
    assert shown["configs"]["toy/train"]["passthrough"] == ["--limit", "it's 5", "a\\'\\"]
    refused = cli("run", "toy/make", "-d", "--", "--limit")
    assert refused.code == 2
    assert "takes nothing after `--`" in refused.err
    assert cli("list", "--", "x").code == 2
    for command in (["plan", "toy/train"], ["show", "toy/train"], ["status"], ["watch"], ["artifacts", "list"]):
        refused = cli(*command, "--", "--limit")
        assert refused.code == 2
        assert "takes nothing after `--`" in refused.err and "--limit" in refused.err


def test_nemotron_steps_is_steps(cli, capsys):
    assert nemotron(["steps", "plan", "toy/make"]) == 0
    assert "toy/make" in capsys.readouterr().out
    assert nemotron([]) == 0
    assert "usage: nemotron" in capsys.readouterr().out
    assert nemotron(["stpes"]) == 2
    assert "nemotron steps" in capsys.readouterr().err


def test_what_is_missing_is_listed_and_a_run_without_it_is_refused(cli: Cli, workplace: Path) -> None:
    shown = cli("run", "toy/train", "-d", "judge.model=/path/to/judge")
    assert shown.code == 0 and yaml.safe_load(shown.out.partition("\n\n")[0])["steps"] == 6
    lines = shown.out.splitlines()
    assert any(line.endswith("rows ← ?") for line in lines)
    assert lines[lines.index("to be filled in before it can run: 2") + 1] == (
        "  ○ nothing feeds 'rows' of toy/train: toy_data"
    )
    assert "      --input rows=PATH" in lines
    assert "  ○ 'judge.model' of toy/train still has to be filled in: a real value" in lines
    assert not (workplace / "home" / "runs").exists()
    refused = cli("run", "toy/train", "judge.model=/path/to/judge")
    assert refused.code == 2 and "error[E303]" in refused.err and "error[E307]" in refused.err
    assert cli("plan", "toy/train").code == 2


def test_the_profile_is_printed_without_its_secrets(cli: Cli, workplace: Path) -> None:
    (workplace / "env.toml").write_text(
        '[far]\nexecutor = "slurm"\nrun_partition = "quick"\nenv_vars = { HF_TOKEN = "hf-0123456789" }\n'
        'setup_lines = ["export API_TOKEN=abcdefgh1"]\n'
    )
    shown = cli("run", "toy/train", "-c", "tiny", "-d", "-r", "far")
    assert shown.code == 0
    profile = yaml.safe_load(shown.out.partition("# profile far\n")[2].partition("\n\n")[0])
    assert profile == {
        "executor": "slurm",
        "run_partition": "quick",
        "setup_lines": ["export API_TOKEN=***"],
        "env_vars": {"HF_TOKEN": "***"},
    }
    as_json = cli("run", "toy/train", "-c", "tiny", "-d", "-b", "far", "--json")
    assert as_json.json["profile"]["name"] == "far" and as_json.json["profile"]["run_partition"] == "quick"
    assert "abcdefgh1" not in as_json.out and "hf-0123456789" not in as_json.out


def test_a_name_is_a_file_where_no_step_has_a_config_of_that_name(cli: Cli, workplace: Path) -> None:
    (workplace / "mine.yaml").write_text("defaults: [tiny]\nsteps: 5\n")
    shown = cli("run", "toy/make", "toy/train", "-c", "mine", "-d")
    assert shown.code == 0, shown.err
    assert "-c ./mine.yaml" in shown.out
    (run,) = [cli("run", "toy/train", "-c", "mine", "--json").json["run"]]
    assert yaml.safe_load((workplace / "home/runs" / run / "config.yaml").read_text())["toy/train"]["steps"] == 5
    assert cli("plan", "toy/train", "-c", "mine", "--json").json["steps"][-1]["config"].endswith("mine.yaml")
    assert "has no config 'other'" in cli("plan", "toy/train", "-c", "other").err
    (workplace / "tiny.yaml").write_text("steps: 5\n")
    shown = cli("run", "toy/train", "-c", "tiny", "-d", "--json").json
    assert shown["configs"]["toy/train"]["steps"] == 3
    assert shown["warnings"] == ["-c tiny is that of toy/train, not ./tiny.yaml"]


def test_a_variable_that_is_set_and_not_taken_is_told(
    cli: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_ROWS", "other.jsonl")
    (workplace / "own.yaml").write_text("defaults: [default]\ndata: {path: '${oc.env:TOY_ROWS}'}\n")
    (said,) = cli("plan", "toy/make", "toy/train", "-c", "own", "--json").json["warnings"]
    assert (
        said == "TOY_ROWS is set, but 'rows' of toy/train is toy/make.rows; --input rows=\"$TOY_ROWS\" takes it instead"
    )


def test_logs_as_json_are_events_and_metrics_in_order(cli: Cli) -> None:
    cli("run", "toy/train", "-c", "tiny")
    for command in (("logs", "--json"), ("logs", "-f", "--json")):
        records = [json.loads(line) for line in cli(*command).out.splitlines()]
        assert [record["time"] for record in records] == sorted(record["time"] for record in records)
        kinds = [record["kind"] for record in records]
        assert kinds[0] == "run_started" and kinds[-1] == "run_finished"
        assert [r["index"] for r in records if r["kind"] == "metrics"] == [1, 2, 3]
    assert json.loads(cli("logs", "nowhere", "--json").out)["error"]["code"] == "E110"


OPD = "plan rl/nemo_rl/opd -c tiny"
LIST = "plan toy/make toy/train"


@pytest.mark.parametrize(
    ("typed", "mended"),
    [
        (f"{OPD} teachers.a=model", f"{OPD} --input teachers.a=model"),
        (f"{LIST} rows=x", f"{LIST} --input toy/train.rows=x"),
        (f"{LIST} toy/train.rows=x", f"{LIST} --input toy/train.rows=x"),
        ("plan toy/train --over steps=1,2 rows=x", "plan toy/train --over steps=1,2 --input train.rows=x"),
    ],
)
def test_the_command_is_offered_with_its_inputs(cli: Cli, typed: str, mended: str) -> None:
    result = cli(*shlex.split(typed))
    assert "unknown key" in result.err and "nothing feeds 'rows'" not in result.err
    assert hints_in(result)[0] in mended
    assert "unknown key" not in cli(*shlex.split(mended)).err
