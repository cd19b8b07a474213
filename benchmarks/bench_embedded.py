"""Tokens per second of the embedded generator beside transformers' `generate` and vLLM, on one tiny Qwen3.

    python -m benchmarks.bench_embedded [--repeats N] [--threads N] [--vllm]

Two loads: `rollouts`, 8 prompts of about 40 tokens with 8 samples of 32 tokens each; and `judge`, 64 different prompts
of about 200 tokens that begin alike, with answers of 40 tokens. Engines are interleaved, so that a busy moment of the
machine hits all of them alike; the best of the repeats counts. Processor time is what a run costs on a quiet machine.
The last line is JSON.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.grpo_task import make_checkpoint, prompts

VOCAB = 259
LOADS = {"rollouts": (8, 32), "judge": (1, 40)}  # samples a prompt, new tokens


def rollout_prompts(folder: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [f"<|im_start|>user\n{text}<|im_end|><|im_start|>assistant\n" for text in prompts(8)]
    return [tokenizer.encode(chat) for chat in chats]


def judge_prompts() -> list[list[int]]:
    """Instructions, a question that 8 prompts share, two answers each: the layout of pairwise comparison."""
    rng = random.Random(0)

    def text(length: int) -> list[int]:
        return [rng.randrange(3, VOCAB) for _ in range(length)]

    instructions, out = text(110), []
    for _ in range(8):
        question, answers = text(30), [text(rng.randint(20, 32)) for _ in range(8)]
        out += [instructions + question + answers[i] + text(4) + answers[(i + 1) % 8] + text(6) for i in range(8)]
    return out


def embedded(folder: Path) -> Callable[[str, list[list[int]]], int]:
    from nemotron_steps.engine.generation.embedded.generator import EmbeddedGenerator
    from nemotron_steps.engine.types import GenerationRequest, SamplingParams
    from nemotron_steps.models.architecture import Architecture

    weights = list(_weights(folder))
    generator = EmbeddedGenerator(
        Architecture.from_folder(folder), weights, max_sequences=64, max_total_length=256, eos_token_ids=[]
    )

    def run(load: str, batch: list[list[int]]) -> int:
        samples, new = LOADS[load]
        generator.update_weights(weights, generator.weight_version + 1)  # as in training: no cache outlives a step
        for i, prompt in enumerate(batch):
            generator.submit(GenerationRequest(str(i), prompt, SamplingParams(new, seed=1), samples))
        tokens = 0
        while generator.pending():
            tokens += sum(len(c.token_ids) for c in generator.step())
        return tokens

    return run


def transformers_generate(folder: Path) -> Callable[[str, list[list[int]]], int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def run(load: str, batch: list[list[int]]) -> int:
        samples, new = LOADS[load]
        rows = [p for p in batch for _ in range(samples)]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in rows])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in rows])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                max_new_tokens=new,
                min_new_tokens=new,
                pad_token_id=0,
            )
        return (out.shape[1] - width) * len(rows)

    return run


def vllm(folder: Path) -> Callable[[str, list[list[int]]], int]:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams

    engine = LLM(str(folder), dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=64)

    def run(load: str, batch: list[list[int]]) -> int:
        samples, new = LOADS[load]
        engine.reset_prefix_cache()
        params = SamplingParams(n=samples, max_tokens=new, ignore_eos=True, logprobs=0)
        out = engine.generate([{"prompt_token_ids": p} for p in batch], params, use_tqdm=False)
        return sum(len(o.token_ids) for request in out for o in request.outputs)

    return run


def _weights(folder: Path) -> list[tuple[str, torch.Tensor]]:
    from safetensors.torch import load_file

    return list(load_file(folder / "model.safetensors").items())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--vllm", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_checkpoint(folder)
        batches = {"rollouts": rollout_prompts(folder), "judge": judge_prompts()}
        engines = {"embedded": embedded(folder), "transformers": transformers_generate(folder)}
        if options.vllm:
            engines["vllm"] = vllm(folder)
        results: dict[str, dict[str, dict[str, float]]] = {}
        for load, batch in batches.items():
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
            tokens: dict[str, int] = {}
            for _ in range(options.repeats):
                for name, run in engines.items():
                    torch.set_num_threads(options.threads)  # each time: vLLM sets its own
                    wall, cpu = time.perf_counter(), time.process_time()
                    tokens[name] = run(load, batch)
                    times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
            results[load] = {
                name: {
                    "wall_ms": min(wall for wall, _ in pairs) * 1e3,
                    "cpu_ms": min(cpu for _, cpu in pairs) * 1e3,
                    "tokens_per_s": tokens[name] / min(wall for wall, _ in pairs),
                }
                for name, pairs in times.items()
            }
    print(f"{options.threads} threads, load average {os.getloadavg()[0]:.1f}")
    print(f"{'load':10} {'engine':14} {'wall':>10} {'processor':>11} {'tokens/s':>10}")
    for load, engines_of_load in results.items():
        for name, r in engines_of_load.items():
            print(f"{load:10} {name:14} {r['wall_ms']:8.1f}ms {r['cpu_ms']:9.1f}ms {r['tokens_per_s']:10.0f}")
    ratio = results["rollouts"]["transformers"]["wall_ms"] / results["rollouts"]["embedded"]["wall_ms"]
    print(json.dumps({"threads": options.threads, "loads": results, "ratio_to_transformers": ratio}))


if __name__ == "__main__":
    main()
