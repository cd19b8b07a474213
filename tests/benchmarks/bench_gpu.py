"""GRPO on one GPU: where each millisecond of a step goes, against the arithmetic floor, vLLM alone, and TRL.

    python3 -m tests.benchmarks.bench_gpu [--parts embedded vllm vllm-alone embedded-alone trl]      last line JSON

0.47 B Qwen3 shape, random bfloat16 weights, 64 prompts x 8 answers x 256 tokens. Every part is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.grpo_task import large_prompts, make_large_checkpoint, write_rows

PROMPTS, MEMBERS, NEW_TOKENS = 64, 8, 256
PARTS = ("embedded", "vllm", "vllm-alone", "embedded-alone", "trl")
H200_FLOPS, H200_BYTES_PER_S = 989e12, 4.8e12
"""Of the data sheet: dense bfloat16, and memory."""


def run_config(folder: Path, steps: int, backend: str, new_tokens: int = NEW_TOKENS, prompts: int = PROMPTS,
               members: int = MEMBERS) -> dict:  # fmt: skip
    """RlConfig of the benchmark."""
    batch = prompts * members
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
            "train_micro_batch_size": max(1, min(48, batch, 12_288 // new_tokens)),
            "logprob_batch_size": max(1, min(48, batch, 12_288 // new_tokens)),
            "logprob_chunk_size": 4096,
            "max_total_sequence_length": new_tokens + 128,
            "megatron_cfg": {"optimizer": {"lr": 1e-5}},
            "generation": {
                "backend": backend,
                "max_new_tokens": new_tokens,
                "max_sequences": batch,
                "vllm_cfg": {"gpu_memory_utilization": 0.25, "max_num_seqs": batch},
            },
        },
        "data": {"train": {"data_path": str(folder / "train.jsonl")}},
        "checkpointing": {"enabled": False},
    }


def generator_alone(folder: Path, backend: str) -> dict:
    """The generator without training: seconds for one step's rollouts, submitted and stepped directly."""
    from nemotron_steps.config.schema.policy import GenerationConfig
    from nemotron_steps.engine.setup import build_generator
    from nemotron_steps.engine.types import GenerationRequest, SamplingParams
    from nemotron_steps.models.chat import ChatFormat

    settings = run_config(folder, 1, backend)["policy"]
    chat = ChatFormat.from_folder(folder)
    generator = build_generator(
        folder,
        GenerationConfig.model_validate(settings["generation"]),
        chat,
        max_total_length=settings["max_total_sequence_length"],
        precision="bfloat16",
    )
    # New prompts each time, as in training: prompts that the prefix cache knows are no work.
    attempts = 4
    texts = large_prompts(folder, attempts * PROMPTS)
    prompts = [chat.render([{"role": "user", "content": text}]) for text in texts]
    seconds = []
    for attempt in range(attempts):
        started = time.perf_counter()
        for number, prompt in enumerate(prompts[attempt * PROMPTS : (attempt + 1) * PROMPTS]):
            params = SamplingParams(max_new_tokens=NEW_TOKENS)
            generator.submit(GenerationRequest(f"{attempt}/{number}", prompt, params, MEMBERS))
        tokens = 0
        while generator.pending():
            tokens += sum(len(c.token_ids) for c in generator.step())
        seconds.append(time.perf_counter() - started)
    generator.close()
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
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--alone", nargs=2, metavar=("FOLDER", "BACKEND"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        print(json.dumps(generator_alone(Path(arguments.alone[0]), arguments.alone[1])))
        return
    results: dict[str, dict] = {"floor": floor()}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_large_checkpoint(folder)
        write_rows(folder / "train.jsonl", large_prompts(folder, 4 * PROMPTS))
        for part in arguments.parts:
            started = time.perf_counter()
            if part == "trl":
                results[part] = child("tests.benchmarks.grpo_trl", str(folder), "5", "--gpu")
            elif part.endswith("-alone"):
                results[part] = child("tests.benchmarks.bench_gpu", "--alone", str(folder), part.partition("-")[0])
            else:
                (folder / "run.json").write_text(json.dumps(run_config(folder, arguments.steps, part)))
                results[part] = child("tests.benchmarks.grpo_ours", str(folder))
                results[part].pop("rewards", None)
                phases = results[part].get("phases_s", {})
                if phases.get("train"):
                    results[part]["train_mfu"] = results["floor"]["train_s"] / phases["train"]
            results[part]["part_s"] = time.perf_counter() - started
            print(json.dumps({part: results[part]}), flush=True)
    if "trl" in results and "embedded" in results and "step_s" in results["trl"]:
        results["ratio"] = {"to_trl": results["trl"]["step_s"] / results["embedded"]["step_s"]}
    print(json.dumps(results))


def child(module: str, *arguments: str) -> dict:
    """The JSON object that a module run as a program prints last, or what it said when it failed."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.stderr[-1500:]}
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
