"""What the evaluation steps grade, go on with after a kill, and ask for."""

import json

import pytest

from nemotron_steps.config.schema.eval import EvalConfig, StagesEvalConfig
from nemotron_steps.errors import ConfigError
from nemotron_steps.runs.context import plain_context
from nemotron_steps.steps import evaluation
from nemotron_steps.steps.evaluation import eval_stages, model_eval
from tests.models.checkpoints import write_checkpoint

ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "ab"}]},
    "question": "Spell this word backward: ab",
    "answer": "ba",
    "metadata": {"source_dataset": "spell_backward"},
    "agent_ref": {"type": "responses_api_agents", "name": "reasoning_gym_simple_agent"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint("qwen3", folder)
    return str(folder)


def prompts(folder, **splits):
    folder.mkdir()
    for name, count in splits.items():
        (folder / f"{name}.jsonl").write_text((json.dumps(ROW) + "\n") * count)
    return str(folder)


def context_of(tmp_path, models, sets, **evaluation):
    config = StagesEvalConfig.model_validate(
        {
            "models": models,
            "prompts": sets,
            "evaluation": {"max_total_sequence_length": 32, **evaluation},
            "generation": {"max_new_tokens": 4},
        }
    )
    records = []
    context = plain_context(config, tmp_path, outputs={"report": "eval_report"}, listener=records.append)
    return context, records


def test_every_model_answers_every_set_of_heldout_rows_else_of_validation_rows(tmp_path, model):
    sets = {
        "blend": prompts(tmp_path / "a", **{"train-split": 9, "val-split": 3}),
        "own": prompts(tmp_path / "b", validation=9, heldout=4),
    }
    limits = {"samples_per_prompt": 2, "max_prompts": 2, "max_prompts_of": {"blend": 3}}
    context, records = context_of(tmp_path, {"late": model, "early": model}, sets, **limits)
    eval_stages(context)
    report = json.loads((context.outputs["report"].path / "report.json").read_text())
    assert {m: {s: f["samples"] for s, f in row.items()} for m, row in report["figures"].items()} == {
        "late": {"blend": 6, "own": 4},
        "early": {"blend": 6, "own": 4},
    }
    assert list(report["metrics"]) == ["late/blend", "late/own", "early/blend", "early/own"]
    (summary,) = [record["values"] for record in records if record["kind"] == "summary"]
    assert list(summary["heldout_reward"]) == ["late", "early"]


def test_an_evaluation_without_prompts_says_which_rows_of_a_folder_are_graded(tmp_path):
    context = plain_context(EvalConfig(model="a"), tmp_path, outputs={"report": "eval_report"})
    with pytest.raises(ConfigError, match="nothing to evaluate") as caught:
        model_eval(context)
    assert "heldout.jsonl is graded, else its validation rows, else all" in caught.value.hints[0]


def test_a_killed_evaluation_goes_on_with_the_next_model(tmp_path, model, monkeypatch):
    built, closed = evaluation.build_generator, []

    def noted(*given, **named):
        generator = built(*given, **named)
        close = generator.close
        monkeypatch.setattr(generator, "close", lambda: closed.append(1) or close())
        return generator

    monkeypatch.setattr(evaluation, "build_generator", noted)
    sets = {"own": prompts(tmp_path / "own", heldout=1)}
    context, records = context_of(tmp_path, {"first": model, "second": model}, sets)
    kept = {"own": {"reward": 0.75, "standard_error": 0.01}}
    (context.work / "0.json").write_text(json.dumps(kept))
    eval_stages(context)
    report = json.loads((context.outputs["report"].path / "report.json").read_text())
    assert report["figures"]["first"] == kept and report["figures"]["second"]["own"]["samples"] == 1
    assert [r["description"] for r in records if r["kind"] == "progress"] == ["grading second"]
    assert closed == [1]  # of the one model that was read
    (summary,) = [record["values"] for record in records if record["kind"] == "summary"]
    assert summary["largest_standard_error"] == 0.01  # one prompt has none
