"""Every environment of the RLVR blends in one run, by the names of agents that blends have, and each is reported."""

import json

import pytest

from nemotron_steps.engine.grpo.loop import train
from nemotron_steps.environments.code.math_formal_lean import MathFormalLean
from nemotron_steps.environments.code.swerl_gen import SwerlGen
from tests.engine.grpo.grpo_runs import config_of, metrics_of, start
from tests.environments.cases import CASES
from tests.environments.test_agents import PUBLIC_AGENTS

JUDGES = ("genrm_model", "judge_model", "safety_model")
ASKS = ("equivalence_llm_judge", "inverse_if", "jailbreak_detection", "multichallenge", "over_refusal_detection")


def agent_of(environment: str) -> str:
    """The first agent of the blends for an environment."""
    special = {"terminus_judge": "terminal_pivot_simple_agent", "swe_pivot": "swe_pivot"}
    return special.get(environment) or next(
        (agent for agent, found in PUBLIC_AGENTS.items() if found == environment), f"{environment}_simple_agent"
    )


def blend() -> list[dict]:
    """A row for each environment."""
    by_environment = {case.environment: case.row for case in reversed(CASES)}
    sent = {"recipient": "ann@example.com", "subject": "Hello", "body": "See you."}
    call = {"name": "email_send_email", "arguments": json.dumps(sent)}
    by_environment["workplace_assistant"] = {
        "responses_create_params": {"input": "Write to Ann."},
        "ground_truth": [call],
    }
    return [{**row, "agent_ref": {"name": agent_of(name)}} for name, row in sorted(by_environment.items())]


@pytest.mark.sandbox
@pytest.mark.timeout(400)
def test_all_environments_of_a_blend_train_together_and_each_is_reported(task, tmp_path, monkeypatch):
    async def ready(self) -> None:
        """Neither Lean nor images of repositories are here; no answer of the tiny policy gets as far."""

    async def refused(self, row, proof) -> tuple[bool, str]:
        return False, "error"

    monkeypatch.setattr(MathFormalLean, "start", ready)
    monkeypatch.setattr(MathFormalLean, "_compile", refused)
    monkeypatch.setattr(SwerlGen, "start", ready)
    rows = blend()
    file = tmp_path / "blend.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    judge = {"model": str(task), "max_total_sequence_length": 8192}
    short = {"judge_responses_create_params": {"max_output_tokens": 4}, "judge_parse_retries": 0}
    config = config_of(
        task,
        1,
        grpo__num_prompts_per_step=len(rows),
        grpo__num_generations_per_prompt=2,
        policy__train_micro_batch_size=len(rows) * 2,
        policy__generation__max_new_tokens=8,
        data__train__data_path=str(file),
        env__nemo_gym={
            **{role: {"responses_api_models": {"vllm_model": judge}} for role in JUDGES},
            "environments": {
                **dict.fromkeys(ASKS, short),
                "genrm_compare": {"genrm_responses_create_params": {"max_output_tokens": 4}, "genrm_parse_retries": 0},
                "math_with_judge": {"should_use_judge": False},
                "ns_tools": {"should_use_judge": False},
            },
        },
    )
    records: list[dict] = []
    run = start(config, tmp_path / "work", records)
    try:
        train(run)
    finally:
        run.close()
    (metrics,) = metrics_of(records)
    names = {case.environment for case in CASES} | {"workplace_assistant"}
    assert len(names) >= 21
    assert {name for name in names if f"response_length/{name}/mean" not in metrics} == set()
    judged = {name for name in names if f"reward/{name}/mean" in metrics}
    assert {name for name in names if metrics[f"failure_rate/{name}"] < 1} == judged
    assert names - judged <= set(ASKS), (
        "only a judge that says nothing readable leaves an environment without a verdict"
    )
