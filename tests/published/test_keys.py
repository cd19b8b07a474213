"""Every key of the published configs is taken and means the same, or is refused with the reason."""

import os
from functools import partial
from pathlib import Path

import pytest

from nemotron_steps.config.published import find, translate
from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.config.validation import has_key
from nemotron_steps.errors import ConfigError
from nemotron_steps.session.session import Session
from tests.published.page import page, status
from tests.published.tables import TABLES, nested, published

PAGE = Path(__file__).parents[2] / "docs" / "published_keys.md"
KEYS = sorted({key for table in TABLES for key in published(table)})


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Session(home=str(tmp_path / "home"))


def composed(bench, tmp_path, text, *overrides):
    file = tmp_path / "theirs.yaml"
    file.write_text(text)
    return bench.compose("rl/nemo_rl/rlvr", str(file), overrides).flat


def test_the_page_lists_every_key():
    if os.environ.get("UPDATE_PAGE"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page(), "UPDATE_PAGE=1 writes it anew"


@pytest.mark.parametrize("key", [key for key in KEYS if status(key)[0] == "refused" and key != "defaults"])
def test_a_refused_key_is_refused_with_its_reason(key):
    value = next(published(table)[key] for table in TABLES if key in published(table))
    left, (problem,) = translate(
        nested({key: value}), partial(has_key, RlConfig), {tuple(key.split(".")): "theirs.yaml:1"}
    )
    assert left == {} and key in problem.what and find(key)[0].why in problem.what
    assert problem.where == "theirs.yaml:1"


def test_a_file_with_published_names_is_taken_as_it_is(bench, tmp_path):
    flat = composed(
        bench,
        tmp_path,
        """
defaults: [one_node]
policy:
  model_name: /models/ours
  tokenizer: {name: "${policy.model_name}"}
  megatron_cfg: {moe_router_dtype: fp32, optimizer: {optimizer: adam, clip_grad: 0.5}}
  generation:
    vllm_cfg:
      precision: ${policy.precision}
      http_server_serving_chat_kwargs: {tool_parser: qwen3_coder, chat_template_kwargs: {enable_thinking: true}}
    colocated: {enabled: false, resources: {num_nodes: 1, gpus_per_node: 4}}
env:
  nemo_gym:
    nl2bash_judge_model: {responses_api_models: {vllm_model: {model: judge, spinup_server: true}}}
    code_gen: {resources_servers: {code_gen: {unit_test_timeout_secs: 7}}}
effort_levels: {low_string: "{reasoning effort: low}", low_weight: 0.3}
""",
    )
    judge = "env.nemo_gym.judge_model.responses_api_models.vllm_model"
    expected = {
        "policy.checkpoint": "/models/ours",
        "policy.max_grad_norm": 0.5,
        "policy.generation.tool_parser": "qwen3_coder",
        "policy.tokenizer.chat_template_kwargs": {"enable_thinking": True},
        "policy.generation.colocated.generation_devices": 4,
        f"{judge}.model": "judge",
        f"{judge}.backend": "vllm",
        "env.nemo_gym.environments": {"code_gen": {"unit_test_timeout_secs": 7}},
        "grpo.low_effort.string": "{reasoning effort: low}",
        "grpo.low_effort.weight": 0.3,
    }
    assert {key: flat[key] for key in expected} == expected
    assert "effort_levels" not in flat and "policy.model_name" not in flat


def test_what_is_always_so_can_be_said_and_nothing_else(bench, tmp_path):
    with pytest.raises(ConfigError) as caught:
        composed(
            bench,
            tmp_path,
            "defaults: [one_node]\npolicy:\n  precision: float32\n  megatron_cfg: {pipeline_dtype: bfloat16}\n",
            "policy.megatron_cfg.fp8_cfg.enabled=true",
        )
    found = {problem.what.split("'")[1]: problem for problem in caught.value.problems}
    pipeline = found["policy.megatron_cfg.pipeline_dtype"]
    assert (pipeline.expected, pipeline.found) == ("float32", "bfloat16") and "theirs.yaml:4" in pipeline.where
    fp8 = found["policy.megatron_cfg.fp8_cfg.enabled"]
    assert fp8.where == "override 'policy.megatron_cfg.fp8_cfg.enabled=true'" and fp8.expected == "False"
