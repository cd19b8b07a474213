from __future__ import annotations

import yaml

from nemotron_steps.cli.main import nemotron


def test_a_plan_shows_sources_converters_and_what_is_cached(cli):
    result = cli("plan", "toy/train", "toy/score", "-c", "tiny")
    assert result.code == 0
    lines = [line.split() for line in result.out.splitlines()]
    assert lines[0][-4:] == ["4", "steps,", "nothing", "cached"]
    assert lines[1][:3] == ["●", "1", "toy/make"]
    assert lines[2][1:4] == ["2", "toy/train", "tiny"]
    assert "inserted: toy/score.export needs toy_export" in result.out


def test_plan_json_is_json_only(cli):
    plan = cli("plan", "toy/train", "-c", "tiny", "--json").json
    assert [step["step"] for step in plan["steps"]] == ["toy/make", "toy/train"]
    assert plan["steps"][1]["inputs"]["rows"] == {"step": "toy/make", "port": "rows"}
    assert plan["goals"] == ["toy/train"]


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


def test_a_path_for_a_type_of_a_pack_needs_no_recognising(cli, workplace):
    rows = workplace / "rows"
    rows.mkdir()
    (rows / "train.jsonl").write_text('{"number": 1}\n')
    result = cli("run", "toy/train", "--input", f"rows={rows}", "--json")
    assert result.code == 0, result.out
    assert cli("run", "toy/train", f"data.path={rows}", "--json").code == 0


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


def test_what_is_typed_wins_over_what_the_pipeline_says(cli, workplace):
    file = workplace / "mine.toml"
    stages = '[[stages]]\nstep = "toy/make"\n[[stages]]\nstep = "toy/train"\nconfig = "tiny"\n'
    file.write_text(f'[pipeline]\nname = "mine"\n{stages}overrides = ["steps=7", "optimizer.lr=0.7"]\n')
    file.write_text(file.read_text() + 'inputs = { rows = "make.rows" }\n')
    shown = cli("run", str(file), "train.steps=9", "-d", "--json").json
    assert shown["configs"]["train"]["steps"] == 9 and shown["configs"]["train"]["optimizer"]["lr"] == 0.7


def test_an_override_of_one_of_several_steps_keeps_what_it_does_with_the_key(cli):
    for override in ("++steps=2", "~judge"):
        sign, key = override[: len(override) - len(override.lstrip("+~"))], override.lstrip("+~")
        plan = cli("plan", "toy/train", "toy/score", "-c", "tiny", f"{sign}toy/train.{key}", "--json").json
        overrides = {step["step"]: step["overrides"] for step in plan["steps"]}
        assert overrides["toy/train"] == [override] and overrides["toy/score"] == []


def test_a_pipeline_file(cli, workplace):
    file = workplace / "mine.toml"
    file.write_text('[pipeline]\nname = "mine"\n[[stages]]\nstep = "toy/make"\n')
    assert [step["key"] for step in cli("plan", str(file), "--json").json["steps"]] == ["make"]
    assert "no such pipeline file" in cli("plan", "./gone.toml").err


def test_a_config_file_is_for_the_last_step(cli, workplace):
    (workplace / "mine.yaml").write_text("defaults: [tiny]\nsteps: 5\n")
    shown = cli("run", "toy/make", "toy/train", "-c", "./mine.yaml", "-d", "--json").json
    assert shown["configs"]["toy/train"]["steps"] == 5


def test_a_base_is_that_of_the_steps_own_pack_where_another_has_one_of_the_name(cli, workplace, monkeypatch):
    for pack, number in (("one", 1), ("two", 2)):
        root = workplace / pack
        files = {
            f"manifests/{pack}.toml": f'[step]\nid = "{pack}/step"\n[[produces]]\ntype = "t"\n',
            "configs/shared/base.yaml": f"number: {number}\n",
            f"configs/{pack}/step/default.yaml": "defaults: [/shared/base@_here_]\n",
        }
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    monkeypatch.setenv("STEPS_PATH", f"{workplace / 'one'}:{workplace / 'two'}")
    for pack, number in (("one", 1), ("two", 2)):
        shown = cli("run", f"{pack}/step", "-d", "--json").json
        assert shown["configs"] == {f"{pack}/step": {"number": number}}


def test_positionals_may_stand_after_flags(cli):
    shown = cli("run", "toy/train", "-c", "tiny", "steps=2", "--json", "optimizer.lr=0.2", "-d").json
    assert shown["configs"]["toy/train"]["steps"] == 2
    assert shown["configs"]["toy/train"]["optimizer"]["lr"] == 0.2


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


def test_secrets_are_never_shown(cli, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "tok-0123456789")
    result = cli("run", "toy/train", "-c", "tiny", "-d", "judge.api_key=hunter2hunter2", "judge.model=x/tok-0123456789")
    assert result.code == 0
    assert "hunter2" not in result.out + result.err
    assert "tok-0123456789" not in result.out + result.err
    assert result.out.count("***") >= 3
    wrong = cli("plan", "toy/train", "-c", "tiny", "judge.api_key=[hunter2hunter2]")
    assert wrong.code == 2
    assert "hunter2" not in wrong.out + wrong.err
    for keys in (["judge.api_key=[hunter2hunter2]"], ["judge.apikey=hunter2hunter2", "steps=x"]):
        for flags in ([], ["--json"]):
            wrong = cli("run", "toy/train", "-c", "tiny", *keys, *flags)
            assert wrong.code == 2
            assert "hunter2" not in wrong.out + wrong.err
    assert "hunter2" not in cli("plan", "toy/train", "-c", "tiny", "judge.api_key=hunter2hunter2", "--json").out


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


def test_a_profile_is_part_of_the_check(cli, workplace):
    (workplace / "env.toml").write_text('[small]\nexecutor = "slurm"\nnodes = 1\ngpus_per_node = 0\n')
    assert cli("plan", "toy/train", "-c", "tiny", "-r", "small").code == 0
    wrong = cli("plan", "toy/train", "-c", "tiny", "-r", "smal")
    assert wrong.code == 2
    assert "hint: -r small" in wrong.err


def test_a_plan_reads_the_variables_of_its_local_profile(cli, workplace, monkeypatch):
    monkeypatch.setenv("TOY_STEPS", "")  # so that it is taken back
    monkeypatch.delenv("TOY_STEPS")
    (workplace / "env.toml").write_text('[here]\nexecutor = "local"\nenv_vars = { TOY_STEPS = "4" }\n')
    shown = cli("plan", "toy/train", "-c", "tiny", "-r", "here", "steps='${oc.decode:${oc.env:TOY_STEPS}}'")
    assert shown.code == 0, shown.err


def test_nemotron_steps_is_steps(cli, capsys):
    assert nemotron(["steps", "plan", "toy/make"]) == 0
    assert "toy/make" in capsys.readouterr().out
    assert nemotron([]) == 0
    assert "usage: nemotron" in capsys.readouterr().out
    assert nemotron(["stpes"]) == 2
    assert "nemotron steps" in capsys.readouterr().err


def test_the_source_of_an_input_can_be_overridden(cli):
    plan = cli("plan", "toy/train", "-c", "tiny", "inputs.rows.overrides=['count=9']", "--json").json
    assert plan["steps"][0]["overrides"] == ["count=9"]


def test_a_name_that_could_be_a_models_is_one_where_a_checkpoint_is_wanted(cli):
    shown = cli("run", "rl/nemo_rl/rlvr", "-c", "one_node", "--input", "policy=org/model", "-d", "--json").json
    assert [(step["step"], step["inserted"]) for step in shown["steps"]] == [
        ("convert/hf_to_megatron", True),
        ("rl/nemo_rl/rlvr", False),
    ]
    absent = cli("plan", "toy/train", "--input", "rows=org/model")
    assert absent.code == 2 and "'org/model' is neither a path nor an artifact" in absent.err
