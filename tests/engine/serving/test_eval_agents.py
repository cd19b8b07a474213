"""eval/model_eval grades what an agent does with the model it evaluates."""

from __future__ import annotations

import json

from nemotron_steps.config.schema.eval import EvalConfig
from nemotron_steps.runs.context import plain_context
from nemotron_steps.steps import evaluation
from tests.engine.serving.taught_model import MAX_LENGTH, QUESTION, TOOL
from tests.engine.serving.test_agent_rollouts import agent_server, tool_agent


def test_an_agent_is_evaluated(taught, tmp_path):
    rows = tmp_path / "rows.jsonl"
    row = {
        "responses_create_params": {"input": [QUESTION], "tools": [TOOL]},
        "agent_ref": {"type": "responses_api_agents", "name": "remote_agent"},
    }
    rows.write_text(json.dumps(row) + "\n")
    with agent_server(tool_agent) as url:
        config = EvalConfig.model_validate(
            {
                "model": str(taught),
                "data": {"data_path": str(rows)},
                "evaluation": {"samples_per_prompt": 2, "max_total_sequence_length": MAX_LENGTH},
                "generation": {"max_new_tokens": 100, "temperature": 0, "vllm_cfg": {"expose_http_server": True}},
                "env": {"nemo_gym": {"environments": {"remote_agent": {"url": url}}}},
            }
        )
        context = plain_context(config, tmp_path / "run", outputs={"report": "eval_report"})
        evaluation.model_eval(context)
    report = json.loads((context.outputs["report"].path / "report.json").read_text())
    assert report["reward"] == 1.0
