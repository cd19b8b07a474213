"""GRPO on one GPU: where each millisecond of a step goes, against the arithmetic floor, vLLM alone, and TRL.

    python3 -m benchmarks.bench_gpu [--model "4 B"] [--parts embedded vllm vllm-alone trl]      last line JSON

Qwen3 shape of 0.5 or 4 B, random bfloat16 weights, 64 prompts x 8 answers x 256 tokens. Every part is a process of its
own. Peak memory is that of the whole GPU, whichever processes have it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.grpo_task import large_prompts, make_large_checkpoint, write_rows

PROMPTS, MEMBERS, NEW_TOKENS = 64, 8, 256
PARTS = ("embedded", "vllm", "vllm-alone", "trl")
MODELS = {"0.5 B": (28, 1024), "4 B": (36, 2560)}
"""Layers and hidden size."""
SETTINGS: dict[tuple[str, str], dict] = {
    ("4 B", "embedded"): {"micro_batch": 32, "lean": True},
    ("4 B", "vllm"): {"micro_batch": 32, "lean": True, "utilization": 0.41},
}
"""What 4 B parameters need to fit: smaller micro-batches, an optimizer of 8 bytes a parameter instead of 12."""
H200_FLOPS, H200_BYTES_PER_S = 989e12, 4.8e12
"""Of the data sheet: dense bfloat16, and memory."""


def run_config(folder: Path, steps: int, backend: str, new_tokens: int = NEW_TOKENS, prompts: int = PROMPTS,
               members: int = MEMBERS, micro_batch: int = 48, lean: bool = False,
               utilization: float = 0.15, vllm_kwargs: dict | None = None) -> dict:  # fmt: skip
    """RlConfig of the benchmark.

    Args:
        micro_batch: sequences of 256 new tokens that are trained on at once; fewer of longer ones.
        lean: masters as 16-bit remainders, and a first moment in bfloat16.
        utilization: vLLM's share of the GPU.
        vllm_kwargs: other options of its engine.
    """
    batch = prompts * members
    micro_batch = max(1, min(micro_batch, batch, micro_batch * NEW_TOKENS // new_tokens))
    return {
        "grpo": {
            "num_prompts_per_step": prompts,
            "num_generations_per_prompt": members,
            "max_num_steps": steps,
            "max_num_epochs": 1000,
        },
        "loss_fn": {"force_on_policy_ratio": True},
        "policy": {
            "checkpoint": str(folder),
            "precision": "bfloat16",
            "train_global_batch_size": batch,
            "train_micro_batch_size": micro_batch,
            "logprob_batch_size": micro_batch,
            "logprob_chunk_size": 4096,
            "max_total_sequence_length": new_tokens + 128,
            "megatron_cfg": {
                "optimizer": {
                    "lr": 1e-5,
                    "use_precision_aware_optimizer": lean,
                    "exp_avg_dtype": "bfloat16" if lean else "float32",
                }
            },
            "generation": {
                "backend": backend,
                "max_new_tokens": new_tokens,
                "max_sequences": batch,
                "vllm_cfg": {"gpu_memory_utilization": utilization, "max_num_seqs": batch},
                "vllm_kwargs": vllm_kwargs or {},
            },
        },
        "data": {"train": {"data_path": str(folder / "train.jsonl")}},
        "checkpointing": {"enabled": False},
    }


def vllm_alone(folder: Path, model: str, options: dict) -> dict:
    """vLLM by its own front door, in its own processes: seconds for the rollouts of one step, the least of four.

    Half of the attempts ask for 8 samples of a prompt, half for one sample of each of 8 copies.
    """
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    from nemotron_steps.models.chat import ChatFormat

    policy = run_config(folder, 1, "vllm", **SETTINGS.get((model, "vllm"), {}))["policy"]
    engine = policy["generation"]["vllm_cfg"]
    engine |= options
    llm = LLM(model=str(folder), dtype="bfloat16", max_model_len=policy["max_total_sequence_length"], **engine)
    # What a policy gradient needs of a sample: its tokens and their logprobs.
    settings = {"max_tokens": NEW_TOKENS, "temperature": 1.0, "logprobs": 0, "detokenize": False}
    ways = [(SamplingParams(n=MEMBERS, **settings), 1), (SamplingParams(**settings), MEMBERS)]
    chat = ChatFormat.from_folder(folder)
    # New prompts each time, as in training: prompts that the prefix cache knows are no work.
    attempts = 4
    texts = large_prompts(folder, attempts * PROMPTS)
    prompts = [TokensPrompt(prompt_token_ids=chat.render([{"role": "user", "content": text}])) for text in texts]
    seconds = []
    for attempt in range(attempts):
        params, copies = ways[attempt % 2]
        asked = [prompt for prompt in prompts[attempt * PROMPTS : (attempt + 1) * PROMPTS] for _ in range(copies)]
        started = time.perf_counter()
        outputs = llm.generate(asked, params, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
    tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    return {"seconds": min(seconds), "tokens_per_s": tokens / min(seconds), "tokens": tokens, "all_s": seconds}


def floor(layers: int = 28, hidden: int = 1024, vocabulary: int = 32_000, prompt: int = 68) -> dict:
    """Seconds that the data sheet's numbers alone would need, with each prompt fed once."""
    matrices = layers * (hidden * hidden * (2 + 1 + 1 + 2) + 3 * 3 * hidden * hidden)  # heads of 128: Q and O are wide
    parameters = matrices + hidden * vocabulary
    samples = PROMPTS * MEMBERS
    decoded = samples * NEW_TOKENS
    kv_token = layers * 2 * (hidden // 128) * 128 * 2
    kv_bytes = samples * NEW_TOKENS * (prompt + NEW_TOKENS / 2) * kv_token
    weights_bytes = NEW_TOKENS * parameters * 2
    decode_s = max(2 * parameters * decoded / H200_FLOPS, (kv_bytes + weights_bytes) / H200_BYTES_PER_S)
    trained = decoded + PROMPTS * prompt
    return {
        "parameters": parameters,
        "generation_s": decode_s,
        "train_s": 6 * parameters * trained / H200_FLOPS,
        "trained_tokens": trained,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--model", default="0.5 B", choices=MODELS)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--vllm-kwargs", type=json.loads, default={}, metavar="JSON", help="options of vLLM's engine")
    parser.add_argument("--alone", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        print(json.dumps(vllm_alone(arguments.alone, arguments.model, arguments.vllm_kwargs)))
        return
    layers, hidden = MODELS[arguments.model]
    results: dict[str, dict] = {"floor": floor(layers, hidden)}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_large_checkpoint(folder, layers, hidden)
        write_rows(folder / "train.jsonl", large_prompts(folder, 4 * PROMPTS))
        for part in arguments.parts:
            started = time.perf_counter()
            if part == "trl":
                results[part] = child("benchmarks.grpo_trl", str(folder), "5", "--gpu", arguments.model)
            elif part == "vllm-alone":
                same = ("--model", arguments.model, "--vllm-kwargs", json.dumps(arguments.vllm_kwargs))
                results[part] = child("benchmarks.bench_gpu", "--alone", str(folder), *same)
            else:
                settings = SETTINGS.get((arguments.model, part), {}) | {"vllm_kwargs": arguments.vllm_kwargs}
                (folder / "run.json").write_text(json.dumps(run_config(folder, arguments.steps, part, **settings)))
                results[part] = child("benchmarks.grpo_ours", str(folder))
                results[part].pop("rewards", None)
                phases = results[part].get("phases_s", {})
                if phases.get("train"):
                    results[part]["train_mfu"] = results["floor"]["train_s"] / phases["train"]
            results[part]["part_s"] = time.perf_counter() - started
            print(json.dumps({part: results[part]}), flush=True)
    if "trl" in results and "embedded" in results and "step_s" in results["trl"]:
        results["ratio"] = {"to_trl": results["trl"]["step_s"] / results["embedded"]["step_s"]}
    if "seconds" in results.get("vllm-alone", {}) and "phases_s" in results.get("vllm", {}):
        share = results["vllm-alone"]["seconds"] / results["vllm"]["phases_s"]["generation"]
        results.setdefault("ratio", {})["rollouts_to_vllm_alone"] = share
    print(json.dumps(results))


def child(module: str, *arguments: str) -> dict:
    """The JSON object that a module run as a program prints last; its progress and errors go where ours do."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return {"failed": f"exit code {done.returncode}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
