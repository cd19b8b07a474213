"""`steps plan` shows what memory a GPU needs and how the batch is cut, in text, in JSON and on narrow terminals."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pytest

from nemotron_steps.cli.plans import _show_memory, _show_step_memory
from nemotron_steps.cli.terminal import Terminal
from nemotron_steps.config.layout.memory.devices import StepMemory
from nemotron_steps.config.layout.memory.settings import BatchArithmetic
from nemotron_steps.session.run_request import RunRequest
from nemotron_steps.session.session import Session
from tests.config.layout.memory.shapes import QWEN3_8B
from tests.models.checkpoints import write_tokenizer

ROW = {"responses_create_params": {"input": "A or B?"}, "agent_ref": {"name": "mcqa_simple_agent"}}


@pytest.fixture
def inputs(workplace):
    """A Megatron checkpoint of Qwen3-8B without its weights, and prompts."""
    hf = workplace / "policy" / "hf"
    hf.mkdir(parents=True)
    (hf / "config.json").write_text(json.dumps({**QWEN3_8B, "max_position_embeddings": 40960}))
    write_tokenizer(hf)
    (workplace / "policy" / "weights").mkdir()
    (workplace / "policy" / "weights" / "common.json").write_text("{}")
    (workplace / "prompts").mkdir()
    (workplace / "prompts" / "train.jsonl").write_text(json.dumps(ROW) + "\n")
    return ("--input", f"policy={workplace / 'policy'}", "--input", f"prompts={workplace / 'prompts'}")


def test_a_plan_shows_memory_by_role_and_phase_and_the_batch(cli, inputs):
    out = cli("plan", "rl/nemo_rl/rlvr", "-c", "one_node", *inputs).out
    text = " ".join(out.split())
    assert "64 prompts × 8 = 512 rollouts → global batch 512 × 1 update → 4 data-parallel ranks × 128" in text
    assert "at most 36 micro-batches of 16,384 tokens" in text
    rows = [line.split() for line in out[out.index("one GPU of 80 GiB that trains and generates") :].splitlines()]
    assert rows[1] == ["GiB", "generate", "train"]
    assert rows[2][:3] == ["policy", "weights", "7.6"]
    lines = {row[-3] for row in rows[2:] if len(row) > 2}
    assert lines >= {"weights", "optimizer", "gradients", "activations", "logprobs", "cache", "context"}
    total = next(row for row in rows if row and row[0] == "total")
    rows = rows[: rows.index(total)]
    assert "cache of one generator of vLLM's: room for about" in text
    parts = [float(row[-1]) for row in rows[2:] if row[-1] != "-"]
    assert float(total[-1]) == pytest.approx(sum(parts), abs=0.6)


def test_json_has_the_same_in_bytes(cli, inputs):
    step = cli("plan", "rl/nemo_rl/rlvr", "-c", "one_node", *inputs, "--json").json["steps"][-1]
    memory = step["memory"]
    assert 100_000 < memory["cache_tokens"]["generator"] < 130_000
    assert memory["batch"]["rollouts"] == 512 and memory["batch"]["tokens"] == 16_384
    (device,) = memory["devices"]
    assert device["capacity"] == 80 * 2**30
    for phase in ("generate", "train"):
        assert device["phases"][phase]["total"] == sum(device["phases"][phase]["lines"].values())
    assert device["peak"] == max(phase["total"] for phase in device["phases"].values())


def test_a_refusal_has_a_code_and_what_would_fit(cli, inputs):
    refused = cli("plan", "rl/nemo_rl/rlvr", "-c", "one_gpu", *inputs)
    assert refused.code == 2
    assert "E313" in refused.err and "optimizer_cpu_offload=true" in refused.err


def test_a_run_on_cpu_shows_the_batch_alone(cli, workplace):
    out = cli("plan", "rl/nemo_rl/rlvr", "-c", "tiny").out
    assert "16 prompts × 8 = 128 rollouts" in out
    assert "GPU" not in out and "not predicted" not in out


@pytest.mark.parametrize("width", [50, 80])
def test_a_narrow_terminal_cuts_no_number(width, inputs):
    values = dict(text.partition("=")[::2] for text in inputs[1::2])
    plan = Session(home="home").plan(RunRequest(targets=("rl/nemo_rl/rlvr",), config="one_node", inputs=values))
    stream = io.StringIO()
    _show_memory(plan, Terminal(stream, color=False, width=width))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in stream.getvalue()


def shown(batch=None, devices=(), host=None, unknown=(), on_gpu=True):
    stream = io.StringIO()
    memory = StepMemory(batch, tuple(devices), host or {}, tuple(unknown), {}, on_gpu)
    _show_step_memory(memory, Terminal(stream, color=False, width=None))
    return [" ".join(line.split()) for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize("cached", [None, {"model": "model:v1"}])
def test_the_ends_of_a_models_turns_are_shown_of_a_step_that_is_to_run(cached):
    stream = io.StringIO()
    ends = {"policy": ("<|im_end|>", "<|endoftext|>")}
    step = SimpleNamespace(key="rlvr", memory=None, cached=cached, turn_ends=ends)
    _show_memory(SimpleNamespace(steps=[step]), Terminal(stream, color=False, width=None))
    said = [] if cached else ["", "rlvr", "a turn of policy ends with <|im_end|> or <|endoftext|>"]
    assert [line.strip() for line in stream.getvalue().splitlines()] == said


@pytest.mark.parametrize(
    ("budget", "updates", "said"),
    [
        (True, 2, "global batch 8 × 2 updates → 1 data-parallel rank × 8 → at most 1 micro-batch of 1,024 tokens"),
        (False, None, "global batch 8 → 1 data-parallel rank × 8 → at most 1 micro-batch of 1,024 tokens in 8 rows"),
    ],
)
def test_a_batch_is_cut_as_said(budget, updates, said):
    assert shown(BatchArithmetic(None, None, None, 8, updates, 1, 8, 1, 8, 1024, 512, budget)) == [said]
