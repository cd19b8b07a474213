"""`steps plan` and dry runs: what would run, and what is refused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from nemotron_steps import plan
from nemotron_steps.cli.main import nemotron
from nemotron_steps.cli.parser import build, request_of
from nemotron_steps.environments.agents import route
from nemotron_steps.errors import DataError, StepsError
from nemotron_steps.manifest.packs import PackSearch, builtin_pack_root, open_pack
from nemotron_steps.manifest.registry import load_registry
from nemotron_steps.session.session import Session
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


DEFAULTS = (
    "convert/hf_to_megatron",
    "convert/megatron_to_hf",
    "data_prep/rl_prep",
    "data_prep/sft_prep",
    "eval/model_eval",
    "reward_model/genrm",
    "rl/nemo_rl/dpo",
    "rl/nemo_rl/opd",
    "rl/nemo_rl/rlhf",
    "rl/nemo_rl/rlvr",
    "rl/nemo_rl/swe",
    "sft/automodel",
    "sft/megatron_bridge",
)


@pytest.mark.parametrize("step", DEFAULTS)
def test_the_default_of_every_step_dry_runs_with_nothing_supplied(cli: Cli, step: str) -> None:
    shown = cli("run", step, "-c", "default", "--dry-run", "--json")
    assert shown.code == 0, shown.out
    assert shown.json["steps"][-1]["step"] == step and shown.json["configs"][step]


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


def test_an_environment_variable_that_changes_nothing_is_mentioned(
    cli: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warnings(*command: str) -> list[str]:
        found: list[str] = cli("plan", *command, "--json").json["warnings"]
        return found

    assert warnings("rl/nemo_rl/rlhf", "-c", "tiny") == []
    monkeypatch.setenv("RL_REWARD_MODEL", "")
    assert warnings("rl/nemo_rl/rlvr", "-c", "tiny") == []
    judge = cli("run", "rl/nemo_rl/rlhf", "-c", "default", "-d", "--json").json["steps"][-1]["inputs"]["reward_model"]
    assert judge["ref"] == "meta-llama/Llama-3.2-1B-Instruct"
    monkeypatch.setenv("RL_REWARD_MODEL", "/none/here")
    absent = cli("plan", "rl/nemo_rl/rlhf", "-c", "tiny").err
    assert "'/none/here' is neither" in absent and "hint: export RL_REWARD_MODEL=PATH\n" in absent
    monkeypatch.setenv("RL_REWARD_MODEL", "my/judge")
    for config in ("tiny", "tiny_hybrid", "default", "super3", "small", "test"):  # before the config's own source
        plan = cli("run", "rl/nemo_rl/rlhf", "-c", config, "-d", "--json").json
        assert plan["steps"][-1]["inputs"]["reward_model"]["ref"] == "my/judge" and plan["warnings"] == []
    assert warnings("rl/nemo_rl/rlhf", "-c", "tiny", "--input", "reward_model=my/judge") == [
        "RL_REWARD_MODEL is set, but 'reward_model' of rl/nemo_rl/rlhf is my/judge; "
        '--input reward_model="$RL_REWARD_MODEL" takes it instead'
    ]
    (other,) = warnings("rl/nemo_rl/rlvr", "-c", "tiny")  # which of its configs reads it is for the recipes to say
    assert other.startswith("RL_REWARD_MODEL is set, and nothing in the config of rl/nemo_rl/rlvr reads it (its config")


def test_force_shows_what_will_run(cli: Cli) -> None:
    cli("run", "toy/train", "toy/score", "-c", "tiny")
    asked = ("toy/train", "-c", "tiny")
    cached = cli("plan", *asked, "--json").json["steps"]
    assert [step["cached"] is not None for step in cached] == [True, True]
    for command in (("plan", *asked), ("run", "-d", *asked)):
        forced = cli(*command, "--force", "--json").json["steps"]
        assert [step["cached"] is not None for step in forced] == [True, False]
    ran = cli("run", *asked, "--force")
    plan, _, rest = ran.out.partition("\n\n")
    assert "1 cached" in plan and "● " in plan and "1 ran, 1 cached" in rest
    # What reads a forced step's output is not known to be cached.
    chain = cli("plan", "toy/train", "toy/score", "-c", "tiny", "--force", "--json").json["steps"]
    assert {step["key"]: step["cached"] is not None for step in chain} == {
        "toy/make": True,
        "toy/train": False,
        "toy/convert": False,
        "toy/score": False,
    }


def test_a_name_is_a_file_where_no_step_has_a_config_of_that_name(cli: Cli, workplace: Path) -> None:
    (workplace / "mine.yaml").write_text("defaults: [tiny]\nsteps: 5\n")
    shown = cli("run", "toy/make", "toy/train", "-c", "mine", "-d")
    assert shown.code == 0, shown.err
    assert "-c ./mine.yaml" in shown.out
    (run,) = [cli("run", "toy/train", "-c", "mine", "--json").json["run"]]
    assert yaml.safe_load((workplace / "home/runs" / run / "config.yaml").read_text())["toy/train"]["steps"] == 5
    assert cli("plan", "toy/train", "-c", "mine", "--json").json["steps"][-1]["config"].endswith("mine.yaml")
    assert "has no config 'other'" in cli("plan", "toy/train", "-c", "other").err


def test_a_steps_own_config_is_not_replaced_by_a_file_and_that_is_said(cli: Cli, workplace: Path) -> None:
    (workplace / "tiny.yaml").write_text("steps: 5\n")
    shown = cli("run", "toy/train", "-c", "tiny", "-d", "--json").json
    assert shown["configs"]["toy/train"]["steps"] == 3
    assert shown["warnings"] == ["-c tiny is that of toy/train, not ./tiny.yaml"]


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
        (f"{OPD} --input teachers.a=x teachers.b=y", f"{OPD} --input teachers.a=x --input teachers.b=y"),
        (f"{OPD} +teachers.a=model", f"{OPD} --input teachers.a=model"),
        ("plan toy/train \"rows='a b'\"", "plan toy/train --input 'rows=a b'"),
        (f"{LIST} rows=x", f"{LIST} --input toy/train.rows=x"),
        (f"{LIST} toy/train.rows=x", f"{LIST} --input toy/train.rows=x"),
        ("plan toy/train toy/make rows=x", "plan toy/train toy/make --input toy/train.rows=x"),
        ("plan toy/train --over steps=1,2 rows=x", "plan toy/train --over steps=1,2 --input train.rows=x"),
    ],
)
def test_the_command_is_offered_with_its_inputs(cli: Cli, typed: str, mended: str) -> None:
    result = cli(*shlex.split(typed))
    assert "is an input of" in result.err and "nothing feeds 'rows'" not in result.err
    assert hints_in(result)[0] in mended
    assert "is an input of" not in cli(*shlex.split(mended)).err


def test_a_key_of_the_config_is_none(cli: Cli) -> None:
    result = cli(*OPD.split(), "policy.max_total_sequence_length=word", "grpo.prompts=3")
    assert "is an input" not in result.err and "unknown key 'grpo.prompts'" in result.err


def test_the_python_api_says_the_same(cli: Cli) -> None:
    with pytest.raises(StepsError, match="'prompts' is an input of rl/nemo_rl/rlvr") as caught:
        plan("rl/nemo_rl/rlvr", config="tiny", overrides={"prompts": "rows.jsonl"})
    assert "hint: --input prompts=rows.jsonl" in str(caught.value)


STEPS = load_registry(PackSearch((open_pack(builtin_pack_root(), "nemotron_steps", "built-in"),))).steps
SMALL = ("tiny", "one_gpu")
WHERE_IT_HAPPENS = {
    "Training uses answers of weights that are too old": ("grpo.async_grpo.enabled=true",),
    "Answers are sampled nearly at random": ("policy.generation.temperature=2",),
    "Filters leave nothing to train on": ("grpo.seq_logprob_error_threshold=1",),
    "The KL penalty outweighs the reward": ("loss_fn.reference_policy_kl_penalty=1",),
}
"""What a run has that can see the fault, beside its config."""
ADVICE = [
    pytest.param(step, config, advice, id=f"{step.id}-{config}-{getattr(advice, 'name', None) or advice.when}")
    for step in STEPS.values()
    for config in [name for name in SMALL if name in step.config_names] or ["default"]
    for advice in (*step.strategies, *step.errors)
    if advice.override
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Session(home=str(tmp_path_factory.mktemp("home")))


def config_of(bench, step, config, *overrides):
    arguments = build("steps").parse_args(["plan", step.id, *overrides, "-c", config])
    plan = bench.plan(request_of(arguments), allow_unfilled=True)
    (planned,) = [planned for planned in plan if planned.key == step.id]
    return planned.config


@pytest.mark.parametrize(("step", "config", "advice"), ADVICE)
def test_an_override_that_a_manifest_suggests_can_be_pasted_and_changes_the_run(step, config, advice, bench):
    given = WHERE_IT_HAPPENS.get(getattr(advice, "when", ""), ())
    before = config_of(bench, step, config, *given)
    printed = " ".join(advice.overrides_for(before))
    after = config_of(bench, step, config, *given, *shlex.split(printed))
    assert after != before, printed


def pasted(err: str, marker: str) -> list[str]:
    """The words that a shell makes of the printed hint that contains `marker`."""
    (hint,) = [line.split("hint: ", 1)[1] for line in err.splitlines() if "hint: " in line and marker in line]
    return shlex.split(hint, comments=True)


@pytest.mark.parametrize(
    ("given", "there"),
    [("[count=5]", ["count=5"]), ("[count=5,lines.first=[1,2]]", ["count=5", "lines.first=[1,2]"])],
)
def test_a_list_of_overrides_stays_a_list_when_its_items_are_quoted(cli, given, there):
    wrong = cli("plan", "toy/train", "-c", "tiny", f"inputs.rows.overrides={given}")
    assert wrong.code == 2
    right = cli("plan", "toy/train", "-c", "tiny", *pasted(wrong.err, "quotes special"), "--json")
    if len(there) == 1:
        assert right.json["steps"][0]["overrides"] == there
    else:  # what is asked for is read; that the step lacks one of the keys is the next thing to say
        assert "does not parse" not in right.out
        assert "'lines" in right.out


@pytest.mark.parametrize(("agent", "meant"), [("countdown_grader", "NAME"), ("resoning_gym_agent", "reasoning_gym")])
def test_an_unknown_agent_is_served_by_the_keys_that_the_hint_names(agent, meant, cli):
    row = {"agent_ref": {"name": agent}}
    with pytest.raises(DataError, match="no environment here serves") as caught:
        route(row, "rows.jsonl:1", {})
    key, _, environment = next(hint for hint in caught.value.hints if hint.startswith("env.nemo_gym")).partition("=")
    assert environment == meant
    environment = "mcqa" if meant == "NAME" else meant
    planned = cli("plan", "rl/nemo_rl/rlvr", "-c", "tiny", f"{key}={environment}", "--json")
    assert planned.code == 0, planned.err
    settings = {agent: {"environment": environment}}
    assert key == f"env.nemo_gym.environments.{agent}.environment"
    assert route(row, "rows.jsonl:1", settings) == environment
