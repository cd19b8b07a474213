"""Every config named one_gpu, run for a few steps on a GPU, each on what the ones before it made.

    python3 -m benchmarks.one_gpu_configs [--home FOLDER] [--cpu [--vllm]] [NAME ...]

Prints a line a config: exit code, seconds, last metrics. The data are those of the tiny configs, the models random: a
Qwen3 of 0.44 B parameters as policy and as judge, and a small Nemotron-H with experts, trained from nothing with its
block of multi-token prediction. --home keeps data and results, and goes on from them. --cpu: small models and the
embedded generator, to see whether the commands are right; --vllm: with vLLM all the same (for CPU, which has no
mixtures: not `hybrid`).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DATA = {
    "chats": ("data_prep/sft_prep", "tiny"),
    "comparisons": ("data_prep/sft_prep", "tiny_judge"),
    "preferences": ("data_prep/tool_preference_prep", "tiny"),
    "instructions": ("data_prep/rl_prep", "tiny_rlvr2"),
    "compared": ("data_prep/rl_prep", "tiny_rlhf"),
    "trajectories": ("data_prep/swe_tasks", "tiny_steps"),
}
SFT = ["sft.max_num_steps=40", "policy.megatron_cfg.optimizer.lr=3e-4"]
GRPO = ["grpo.max_num_steps=3", "heldout.max_prompts=64", "policy.generation.max_new_tokens=192"]
EAGER = ["policy.generation.vllm_cfg.enforce_eager=true"]
JUDGE = "env.nemo_gym.genrm_model.responses_api_models.vllm_model"
POLICY = {"policy": "megatron_bridge"}
HYBRID = {
    "architecture": "nemotron_h",
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32_768,
    "hybrid.pattern": "MEME*ME",
    "hybrid.mamba_num_heads": 16,
    "hybrid.mamba_head_dim": 64,
    "hybrid.ssm_state_size": 128,
    "hybrid.n_groups": 4,
    "hybrid.n_routed_experts": 16,
    "hybrid.num_experts_per_tok": 4,
    "hybrid.moe_intermediate_size": 256,
    "hybrid.moe_shared_expert_intermediate_size": 512,
    "hybrid.routed_scaling_factor": 2.5,
    "hybrid.num_nextn_predict_layers": 1,
}
"""Keys of from_scratch: a small Nemotron-H with experts and a block of multi-token prediction."""
MTP = ["policy.megatron_cfg.mtp_num_layers=1"]
RUNS: dict[str, tuple[str, dict[str, str], list[str]]] = {
    "megatron_bridge": ("sft/megatron_bridge", {"model": "qwen", "chats": "chats"}, SFT),
    "rlvr": ("rl/nemo_rl/rlvr", {**POLICY, "prompts": "instructions"}, GRPO),
    "genrm": ("reward_model/genrm", {"model": "judge", "comparisons": "comparisons"}, [*SFT, "agreement.max_pairs=16"]),
    "rlhf": ("rl/nemo_rl/rlhf", {**POLICY, "prompts": "compared", "reward_model": "genrm"}, GRPO),
    "mtp": (
        "sft/megatron_bridge",
        {"chats": "chats"},
        [*SFT, *MTP, *(f"from_scratch.{key}={value}" for key, value in HYBRID.items())],
    ),
    "hybrid": (
        "rl/nemo_rl/rlvr",
        {"policy": "mtp", "prompts": "instructions"},
        [*GRPO, *EAGER, *MTP, "policy.router_replay.enabled=true"],
    ),
    "lora": (
        "rl/nemo_rl/rlvr",
        {**POLICY, "prompts": "instructions"},
        [*GRPO, *EAGER, "policy.megatron_cfg.peft.enabled=true"],
    ),
    "automodel": (
        "sft/automodel",
        {"model": "qwen", "chats": "chats"},
        ["sft.max_num_steps=40", "policy.optimizer.kwargs.lr=3e-4"],
    ),
    "opd": (
        "rl/nemo_rl/opd",
        {**POLICY, "prompts": "instructions", "teachers.one": "rlvr", "teachers.other": "automodel"},
        [*GRPO, "on_policy_distillation.default_teacher_alias=other"],
    ),
    "swe": ("rl/nemo_rl/swe", {**POLICY, "prompts": "trajectories"}, GRPO),
    "dpo": ("rl/nemo_rl/dpo", {**POLICY, "preferences": "preferences"}, ["dpo.max_num_steps=3"]),
}
"""Name → step, its inputs (names of DATA, of models, of runs before it), overrides."""
QWEN = {"head_dim": 128, "num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072}
SMALL_QWEN = {"head_dim": 32, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
SMALL = ["grpo.num_prompts_per_step=2", "heldout.max_prompts=8", "policy.generation.max_new_tokens=16"]
EMBEDDED = {"rl": ["policy.generation.backend=embedded"]}
EMBEDDED["rl/nemo_rl/rlhf"] = [*EMBEDDED["rl"], f"{JUDGE}.backend=embedded", f"{JUDGE}.max_sequences=16"]
CPU = {name: ["sft.max_num_steps=2"] for name in ("sft", "reward_model")} | {"rl/nemo_rl/dpo": ["dpo.max_num_steps=1"]}


def write_qwen(folder: Path, tokenizer: Path, sizes: dict) -> None:
    """A Hugging Face folder of a Qwen3 with random bfloat16 weights and a tokenizer that the data were made for."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(tokenizer)
    config = AutoConfig.for_model(
        "qwen3",
        **sizes,
        tie_word_embeddings=True,
        vocab_size=len(tokens),
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=32_768,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)  # as it is: saved anew it would be another tokenizer


def steps(*words: str) -> tuple[int, str, dict]:
    """Exit code, what stderr said and of a failure stdout too, and what `--json` says of the run."""
    program = "import sys; from nemotron_steps.cli.main import steps; sys.exit(steps(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", program, *words, "--json"], capture_output=True, text=True)
    if done.returncode:
        return done.returncode, done.stderr + done.stdout, {}
    return 0, done.stderr, json.loads(done.stdout)


def only_output(said: dict) -> dict[str, str]:
    """What the last step of a run made: its name in the home as `ref`, its folder as `path`."""
    (output,) = said["steps"][-1]["outputs"].values()
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RUNS)}; all by default")
    parser.add_argument("--home", type=Path)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--vllm", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        home = asked.home or Path(scratch)
        home.mkdir(parents=True, exist_ok=True)
        os.chdir(home)
        os.environ.pop("STEPS_HOME", None)
        run_all(asked.names or list(RUNS), asked.cpu, asked.vllm)


def run_all(names: list[str], cpu: bool, vllm: bool) -> None:
    done = Path("done.json")  # what exists, under the names above
    have: dict[str, dict[str, str]] = json.loads(done.read_text()) if done.exists() else {}
    for name, (step, config) in DATA.items():
        if name not in have:
            code, error, said = steps("run", step, "-c", config)
            if code:
                raise SystemExit(error)
            have[name] = only_output(said)
    sizes = SMALL_QWEN if cpu else QWEN
    for name, data in (("qwen", "chats"), ("judge", "comparisons")):
        if name not in have:
            write_qwen(Path(name), Path(have[data]["path"], "tokenizer"), sizes)
            have[name] = {"ref": name}
    done.write_text(json.dumps(have))
    for name in names:
        step, inputs, overrides = RUNS[name]
        if missing := [of for of in inputs.values() if of not in have]:
            print(f"{name}: waits for {', '.join(missing)}", flush=True)
            continue
        words = [word for port, of in inputs.items() for word in ("--input", f"{port}={have[of]['ref']}")]
        if cpu:
            overrides = [*overrides, "cluster.gpus_per_node=0", *CPU.get(step.split("/")[0], CPU.get(step, []))]
            if step.startswith("rl/") and not step.endswith("dpo"):
                overrides = [*overrides, *SMALL, *([] if vllm else EMBEDDED.get(step, EMBEDDED["rl"]))]
        started = time.perf_counter()
        code, error, said = steps("run", step, "-c", "one_gpu", *words, *overrides)
        print(f"{name}: exit code {code}, {time.perf_counter() - started:.0f} s", flush=True)
        if code:
            print(error[-3000:], flush=True)
            continue
        have[name] = only_output(said)
        done.write_text(json.dumps(have))
        metrics = Path(".steps/runs", said["run"], "metrics.jsonl")
        records = [record["values"] for record in map(json.loads, metrics.open()) if record["kind"] == "metrics"]
        records = [values for values in records if "loss" in values]  # of training steps
        last = records[-1] if records else {}  # none where what was left of a run that was cut off trained no more
        shown = ("loss", "grad_norm", "reward/mean", "token_mult_prob_error", "router_replay", "mtp_", "timing/")
        print(json.dumps({key: value for key, value in last.items() if key.startswith(shown)}), flush=True)


if __name__ == "__main__":
    main()
