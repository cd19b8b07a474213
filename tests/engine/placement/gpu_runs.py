"""Small runs on the GPUs of this machine, each in a process of its own since the other tests' Ray has no GPUs.

python3 -m tests.engine.placement.gpu_runs CASE [CASE ...]      a JSON object a case
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.bench_gpu import run_config
from benchmarks.grpo_task import large_prompts, make_large_checkpoint, write_rows
from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.config.schema.sft import SftConfig
from nemotron_steps.engine.grpo.async_loop import train_async
from nemotron_steps.engine.grpo.loop import train
from nemotron_steps.engine.placement.run import build_run
from nemotron_steps.engine.rollouts.data import read_rows
from nemotron_steps.engine.setup.rows import RunRows
from nemotron_steps.environments import registry
from nemotron_steps.runs.context import Tracker
from nemotron_steps.steps.supervised import sft_megatron_bridge
from tests.models.hybrid_twins import hybrid_model

STEPS = 3
TIS = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": "tis",
    "truncated_importance_sampling_ratio": 2.0,
}


def make_experts(folder: Path) -> None:
    """The checkpoint of `make_large_checkpoint` with a mixture of 8 experts in each of 2 layers."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    make_large_checkpoint(folder, layers=2, hidden=256)
    shape = json.loads((folder / "config.json").read_text())
    kept = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **{name: shape[name] for name in (*kept, "eos_token_id", "pad_token_id")},
        moe_intermediate_size=256,
        intermediate_size=256,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def make_dense(folder: Path) -> None:
    make_large_checkpoint(folder, layers=2, hidden=256)


def make_hybrid(folder: Path) -> None:
    """A Nemotron-H mixture of sizes that vLLM's CUDA kernels take, with the tokenizer of `make_large_checkpoint`."""
    make_large_checkpoint(folder, layers=1, hidden=256)
    model = hybrid_model(
        "mixture",
        hidden_size=256,
        head_dim=64,
        mamba_num_heads=16,
        mamba_head_dim=64,
        ssm_state_size=128,
        chunk_size=128,
        moe_intermediate_size=128,
        moe_shared_expert_intermediate_size=128,
        max_position_embeddings=4096,
        initializer_range=0.05,
        vocab_size=json.loads((folder / "config.json").read_text())["vocab_size"],
    )
    model.to(torch.bfloat16).save_pretrained(folder)


def generators(
    folder: Path,
    *,
    gpus: int = 2,
    make: Callable[[Path], None] = make_dense,
    asynchronous: bool = False,
    router_replay: bool = False,
    megatron_cfg: dict | None = None,
    **generation,
) -> dict:
    """GRPO with vLLM, on Ray where it takes several GPUs: how the weights travelled, and whether they arrived."""
    make(folder)
    write_rows(folder / "train.jsonl", large_prompts(folder, 32, words=8))
    config: dict[str, Any] = run_config(folder, STEPS, "vllm", new_tokens=32, prompts=4, members=4)
    if gpus > 1:
        config["cluster"] = {"backend": "ray", "gpus_per_node": gpus}
    config["policy"]["router_replay"] = {"enabled": router_replay}
    config["policy"]["megatron_cfg"].update(megatron_cfg or {})
    config["policy"]["generation"].update(generation)
    config["policy"]["generation"]["vllm_cfg"].update(enforce_eager=True, max_num_seqs=32, gpu_memory_utilization=0.3)
    config["policy"]["megatron_cfg"]["optimizer"]["lr"] = 1e-3  # so that old weights would show
    if asynchronous:
        config["grpo"]["async_grpo"] = {"enabled": True, "max_trajectory_age_steps": 1}
        config["loss_fn"].update(TIS)
    registry.BUILT_IN["vowels"] = "benchmarks.grpo_ours:Vowels"
    records: list[dict] = []
    run, _ = build_run(
        RlConfig.model_validate(config),
        RunRows(read_rows(folder / "train.jsonl")),
        work=folder / "work",
        started=time.monotonic(),
        reporter=Tracker("test", None, records.append),
    )
    try:
        transports = getattr(run.generator, "transports", None)  # of workers on Ray
        (train_async if asynchronous else train)(run)
    finally:
        run.close()
    metrics = [record["values"] for record in records if record["kind"] == "metrics"]
    return {
        "transports": transports,
        "token_mult_prob_error": [m["token_mult_prob_error"] for m in metrics],
        "refit_s": [m["weight_sync/seconds"] for m in metrics],
        "policy_lag": max(m.get("policy_lag/max", 0.0) for m in metrics),
        "router_replay_share": [m.get("router_replay_share") for m in metrics],
        "router_replay_mismatch": [m.get("router_replay_mismatch") for m in metrics],
    }


def supervised(folder: Path) -> dict:
    """SFT on two Ray ranks, data- and tensor-parallel, and in this process: the losses of each."""
    make_large_checkpoint(folder, layers=2, hidden=256)
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text[: 7 * (i % 5 + 1)]}]}
        for i, text in enumerate(large_prompts(folder, 24, words=12))
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    losses = {}
    ray = {"backend": "ray", "gpus_per_node": 2}
    here = {"backend": "process", "gpus_per_node": 1}
    tensor = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    for name, cluster, layout in (("process", here, {}), ("data", ray, {}), ("tensor", ray, tensor)):
        records: list[dict] = []
        file = {"data_path": str(folder / "chats.jsonl")}
        config = SftConfig.model_validate(
            {
                "sft": {"max_num_steps": STEPS, "max_num_epochs": 5},
                "data": {"train": file},
                "checkpointing": {"save_period": 2},
                "cluster": cluster,
                "policy": {
                    "checkpoint": str(folder),
                    "precision": "float32",
                    "train_global_batch_size": 6,
                    "train_micro_batch_size": 2,
                    "max_total_sequence_length": 96,
                    "megatron_cfg": {"optimizer": {"lr": 2e-3}, **layout},
                },
            }
        )
        slot = SimpleNamespace(path=folder / name, attributes={})
        context = SimpleNamespace(
            config=config,
            work=folder / f"{name}-work",
            started=time.monotonic(),
            tracker=Tracker("test", None, records.append),
        )
        context.outputs = {"model": slot}
        sft_megatron_bridge(context)
        losses[name] = [record["values"]["loss"] for record in records if record["kind"] == "metrics"]
    return losses


APART = {"colocated": {"enabled": False, "generation_devices": 1}}
CASES = {
    "tensor parallel": lambda folder: generators(folder, vllm_cfg={"tensor_parallel_size": 2}),
    "tensor parallel, apart": lambda folder: generators(
        folder,
        gpus=3,
        vllm_cfg={"tensor_parallel_size": 2},
        colocated={"enabled": False, "generation_devices": 2},
    ),
    "experts": lambda folder: generators(
        folder,
        make=make_experts,
        megatron_cfg={"expert_model_parallel_size": 2},
        vllm_cfg={"tensor_parallel_size": 2, "expert_parallel_size": 2},
    ),
    "adapters": lambda folder: generators(folder, gpus=1, megatron_cfg={"peft": {"enabled": True}}),
    "hybrid": lambda folder: generators(folder, gpus=1, make=make_hybrid),
    "replayed experts": lambda folder: generators(folder, gpus=1, make=make_hybrid, router_replay=True),
    "asynchronous": lambda folder: generators(folder, asynchronous=True, **APART),
    "supervised": supervised,
}
NEEDED_GPUS = {"tensor parallel, apart": 3, "adapters": 1, "hybrid": 1, "replayed experts": 1}
"""Two where nothing is said."""


def main() -> None:
    """Every case named."""
    for case in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps({case: CASES[case](Path(folder))}), flush=True)


if __name__ == "__main__":
    main()
