"""GRPO, SFT, DPO and evaluate from a model, rows and functions in Python: the same runs as on the command line."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from nemotron_steps import DPO, GRPO, SFT, Registry, evaluate, open_run, run
from nemotron_steps.api.training import Evaluation
from nemotron_steps.cli.main import steps
from nemotron_steps.errors import ConfigError, RequestError, UnknownNameError
from nemotron_steps.session.session import Session
from tests.api.conftest import ROWS, TINY

WORTH = {"a": 1.0}


def shorter(completions, **columns):
    return [-float(len(each)) for each in completions]


@pytest.mark.slow
@pytest.mark.chain
def test_ten_lines_train_and_what_they_did_is_there_to_be_read(model: Path, workplace: Path, capsys: Any) -> None:
    async def letters(prompts, completions, answer, **columns):
        assert len(prompts) == len(completions) == len(answer)
        return [sum(WORTH.get(letter, 0.0) for letter in each) for each in completions]

    training = GRPO(model, ROWS, rewards=[shorter, letters], weights=[0.1, 1.0], config="cpu", **TINY)

    async def in_a_notebook():
        return training.run(progress=False)

    result = asyncio.run(in_a_notebook())  # a cell runs within a loop
    assert result.status == "done" and capsys.readouterr().out == ""
    assert list(result.metrics["reward/mean"]) == [1, 2]
    assert {"model"} == set(result.outputs)
    assert result.report.is_file()
    above = result.artifacts.lineage(result.outputs["model"])["ancestors"]
    assert {"policy", "prompts"} <= {link["port"] for link in above}
    assert "reward/mean" in result._repr_html_() and "<svg" in result._repr_html_()

    # The command line knows it: the same request is cached, and the run is resumed by its id.
    assert steps(["run", *training_words(training), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {step["state"] for step in said["steps"]} == {"cached"}
    assert training.plan().cached
    assert run(resume=result.id, progress=False).id == result.id
    assert open_run(result.id).metrics == result.metrics

    # What a function says, and what it uses, is part of the run.
    WORTH["b"] = 1.0
    try:
        changed = GRPO(model, ROWS, rewards=[shorter, letters], weights=[0.1, 1.0], config="cpu", **TINY)
        assert not changed.plan().cached
    finally:
        del WORTH["b"]

    assert steps(["artifacts", "export", result.outputs["model"].ref, "trained", "--hf"]) == 0
    assert "convert/megatron_to_hf" in capsys.readouterr().out and Path("trained", "model.safetensors").is_file()
    saved = result.save("saved", hf=True)  # converted already
    assert (saved / "model.safetensors").read_bytes() == Path("trained", "model.safetensors").read_bytes()


def test_validation_is_asked_for_where_no_key_says_when(model: Path, workplace: Path) -> None:
    def command(**more: Any) -> list[str]:
        return GRPO(model, ROWS, shorter, config="cpu", validation=ROWS[:2], **more).command.split()

    assert "grpo.val_at_end=true" in command(over={"grpo.seed": [1, 2]})
    assert "grpo.val_at_end=true" in command(grpo={"val_period": 0})
    assert "grpo.val_at_end=true" not in command(grpo={"val_period": 1})
    assert "grpo.val_at_start=true" not in command(overrides=["grpo.val_at_end=true"])
    (workplace / "own.yaml").write_text("defaults: [cpu]\ngrpo: {val_at_start: true}\n")
    assert "grpo.val_at_end=true" not in GRPO(model, ROWS, shorter, config="own", validation="held.jsonl").command


PAIRS = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "no"} for row in ROWS]


@pytest.mark.slow
@pytest.mark.chain
def test_what_one_step_makes_is_the_model_of_the_next(model: Path, workplace: Path) -> None:
    datasets, pandas = pytest.importorskip("datasets"), pytest.importorskip("pandas")
    small: dict[str, Any] = {
        "config": "cpu",
        "policy": {"max_total_sequence_length": 64, "train_global_batch_size": 4},
    }
    chats = datasets.Dataset.from_list(ROWS)
    sft = SFT(model, chats, validation=ROWS[:2], sft={"max_num_steps": 2}, **small).run(progress=False)
    assert set(sft.metrics["validation_loss"]) == {0, 2} and list(sft.metrics["loss"]) == [1, 2]
    dpo = DPO(sft, pandas.DataFrame(PAIRS), validation=PAIRS[:2], dpo={"max_num_steps": 2}, **small)
    aligned = dpo.run(progress=False)
    assert aligned.summary["validation_accuracy"]["before"] == 0.5
    graded = evaluate(aligned, ROWS, reward=shorter, progress=False, **SHORT)
    answers = (graded.outputs["report"].path / "answers.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["reward"] for line in answers]
    assert len(rewards) == len(ROWS) and all(reward < 0 for reward in rewards)
    assert graded.metrics["heldout/reward"] == {0: graded.summary["reward"]} == {0: pytest.approx(sum(rewards) / 8)}
    with pytest.raises(RequestError, match="has made no model") as caught:
        GRPO(graded, ROWS, shorter)
    assert caught.value.found == "done: report"


SHORT = {"evaluation": {"max_total_sequence_length": 64}, "generation": {"max_new_tokens": 4}}


@pytest.mark.parametrize(
    ("asked", "rows", "more", "inserted", "said"),
    [
        (SFT, ROWS, {}, ["data_prep/import_chats"], "-c cpu --input model="),
        (SFT, [{"text": "Human: 1?\n\nAssistant: 2"}], {"config": "one_gpu"}, ["data_prep/import_chats"], "-c one_gpu"),
        (SFT, ROWS, {"validation": ROWS[:2]}, ["data_prep/import_chats"] * 2, "--input validation="),
        (DPO, PAIRS, {}, ["convert/hf_to_megatron"], "--input preferences="),
        (Evaluation, ROWS, {"rewards": shorter, **SHORT}, ["data_prep/import_prompts"], "reward="),
        (Evaluation, ROWS, {"reward": [shorter], "weights": [2], **SHORT}, ["data_prep/import_prompts"], "weight: 2.0"),
    ],
)  # fmt: skip
def test_rows_in_memory_are_imported_for_the_step_that_is_asked_for(
    model: Path, workplace: Path, asked: Any, rows: Any, more: dict[str, Any], inserted: list[str], said: str
) -> None:
    more = {"policy": {"max_total_sequence_length": 64}, "config": "cpu", **more} if asked is not Evaluation else more
    one = asked(model, rows, **more)
    *before, goal = one.plan().steps
    assert sorted(key.partition("#")[0] for key in before) == inserted and goal == asked.STEP
    assert said in one.command


@pytest.mark.parametrize(
    ("asked", "more", "error", "told"),
    [
        (SFT, {"train_dataset": ROWS}, RequestError, "SFT has no argument 'train_dataset'"),
        (DPO, {"inputs": {}}, RequestError, "DPO has no argument 'inputs'"),
        (SFT, {"rewards": shorter}, RequestError, "SFT has no argument 'rewards'"),
        (GRPO, {"rewards": shorter, "reward": shorter}, RequestError, "given twice"),
        (GRPO, {"reward_funcs": shorter}, RequestError, "GRPO has no argument 'reward_funcs'"),
        (Evaluation, {"rewards": shorter, "weights": []}, ConfigError, "every reward has a weight"),
        (evaluate, {"rewards": shorter, "resume": "first"}, UnknownNameError, "there is no run yet"),
    ],
)
def test_what_a_step_has_no_use_for_is_refused(workplace: Path, asked: Any, more: Any, error: Any, told: str) -> None:
    with pytest.raises(error, match=told):
        asked("my-model", ROWS, **more)


def test_a_word_is_the_same_step_on_the_command_line() -> None:
    words = {"sft": SFT, "dpo": DPO, "grpo": GRPO, "eval": Evaluation}
    assert [Registry().show(word)["id"] for word in words] == [asked.STEP for asked in words.values()]


@pytest.mark.parametrize(
    ("asked", "more", "there"),
    [(GRPO, {}, False), (GRPO, {"validation": False}, True), (Evaluation, {"validation": False}, False)],
)
def test_nothing_is_held_out_where_that_is_said(workplace: Path, asked: Any, more: Any, there: bool) -> None:
    assert ("heldout.share=0" in asked("my-model", ROWS, shorter, **more).command) is there


PROFILES = {"none": "gpus_per_node = 0", "unsaid": "", "node": "gpus_per_node = 8"}


def training_words(training: GRPO) -> list[str]:
    import shlex

    return shlex.split(training.command)


@pytest.mark.parametrize(
    ("devices", "visible", "config"),
    [(1, None, "one_gpu"), (1, "0", "one_gpu"), (1, "-1", "cpu"), (0, None, "cpu"), (8, None, "one_node")],
)
def test_the_config_is_that_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, devices: int, visible: str | None, config: str
) -> None:
    for name in ("nvidiactl", *(f"nvidia{n}" for n in range(devices))):
        (tmp_path / name).touch()
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, kind: glob(tmp_path if str(self) == "/dev" else self, kind))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    env = tmp_path / "env.toml"
    env.write_text("".join(f'[{name}]\nexecutor = "slurm"\naccount = "a"\n{gpus}\n' for name, gpus in PROFILES.items()))
    monkeypatch.setenv("NEMOTRON_ENV_FILE", str(env))
    session = Session(str(tmp_path / "home"))
    assert session.device_config("rl/nemo_rl/rlvr", None) == config
    chosen = {name: session.device_config("rl/nemo_rl/rlvr", name) for name in PROFILES}
    assert chosen == {"none": "cpu", "unsaid": "one_gpu", "node": "one_node"}
    assert session.device_config("data_prep/rl_prep", None) is None
