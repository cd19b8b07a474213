"""A hint that is pasted makes things better: each test provokes a fault, pastes what was printed, and looks again."""

from __future__ import annotations

import json
import shlex

import pytest
import yaml

from nemotron_steps.config.schema.data_prep import JsonlSource, RlPrepConfig, SplitRows
from nemotron_steps.engine.grpo.filters import too_few_groups
from nemotron_steps.environments.agents import route
from nemotron_steps.errors import DataError
from nemotron_steps.manifest.packs import PackSearch, builtin_pack_root, open_pack
from nemotron_steps.manifest.registry import load_registry
from nemotron_steps.runs.context import plain_context
from nemotron_steps.runs.hints import Signal, hints_for_signals
from nemotron_steps.steps.data_prep import rl_prep


def built_in(step):
    return load_registry(PackSearch((open_pack(builtin_pack_root(), "nemotron_steps", "built-in"),))).steps[step]


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
    key, _, environment = caught.value.hints[0].partition("=")
    assert environment == meant
    environment = "mcqa" if meant == "NAME" else meant
    planned = cli("plan", "rl/nemo_rl/rlvr", "-c", "tiny", f"{key}={environment}", "--json")
    assert planned.code == 0, planned.err
    settings = {agent: {"environment": environment}}
    assert key == f"env.nemo_gym.environments.{agent}.environment"
    assert route(row, "rows.jsonl:1", settings) == environment


def prepare(folder, rows, **settings):
    folder.mkdir()
    source = folder / "mine.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RlPrepConfig(jsonl=JsonlSource(path=str(source)), rows=SplitRows(validation=0), **settings)
    context = plain_context(config, folder / "run", outputs={"prompts": "rl_prompts"})
    rl_prep.run(context)
    return (context.outputs["prompts"].path / "train-split.jsonl").read_text().splitlines()


def question(agent="mcqa", **extra):
    prompt = {"input": [{"role": "user", "content": "A or B?"}]}
    fields = {"expected_answer": "A", "options": [{"A": "one"}, {"B": "two"}], **extra}
    fields = {key: value for key, value in fields.items() if value is not None}
    return {"responses_create_params": prompt, **fields, "agent_ref": {"name": agent}}


def settings_pasted(hint):
    return {key: yaml.safe_load(value) for key, value in (word.split("=", 1) for word in hint.split())}


@pytest.mark.parametrize("bad", [1, 2, 7, 29])
def test_a_few_unusable_rows_are_left_out_with_the_share_that_is_offered(tmp_path, bad):
    rows = [question(expected_answer=None if number < bad else "A") for number in range(100)]
    with pytest.raises(DataError, match=f"{bad} of 100 rows") as caught:
        prepare(tmp_path / "wrong", rows)
    (offered,) = [hint for hint in caught.value.hints if hint.startswith("max_refused_share")]
    assert len(prepare(tmp_path / "right", rows, **settings_pasted(offered))) == 100 - bad


@pytest.mark.parametrize("name", ["rlvr", "rlhf", "swe"])
def test_equal_rewards_are_not_answered_with_a_setting_that_ends_the_run(name, cli):
    manifest, config = built_in(f"rl/nemo_rl/{name}"), {"grpo": {"num_generations_per_prompt": 4}}
    signals = [Signal("low_reward_variance"), Signal("reward_saturated")]
    advice = hints_for_signals(signals, manifest, config)
    pasted = [override for hint in advice for override in hint.overrides]
    assert "grpo.num_generations_per_prompt=8" in pasted
    assert not any("dynamic_sampling" in override for override in pasted)
    if name == "rlvr":
        assert cli("plan", "rl/nemo_rl/rlvr", "-c", "tiny", "grpo.num_generations_per_prompt=8").code == 0


def test_where_no_group_differs_nothing_is_advised_that_trains_on_nothing():
    none, some = too_few_groups(0, 4, 40, 10, 8), too_few_groups(2, 4, 40, 10, 8)
    assert none.hints[0].split()[0] == "grpo.num_generations_per_prompt=16"
    assert not any("dynamic_sampling" in hint for hint in none.hints)
    batches = int(some.hints[0].rpartition("=")[2])
    assert batches * 4 * 2 / 40 >= 4  # groups with a signal, at the share that was seen
    assert "grpo.use_dynamic_sampling=false" in some.hints
