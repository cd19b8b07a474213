"""Which rows a run reads, what it needs of them, and what is asked for in vain."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps.config.schema.base import put_raw
from nemotron_steps.config.schema.rl import EnvConfig, RlConfig, VllmModelConfig
from nemotron_steps.engine.rollouts.data import PromptRow, read_rows
from nemotron_steps.engine.setup import rows as setup_rows
from nemotron_steps.engine.setup.backends import judge_folder
from nemotron_steps.engine.setup.rows import RunRows, check_rows, longer_than, read_data
from nemotron_steps.errors import ArtifactError, ConfigError, DataError, StepsError
from tests.models.checkpoints import write_tokenizer
from tests.models.stock_chats import stock_chat


def write(file: Path, count: int) -> str:
    rows = [{"responses_create_params": {"input": "x" * (n + 1)}} for n in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_what_rows_need_is_read_from_their_environments() -> None:
    def row(agent: str, **fields: Any) -> PromptRow:
        named = {"agent_ref": {"type": "responses_api_agents", "name": agent}}
        return PromptRow(0, {"responses_create_params": {"input": "x"}, **named, **fields}, "f:1")

    judge = {"responses_api_models": {"vllm_model": {"model": "m"}}}
    options = {"judge_model": judge, "environments": {"mine": {"environment": "mcqa"}}}
    config = EnvConfig.model_validate({"nemo_gym": options})
    mcqa = {"options": [{"A": "x"}], "expected_answer": "A"}
    rows = [row("mine", **mcqa), row("calendar", exp_cal_state={})]
    heldout = [row("calendar", rubric=[{"question": "Ok?"}])]
    needs = check_rows(config, rows, heldout, only=None, heldout_environment="multichallenge", policy_served=False)
    assert needs.environments == ("mine", "calendar", "multichallenge")
    assert (needs.judges, needs.trained_on) == ({"judge_model"}, {"mcqa", "calendar"})
    with pytest.raises(StepsError):
        check_rows(EnvConfig(), rows, heldout, only=None, heldout_environment="multichallenge", policy_served=False)
    with pytest.raises(DataError):
        check_rows(config, [row("mine")], only=None, policy_served=False)


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("by_row", [True, False])
def test_tools_that_the_policys_template_does_not_write_are_refused_before_a_run(
    writes: bool, by_row: bool, tmp_path: Path
) -> None:
    """An environment's own, or a row's."""
    chat = stock_chat("qwen3")
    if not writes:
        chat.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    chat.tokenizer.save_pretrained(str(tmp_path))
    tools = {"tools": [{"type": "function", "name": "add", "parameters": {}}]} if by_row else {}
    row = {
        "responses_create_params": {"input": "x", **tools},
        "options": [{"A": "1"}],
        "question": "x",
        "expected_answer": "A",
    }
    rows = [PromptRow(place, row, f"f:{place}") for place in (1, 2)]
    judge = {"responses_api_models": {"vllm_model": {"model": "m"}}}
    config = EnvConfig.model_validate({"nemo_gym": {"judge_model": judge}})

    def check() -> None:
        check_rows(config, rows, only="mcqa" if by_row else "ns_tools", policy_served=False, policy=tmp_path)

    if writes:
        check()
        return
    name = "add" if by_row else "stateful_python_code_exec"
    with pytest.raises(DataError, match=f"leaves out the tool `{name}`") as caught:
        check()
    assert (caught.value.where, caught.value.found) == ("f:1", f"the template of {tmp_path}")
    assert caught.value.hints[0].startswith("cp TEMPLATE.jinja")


def test_rows_are_counted_in_tokens_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path)
    rows = read_rows(Path(write(tmp_path / "a.jsonl", 9)))
    assert longer_than(6, rows, tmp_path) == {6: 7, 7: 8, 8: 9} and longer_than(9, rows, tmp_path) == {}
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["truncation"] = {"direction": "Right", "max_length": 7, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert longer_than(6, rows, tmp_path) == {6: 7, 7: 8, 8: 9}  # a limit of the tokenizer's own hides nothing
    monkeypatch.setattr(setup_rows, "_AT_ONCE", 2)
    assert longer_than(1, rows, tmp_path) == {place: place + 1 for place in range(1, 9)}
    (tmp_path / "tokenizer.json").unlink()
    assert longer_than(6, rows, tmp_path) == {}


IMPORT = "data_prep/import_prompts"


@pytest.mark.parametrize(
    ("distinct", "times", "keys", "made_by", "split"),
    [
        (50, 1, [], IMPORT, (5, 50)),
        (50, 2, [], IMPORT, (5, 50)),  # whoever asks the same is on the same side
        (1000, 1, [], IMPORT, (64, 1000)),
        (49, 2, [], IMPORT, None),
        (50, 1, ["grpo.num_prompts_per_step=46"], IMPORT, None),  # 45 make no step
        (50, 1, ["data.validation.data_path"], IMPORT, None),
        (50, 1, ["data.heldout.data_path"], IMPORT, None),
        (50, 1, ["heldout.share=0"], IMPORT, None),
        (50, 1, ["heldout.share=0.25", "data.validation.data_path"], IMPORT, (12, 50)),
        (9, 1, ["heldout.share=0.01"], "data_prep/rl_prep", (1, 9)),
        (50, 1, [], "data_prep/rl_prep", None),
        (50, 1, [], "", None),
    ],
)
def test_a_tenth_of_the_users_own_prompts_is_held_out(
    tmp_path: Path, distinct: int, times: int, keys: list[str], made_by: str, split: Any
) -> None:
    file = tmp_path / "train.jsonl"
    values: dict[str, Any] = {"data": {"train": {"data_path": str(file)}}, "grpo": {"num_prompts_per_step": 4}}
    for key in keys:
        name, _, value = key.partition("=")
        values = put_raw(values, name, json.loads(value) if value else write(tmp_path / "other.jsonl", 1))

    def asked(rows: Any) -> list[str]:
        return sorted(row.row["responses_create_params"]["input"] for row in rows)

    def read() -> RunRows:
        return read_data(RlConfig.model_validate(values), made_by=made_by)

    write(file, distinct)
    file.write_text(file.read_text() * times)
    rows = read()
    trained_on, held = asked(rows.train), asked(rows.heldout) if split else []
    every = ["x" * (n + 1) for n in range(distinct)] * times
    assert rows.split == split and sorted(trained_on + held) == sorted(every)
    if split:
        assert len(held) == split[0] * times and not {*trained_on} & {*held}
        file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))
        assert asked(read().heldout) == held  # by their texts alone


def test_a_share_of_prompts_that_have_held_out_rows_is_refused(tmp_path: Path) -> None:
    data = {split: {"data_path": write(tmp_path / f"{split}.jsonl", 9)} for split in ("train", "heldout")}
    with pytest.raises(ConfigError, match="held-out rows already"):
        read_data(RlConfig.model_validate({"data": data, "heldout": {"share": 0.1}}))


@pytest.mark.parametrize("backend", ["vllm", "embedded", "http"])
def test_a_judge_that_would_not_see_the_answers_is_told_before_anything_is_loaded(backend: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    model: dict[str, Any] = {"model": str(tmp_path), "backend": backend}
    if backend == "http":
        model["base_url"] = "http://127.0.0.1:1/v1"

    def check(template: str, layout: str) -> None:
        (tmp_path / "chat_template.jinja").write_text(template)
        gym = {
            "genrm_model": {"responses_api_models": {"vllm_model": model}},
            "environments": {"genrm_compare": {"layout": layout, "use_principle": True}},
        }
        row = {"responses_create_params": {"input": "?"}, "agent_ref": {"name": "genrm_simple_agent"}}
        config = EnvConfig.model_validate({"nemo_gym": gym})
        check_rows(config, [PromptRow(0, row, "rows.jsonl:3")], only=None, policy_served=False)

    any_role = "{% for m in messages %}{{ m.content }}{% endfor %}"
    refusing = "{% for m in messages if m.role != 'user' %}{{ raise_exception('no ' + m.role) }}{% endfor %}"
    users = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    check(any_role, "roles")
    check(users, "plain")
    if backend == "http":  # how a server writes them is not known
        model["max_total_sequence_length"] = 16
        check(users, "roles")
        return
    for template in (users, refusing):
        with pytest.raises(ConfigError, match="does not write response_1 and response_2 and principle") as caught:
            check(template, "roles")
    assert caught.value.hints[0].startswith("env.nemo_gym.environments.genrm_compare.layout=plain")
    with pytest.raises(ConfigError, match="does not write principle messages"):
        check(any_role.replace("messages", "messages if m.role != 'principle'"), "roles")
    model["max_total_sequence_length"] = 16
    with pytest.raises(DataError, match="leaves no room for its answer") as long:
        check(any_role, "roles")
    key = "env.nemo_gym.genrm_model.responses_api_models.vllm_model.max_total_sequence_length"
    assert (long.value.where, long.value.hints[0]) == ("rows.jsonl:3", f"{key}=32768")


def test_a_judge_without_a_model_is_refused_by_its_key() -> None:
    with pytest.raises(ArtifactError, match="has no model") as caught:
        judge_folder("judge_model", VllmModelConfig())
    assert caught.value.where == "env.nemo_gym.judge_model.responses_api_models.vllm_model.model"
