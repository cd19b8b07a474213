"""GRPO of Nemotron 3 Nano at its real sizes, random bfloat16 weights, vLLM generating: where each second goes.

    python3 -m benchmarks.bench_nano [--model "4 B"] [--steps 8] [--trl]         one GPU
    python3 -m benchmarks.bench_nano --model "30 B" --layers 26 --gpus 2 --utilization 0.28    half of its layers

The last line is JSON. 64 prompts x 8 answers of 256 tokens. Nano 4B is dense: one process trains, beside a vLLM that
sleeps. Nano 30B has 128 experts: the policy's ranks share them (EP) and cut the rest (TP), and each GPU has a vLLM of
its own. Tokens a second are of one GPU. MFU counts 6 operations a trained token and parameter that it meets.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.bench_gpu import H200_FLOPS, MEMBERS, NEW_TOKENS, PROMPTS, child, run_config
from benchmarks.grpo_task import large_prompts, word_tokenizer, write_rows
from nemotron_steps.config.families import NAMES
from tests.config.layout.memory.shapes import NANO_4B, NANO_30B

VOCABULARY = NANO_30B["vocab_size"]
SHAPES = {"4 B": NANO_4B, "30 B": NANO_30B}
SETTINGS: dict[str, dict[str, Any]] = {
    "4 B": {"micro_batch": 32, "lean": True, "utilization": 0.35},
    "30 B": {"micro_batch": 16, "lean": True, "utilization": 0.36},
}
"""What fits an H200: see bench_gpu.run_config."""


def write_checkpoint(folder: Path, model: str, layers: int) -> None:
    """A Nemotron-H folder of the first `layers` of a model's pattern, drawn on the GPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = word_tokenizer(VOCABULARY)
    tokenizer.save_pretrained(folder)
    pattern = SHAPES[model]["hybrid_override_pattern"][:layers]
    sizes = {
        name: size for name, size in SHAPES[model].items() if name not in ("model_type", "hybrid_override_pattern")
    }
    config = AutoConfig.for_model(
        "nemotron_h",
        **sizes,
        layers_block_type=[NAMES[letter][0] for letter in pattern],
        max_position_embeddings=8192,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def met_parameters(model: str, layers: int) -> int:
    """Parameters of the matrices that one token is multiplied with, the output layer's among them."""
    shape = SHAPES[model]
    hidden, inner = shape["hidden_size"], shape["mamba_num_heads"] * shape["mamba_head_dim"]
    states = 2 * shape["n_groups"] * shape["ssm_state_size"]
    queries, keys = (shape[name] * shape["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    each = {
        "M": hidden * (2 * inner + states + shape["mamba_num_heads"]) + inner * hidden,
        "*": hidden * (queries + 2 * keys) + queries * hidden,
        "-": 2 * hidden * shape["intermediate_size"],
    }
    if "n_routed_experts" in shape:
        widths = (
            shape["num_experts_per_tok"] * shape["moe_intermediate_size"] + shape["moe_shared_expert_intermediate_size"]
        )
        each["E"] = hidden * (shape["n_routed_experts"] + 2 * widths)
    return sum(each[letter] for letter in shape["hybrid_override_pattern"][:layers]) + hidden * VOCABULARY


def nano_config(folder: Path, model: str, steps: int, gpus: int, utilization: float | None = None) -> dict:
    """RlConfig of the benchmark: bench_gpu's, and a layout over several GPUs."""
    share = {"utilization": utilization} if utilization else {}
    config = run_config(folder, steps, "vllm", **{**SETTINGS[model], **share})
    config["policy"]["generation"]["vllm_cfg"]["max_num_seqs"] = PROMPTS * MEMBERS // gpus
    if gpus > 1:
        config["cluster"] = {"backend": "ray", "gpus_per_node": gpus}
        config["policy"]["megatron_cfg"].update(
            tensor_model_parallel_size=gpus, sequence_parallel=True, expert_model_parallel_size=gpus
        )
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="4 B", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="the first ones of the pattern; all by default")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--utilization", type=float, help="vLLM's share of a GPU; what fits an H200 by default")
    parser.add_argument("--trl", action="store_true", help="TRL on the same checkpoint, before it")
    parser.add_argument("--scratch", type=Path, help="where the checkpoint is written for the time of the run")
    asked = parser.parse_args()
    layers = asked.layers or len(SHAPES[asked.model]["hybrid_override_pattern"])
    with tempfile.TemporaryDirectory(dir=asked.scratch) as scratch:
        folder, started = Path(scratch), time.perf_counter()
        # In a process of its own, which gives its GPU memory back.
        maker = multiprocessing.get_context("spawn").Process(
            target=write_checkpoint, args=(folder, asked.model, layers)
        )
        maker.start()
        maker.join()
        if maker.exitcode:
            raise SystemExit("the checkpoint could not be made")
        write_rows(folder / "train.jsonl", large_prompts(folder, 4 * PROMPTS))
        results: dict[str, Any] = {
            "model": asked.model,
            "layers": layers,
            "checkpoint_s": time.perf_counter() - started,
        }
        if asked.trl:
            results["trl"] = child("benchmarks.grpo_trl", str(folder), "4", "--gpu", "4 B")
            print(json.dumps(results), flush=True)
        (folder / "run.json").write_text(
            json.dumps(nano_config(folder, asked.model, asked.steps, asked.gpus, asked.utilization))
        )
        ours = child("benchmarks.grpo_ours", str(folder))
        ours.pop("rewards", None)
        met = met_parameters(asked.model, layers)
        if ours.get("phases_s", {}).get("train"):
            tokens = PROMPTS * MEMBERS * NEW_TOKENS + PROMPTS * 68
            seconds = ours["phases_s"]["train"] * asked.gpus
            ours["train_mfu"] = 6 * met * tokens / H200_FLOPS / seconds
            ours["trained_tokens_per_s_gpu"] = tokens / seconds
            ours["generated_tokens_per_s_gpu"] = ours["generated_tokens_per_s"] / asked.gpus
        results.update(met_parameters=met, nemotron_steps=ours)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
