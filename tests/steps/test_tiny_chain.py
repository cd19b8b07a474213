"""The main job, for real, as a user runs it: plan, train, improve, cache, convert."""

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.chain, pytest.mark.slow, pytest.mark.timeout(900)]


def steps(*arguments, home, code=0):
    environment = {**os.environ, "STEPS_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-m", "nemotron_steps.cli.main", *arguments], capture_output=True, text=True, env=environment
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("chain")


def summaries(home):
    run = max((home / "runs").iterdir(), key=lambda folder: folder.name)
    records = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return {record["step"]: record["values"] for record in records if record["kind"] == "summary"}


def test_the_main_job_plans_trains_and_improves_on_held_out_prompts_by_rule(home):
    steps("run", "rl/nemo_rl/rlhf", "-c", "tiny", home=home)
    found = summaries(home)
    assert found["reward_model/genrm"]["heldout_agreement"] >= 0.9
    reward = found["rl/nemo_rl/rlhf"]["heldout_reward"]
    assert reward["after"] > reward["before"] + 0.1
    run = max((home / "runs").iterdir(), key=lambda folder: folder.name)
    assert (run / "report.html").stat().st_size > 10_000


def test_a_second_run_finds_everything_cached_and_says_so(home):
    started = time.monotonic()
    output = steps("run", "rl/nemo_rl/rlhf", "-c", "tiny", home=home)
    assert time.monotonic() - started < 20  # 5 s on an idle machine; see docs/benchmarks.md
    assert "cached" in output
    assert summaries(home) == {} or "rl/nemo_rl/rlhf" not in summaries(home)


def test_the_aligned_policy_loads_with_plain_transformers_and_says_the_same(home):
    steps("run", "convert/megatron_to_hf", "--input", "checkpoint_megatron=rl/nemo_rl/rlhf/model:latest", home=home)
    listing = json.loads(steps("artifacts", "list", "--json", home=home))
    names = [row["name"] for row in listing if row["name"].startswith("convert/megatron_to_hf")]
    shown = json.loads(steps("artifacts", "show", names[0], "--json", home=home))
    folder = Path(shown["path"])

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from nemotron_steps.config.schema.policy import GenerationConfig
    from nemotron_steps.engine.setup.backends import build_generator
    from nemotron_steps.engine.types import GenerationRequest, SamplingParams
    from nemotron_steps.models.chat import ChatFormat

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    question = [{"role": "user", "content": "Spell this word backward (example: sun -> nus): melon"}]
    encoded = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        expected = model.generate(**encoded, max_new_tokens=16, do_sample=False)[0, encoded["input_ids"].shape[1] :]
    chat = ChatFormat.from_folder(folder)
    generator = build_generator(folder, GenerationConfig(), chat, max_total_length=128, precision="float32")
    params = SamplingParams(max_new_tokens=16, temperature=0.0, stop_token_ids=(chat.tokenizer.eos_token_id,))
    generator.submit(GenerationRequest("q", chat.render(question), params))
    done = []
    while generator.pending():
        done += generator.step()
    assert done[0].token_ids == expected.tolist()


def test_a_tiny_hybrid_improves_by_rule_and_keeps_its_gain_under_the_judge(home, tmp_path):
    steps("run", "nano3_rl", "-c", "tiny", "--until", "rlvr_genrm", home=home)  # its judge is that of RLHF, cached
    found = summaries(home)
    verified, judged = (found[stage]["heldout_reward"] for stage in ("rlvr", "rlvr_genrm"))
    assert verified["after"] > verified["before"] + 0.2
    assert judged["after"] > verified["before"] + 0.2

    from nemotron_steps.models.huggingface import load_hf_weights
    from nemotron_steps.models.megatron_checkpoint import convert_megatron_to_hf

    weights = {}
    for model in ("sft/megatron_bridge/model:latest", "rl/nemo_rl/rlvr/model:v1", "rl/nemo_rl/rlvr/model:v2"):
        shown = json.loads(steps("artifacts", "show", model, "--json", home=home))
        convert_megatron_to_hf(Path(shown["path"]), tmp_path / model)
        weights[model] = load_hf_weights(tmp_path / model)
    models = list(weights.values())
    for before, after in itertools.pairwise(models):
        same = {name for name, tensor in before.items() if tensor.equal(after[name])}
        frozen = {name for name in before if name.endswith("gate.weight") or name.startswith("mtp.")}
        assert same == frozen  # all else has moved, the routers' correction biases too


def test_a_distilled_policy_keeps_what_each_of_its_teachers_has_learnt(tmp_path):
    steps("run", "opd", "-c", "tiny", home=tmp_path)
    reward = summaries(tmp_path)["eval"]["heldout_reward"]
    own = {"reasoning", "instructions"}
    for skill in own:
        (other,) = own - {skill}
        assert reward[skill][skill] > reward["sft"][skill] + 0.3  # the teachers have something to teach
        assert reward["opd"][skill] > reward[skill][skill] - 0.06
        assert reward["opd"][skill] > reward[other][skill] + 0.1
    plan = json.loads(steps("plan", "rl/nemo_rl/opd", "-c", "tiny", "--json", home=tmp_path))
    assert all(step["cached"] for step in plan["steps"])  # the step by itself plans the same teachers
