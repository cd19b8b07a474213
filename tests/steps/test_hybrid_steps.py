"""Steps that the tiny chain of a hybrid does not go through, each on a hybrid of experts, as a user runs them."""

from __future__ import annotations

import json

import pytest

from tests.models.hybrid_twins import write_hybrid
from tests.steps.test_tiny_chain import steps, summaries

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BASH = {
    "type": "function",
    "name": "bash",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
}
SWE = """
defaults: [/rl/nemo_rl/base/tiny, _self_]
grpo: {max_num_steps: 2, num_prompts_per_step: 4, num_generations_per_prompt: 4}
policy:
  train_global_batch_size: 16
  train_micro_batch_size: 16
  max_total_sequence_length: 512
  generation: {tool_parser: hermes, max_sequences: 16}
"""
EVAL = """
evaluation: {environment: swe_pivot, samples_per_prompt: 2, max_total_sequence_length: 512}
generation: {max_new_tokens: 16, tool_parser: hermes}
"""


def row(number: int) -> dict:
    """A step of an agent's trajectory: what it should do next."""
    action = {"type": "function_call", "name": "bash", "arguments": json.dumps({"command": "grep -rn x ./src/a.py"})}
    asked = [{"role": "user", "content": f"Where is x{number} used?"}]
    return {
        "responses_create_params": {"input": asked, "tools": [BASH]},
        "agent_ref": {"type": "responses_api_agents", "name": "swe_pivot"},
        "expected_action": action,
    }


@pytest.mark.chain
@pytest.mark.slow
def test_swe_trains_a_hybrid_and_what_it_made_is_evaluated(tmp_path):
    write_hybrid("latent", tmp_path / "hf", initializer_range=0.1, max_position_embeddings=1024)
    (tmp_path / "hf" / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "rows").mkdir()
    for split in ("train", "heldout"):
        rows = "".join(json.dumps(row(number)) + "\n" for number in range(4))
        (tmp_path / "rows" / f"{split}.jsonl").write_text(rows)
    for name, text in (("swe", SWE), ("grade", EVAL)):
        (tmp_path / f"{name}.yaml").write_text(text)
    home, inputs = tmp_path / "home", ("--input", f"prompts={tmp_path / 'rows'}")
    policy = ("--input", f"policy={tmp_path / 'hf'}")
    steps("run", "rl/nemo_rl/swe", "-c", str(tmp_path / "swe.yaml"), *policy, *inputs, home=home)
    assert summaries(home)["rl/nemo_rl/swe"]["steps"] == 2
    model = ("--input", "model=rl/nemo_rl/swe/model:latest")
    steps("run", "eval/model_eval", "-c", str(tmp_path / "grade.yaml"), *model, *inputs, home=home)
    assert summaries(home)["eval/model_eval"]["samples"] == 8
