"""Plans whose vLLM could not start: refused with the step's own keys, which mend them when pasted."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.cli.test_hybrid_plans import hub_folder

TENSOR = "generation.vllm_cfg.tensor_parallel_size"
JUDGE = "env.nemo_gym.genrm_model.responses_api_models.vllm_model"


@pytest.mark.parametrize(
    ("step", "port"),
    [("eval/model_eval", "model"), ("eval/stages", "models.one"), ("data_prep/difficulty", "model")],
)
@pytest.mark.parametrize(
    ("changes", "override", "hint"),
    [
        ({}, f"{TENSOR}=16", f"{TENSOR}=8"),
        ({"time_step_limit": [0.001, 0.1]}, f"{TENSOR}=1", "generation.backend=embedded"),
        (
            {"max_position_embeddings": 1024},
            "{section}.max_total_sequence_length=2048",
            "{section}.max_total_sequence_length=1024",
        ),
        (
            {},
            "+generation.vllm_kwargs.max_model_len=2048",
            "~generation.vllm_kwargs.max_model_len {section}.max_total_sequence_length=2048",
        ),
        (
            {},
            "+generation.vllm_kwargs.dtype=bfloat16",
            "~generation.vllm_kwargs.dtype {section}.precision=bfloat16",
        ),
    ],
)
def test_what_vllm_would_refuse_is_refused_when_planned_with_a_hint_that_mends_it(
    cli: Cli, workplace: Path, step: str, port: str, changes: dict[str, Any], override: str, hint: str
) -> None:
    model = hub_folder(workplace / "hub", **changes)
    (workplace / "rows.jsonl").write_text('{"prompt": "1 + 1", "agent_ref": {"name": "mcqa"}}\n')
    section = "difficulty" if "difficulty" in step else "evaluation"
    prompts = "prompts.one" if port == "models.one" else "prompts"
    command = ["plan", step, "--input", f"{port}={model}", "--input", f"{prompts}=rows.jsonl"]
    command += ["generation.backend=vllm", "generation.max_new_tokens=512", override.format(section=section)]
    hint = hint.format(section=section)
    refused = cli(*command)
    assert refused.code == 2 and f"hint: {hint}" in refused.err, refused.err
    mended = cli(*command, *shlex.split(hint))
    assert mended.code == 0, mended.err


def test_a_judge_that_vllm_cannot_cut_is_refused_when_planned(cli: Cli, workplace: Path) -> None:
    judge = hub_folder(workplace / "judge")
    command = ["plan", "rl/nemo_rl/rlhf", "-c", "tiny", "--input", f"reward_model={judge}", f"{JUDGE}.backend=vllm"]
    refused = cli(*command, f"{JUDGE}.tensor_parallel_size=16")
    assert refused.code == 2 and f"hint: {JUDGE}.tensor_parallel_size=8" in refused.err, refused.err
    assert "vLLM cannot generate from 'reward_model'" in refused.err
