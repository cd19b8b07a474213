"""A hint that is pasted makes things better: each test provokes a fault, pastes what was printed, and looks again."""

from __future__ import annotations

import json
import shlex

import pytest
import yaml

from nemotron_steps.config.schema.data_prep import JsonlSource, RlPrepConfig, SplitRows
from nemotron_steps.engine.grpo.filters import too_few_groups
from nemotron_steps.environments.agents import route
from nemotron_steps.environments.registry import create
from nemotron_steps.errors import ConfigError, DataError
from nemotron_steps.manifest.packs import PackSearch, builtin_pack_root, open_pack
from nemotron_steps.manifest.registry import load_registry
from nemotron_steps.runs.context import plain_context
from nemotron_steps.runs.hints import Signal, hints_for_failure, hints_for_signals
from nemotron_steps.steps.data_prep import rl_prep
from tests.artifacts.checkpoint_files import write_hf


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


def test_a_model_of_the_hub_added_as_megatron_is_converted_by_what_is_pasted(cli, workplace):
    model = write_hf(workplace / "model")
    wrong = cli("artifacts", "add", str(model), "--type", "checkpoint_megatron")
    assert wrong.code == 2
    _, *words = pasted(wrong.err, "hf_to_megatron")
    right = cli(*words, "-d")
    assert right.code == 0, right.err


def test_an_environment_without_its_address_says_which_key_to_set():
    with pytest.raises(ConfigError, match="url") as caught:
        create("remote", {})
    url, head_server = (hint.partition("=") for hint in caught.value.hints)
    assert url[0] == "env.nemo_gym.environments.remote.url"
    create("remote", {"url": url[2].replace("HOST:PORT", "127.0.0.1:9")})
    assert head_server[0] == "env.nemo_gym.environments.remote.head_server.host"
    create("remote", {"head_server": {"host": head_server[2]}})


def test_an_environment_with_two_addresses_says_how_to_take_one_away():
    given = {"url": "http://127.0.0.1:9", "head_server": {"port": 11000}}
    with pytest.raises(ConfigError, match="either url or head_server") as caught:
        create("remote", given)
    hints = [hint.removeprefix("env.nemo_gym.environments.remote.") for hint in caught.value.hints]
    assert hints == ["url=null", "head_server=null"]
    for hint in hints:
        create("remote", {**given, hint.partition("=")[0]: None})


def test_a_misspelt_setting_of_an_environment_is_given_its_name():
    with pytest.raises(ConfigError) as caught:
        create("remote", {"url": "http://127.0.0.1:9", "timeouts": 5})
    (hint,) = caught.value.hints
    assert hint == "env.nemo_gym.environments.remote.timeout_s=5"
    create("remote", {"url": "http://127.0.0.1:9", "timeout_s": 5})


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


def test_preparation_offers_its_own_key_for_an_agent_that_only_a_run_defines(tmp_path):
    rows = [question("of_my_own")]
    with pytest.raises(DataError, match="no environment here serves") as caught:
        prepare(tmp_path / "wrong", rows)
    assert not any("env." in hint for hint in caught.value.hints)
    assert len(prepare(tmp_path / "right", rows, **settings_pasted(caught.value.hints[0]))) == 1


def test_rows_without_an_agent_get_the_one_that_is_pasted(tmp_path):
    gym = {"question": "Spell no", "answer": "on", "metadata": {"source_dataset": "spell_backward"}}
    rows = [{**question(), **gym, "agent_ref": None} for _ in range(2)]
    with pytest.raises(DataError, match="names no agent") as caught:
        prepare(tmp_path / "wrong", rows)
    assert len(prepare(tmp_path / "right", rows, **settings_pasted(caught.value.hints[0]))) == 2
    with pytest.raises(DataError, match="names no agent"):
        prepare(tmp_path / "nameless", [{**question(), "agent_ref": {}}])


@pytest.mark.parametrize("bad", [1, 2, 7, 29])
def test_a_few_unusable_rows_are_left_out_with_the_share_that_is_offered(tmp_path, bad):
    rows = [question(expected_answer=None if number < bad else "A") for number in range(100)]
    with pytest.raises(DataError, match=f"{bad} of 100 rows") as caught:
        prepare(tmp_path / "wrong", rows)
    (offered,) = [hint for hint in caught.value.hints if hint.startswith("max_refused_share")]
    assert len(prepare(tmp_path / "right", rows, **settings_pasted(offered))) == 100 - bad


def test_a_field_that_every_row_lacks_is_named_and_no_share_is_offered(tmp_path):
    rows = [question(expected_answer=None) for _ in range(4)]
    with pytest.raises(DataError, match=r"4 of 4 rows .* lacks the field `expected_answer`.*`mcqa`") as caught:
        prepare(tmp_path / "wrong", rows)
    assert "max_refused_share" not in str(caught.value)
    assert "expected_answer" in caught.value.expected
    manifest = built_in("data_prep/rl_prep")
    assert not any(hint.overrides for hint in hints_for_failure(caught.value, [], manifest, {}))
    assert len(prepare(tmp_path / "right", [{**row, "expected_answer": "A"} for row in rows])) == 4


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
