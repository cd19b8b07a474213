"""Scenarios that every rank of a group runs (gloo, or NCCL where there are GPUs), answered as JSON.

Ranks take seconds to meet and to make their groups, so one group of them runs all scenarios.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3": {
        "data": {},
        "data, distributed optimizer": {"optimizer": {"use_distributed_optimizer": True}},
        "tensor": {"tensor_model_parallel_size": 2},
        "tensor, sequence": {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "activation_checkpointing": True,
        },
        "pipeline": {"pipeline_model_parallel_size": 2},
        "context": {"context_parallel_size": 2},
    },
    "qwen2_tied": {
        "tensor": {"tensor_model_parallel_size": 2},
        "pipeline": {"pipeline_model_parallel_size": 2, "optimizer": {"use_distributed_optimizer": True}},
    },
    "qwen3_moe": {
        "data": {},
        "expert, distributed optimizer": {
            "expert_model_parallel_size": 2,
            "optimizer": {"use_distributed_optimizer": True},
        },
        "expert, tensor, sequence": {
            "expert_model_parallel_size": 2,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
        },
        "pipeline": {"pipeline_model_parallel_size": 2},
        "expert, context": {"expert_model_parallel_size": 2, "context_parallel_size": 2},
    },
}
RESHARDED = [
    ("qwen3", "data, distributed optimizer", "tensor"),
    ("qwen3", "data, distributed optimizer", "pipeline"),
    ("qwen3", "tensor", "data"),
    ("qwen3", "tensor", "context"),
    ("qwen3", "pipeline", "tensor, sequence"),
    ("qwen2_tied", "pipeline", "tensor"),
    ("qwen3_moe", "data", "expert, tensor, sequence"),
    ("qwen3_moe", "expert, distributed optimizer", "pipeline"),
    ("qwen3_moe", "pipeline", "expert, distributed optimizer"),
]
"""(model, layout a checkpoint is saved in, layout it is loaded in)"""
DTENSOR: dict[str, dict[str, Any]] = {
    "dtensor, data": {"enabled": True},
    "dtensor, tensor": {"enabled": True, "tensor_parallel_size": 2},
}
FOUR: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3": {
        "data, distributed optimizer": {"optimizer": {"use_distributed_optimizer": True}},
        "tensor, data": {"tensor_model_parallel_size": 2},
        "tensor, pipeline": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        "context, data": {"context_parallel_size": 2},
        "context, pipeline": {"context_parallel_size": 2, "pipeline_model_parallel_size": 2},
        "pipeline": {"pipeline_model_parallel_size": 4},
        "dtensor, data": {"dtensor_cfg": {"enabled": True}},
        "dtensor, data, tensor": {"dtensor_cfg": {"enabled": True, "tensor_parallel_size": 2}},
    },
    "qwen3_moe": {
        "expert, data": {"expert_model_parallel_size": 2},
        "expert, pipeline": {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        "expert, tensor, sequence, data": {
            "expert_model_parallel_size": 2,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "optimizer": {"use_distributed_optimizer": True},
        },
    },
}
"""Layouts of four ranks."""
BALANCED: dict[str, dict[str, Any]] = {
    "balanced, data": {},
    "balanced, expert": {"expert_model_parallel_size": 2},
    "balanced, expert, tensor, sequence": LAYOUTS["qwen3_moe"]["expert, tensor, sequence"],
    "balanced, expert, context": LAYOUTS["qwen3_moe"]["expert, context"],
}
"""Layouts in which a mixture's loads are counted over ranks."""
TRUNCATED = ("tensor", "context")
"""Layouts of qwen3 that are tried with top_p and top_k as well."""
RATE = {"moe_router_bias_update_rate": 0.01}
IMPORTED = [
    "nemotron_steps.engine.policy.megatron",
    "nemotron_steps.engine.policy.dtensor",
    "torch._dynamo",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.nemotron_h.modeling_nemotron_h",
]
"""What most ranks import, and takes seconds."""


def config_for(megatron: dict[str, Any], **changes: Any):
    from tests.engine.policy.batches import SMOOTH, policy_config

    optimizer = {**SMOOTH, **megatron.get("optimizer", {})}
    return policy_config(megatron_cfg={**megatron, "optimizer": optimizer}, **changes)


def gradients(policy: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole gradients of the last step under Hugging Face names; 0 of what is not trained. Collective."""
    shards, live = policy.shards, policy.shards.local
    flat = {name: view for buffer in policy.buffers for name, view in buffer.unflatten(buffer.grads).items()}
    shards.local = {name: flat.get(name, torch.zeros_like(tensor)) for name, tensor in live.items()}
    try:
        yield from shards.hf_tensors()
    finally:
        shards.local = live


def two_steps(
    folder: Path, megatron: dict[str, Any], batches: Sequence[Any] = (), *, truncated: bool = False, **changes: Any
):
    """Metrics of two optimizer steps, logprobs before and after, and the weights."""
    from nemotron_steps.engine.setup.policy_backends import build_policy
    from tests.engine.policy.batches import ALL_TOKENS, SOME_TOKENS, grouped_batch, rl_loss

    loss = rl_loss(SOME_TOKENS if truncated else ALL_TOKENS)
    policy: Any = build_policy(config_for(megatron, **changes), folder, loss, reference=True, total_steps=10)
    batches = batches or [grouped_batch(seed) for seed in (0, 1)]
    before = policy.logprobs(batches[0])
    metrics = [policy.train_step(batch) for batch in batches]
    assert torch.equal(policy.reference_logprobs(batches[0]), before)
    return {
        "metrics": metrics,
        "before": before.tolist(),
        "after": policy.logprobs(batches[0]).tolist(),
        "weights": {name: tensor.double().sum().item() for name, tensor in policy.weights()},
    }, policy


def scenarios(ranks: int, folders: dict[str, Path], out: Path) -> dict[str, Any]:
    from nemotron_steps.engine.policy.megatron import MegatronPolicy
    from nemotron_steps.engine.setup.policy_backends import build_policy
    from nemotron_steps.errors import NonFiniteLossError
    from tests.engine.policy.batches import grouped_batch, rl_loss

    results: dict[str, Any] = {}
    saved = {(model, layout) for model, layout, _ in RESHARDED}
    for model, layouts in LAYOUTS.items():
        for name, megatron in layouts.items():
            # Several micro-batches a rank, so that schedules have something to schedule.
            results[f"{model}: {name}"], policy = two_steps(folders[model], megatron, train_micro_batch_size=3)
            if (model, name) in saved:
                policy.save_checkpoint(str(out / f"{model} {name}"))
    for name in TRUNCATED:
        results[f"qwen3: {name}, truncated"], _ = two_steps(folders["qwen3"], LAYOUTS["qwen3"][name], truncated=True)
    for model, before, after in RESHARDED:
        policy = MegatronPolicy(config_for(LAYOUTS[model][after]), folders[model], rl_loss())
        policy.load_checkpoint(str(out / f"{model} {before}"))
        results[f"{model}: {before} → {after}"] = policy.train_step(grouped_batch(2))
    for model in ("qwen3", "qwen2_tied"):
        for name, dtensor in DTENSOR.items():
            results[f"{model}: {name}"], policy = two_steps(folders[model], {}, dtensor_cfg=dtensor)
            policy.save_checkpoint(str(out / f"{model} {name}"))
            policy.save_model(out / f"{model} {name} as megatron")
        for before, after in (tuple(DTENSOR), tuple(DTENSOR)[::-1]):
            policy = build_policy(
                config_for({}, dtensor_cfg=DTENSOR[after]), folders[model], rl_loss(), reference=False, total_steps=10
            )
            policy.load_checkpoint(str(out / f"{model} {before}"))
            results[f"{model}: {before} → {after}"] = policy.train_step(grouped_batch(2))
        opened = MegatronPolicy(
            config_for({"tensor_model_parallel_size": 2}), out / f"{model} dtensor, tensor as megatron", rl_loss()
        )
        results[f"{model}: dtensor as megatron"] = opened.logprobs(grouped_batch(0)).tolist()
    written_behind(folders["qwen3"], out)
    results["groups"] = [groups_of(tensor) for tensor in (1, 2, 1, 2)]
    nan = grouped_batch(0)
    nan.advantages = nan.advantages.clone()
    nan.advantages[-1, 12] = float("nan")  # only the last data-parallel rank sees it
    policy = MegatronPolicy(config_for({}), folders["qwen3"], rl_loss())
    try:
        policy.train_step(nan)
    except NonFiniteLossError:
        results["nan refused"] = policy.optimizer.steps == 0
    for name, megatron in BALANCED.items():  # fives leave one expert-parallel rank idle at the end
        results[f"qwen3_moe: {name}"], _ = two_steps(
            folders["qwen3_moe"], {**megatron, **RATE}, train_micro_batch_size=5
        )
    bins = {"sequence_packing": {"enabled": True, "train_mb_tokens": 150, "sequence_length_round": 1}}
    results["qwen3_moe: expert, packed"], _ = two_steps(
        folders["qwen3_moe"], LAYOUTS["qwen3_moe"]["expert, distributed optimizer"], **bins
    )
    return results


def groups_of(tensor: int) -> int:
    """How many process groups there are once those of a layout are made."""
    from nemotron_steps.engine.policy.distributed.parallel_dims import ParallelDims, initialize

    initialize(ParallelDims(tensor=tensor))
    return len(dist.distributed_c10d._world.pg_map)


def scenarios_of_four(ranks: int, folders: dict[str, Path], out: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for model, layouts in FOUR.items():
        for name, layout in layouts.items():
            changes = {key: value for key, value in layout.items() if key == "dtensor_cfg"}
            megatron = {key: value for key, value in layout.items() if key != "dtensor_cfg"}
            results[f"{model}: {name}"], _ = two_steps(folders[model], megatron, train_micro_batch_size=3, **changes)
    return results


def written_behind(folder: Path, out: Path) -> None:
    """Checkpoints of one step: saved, and written by a thread from a snapshot while all ranks train on."""
    from threading import Thread

    from nemotron_steps.engine.setup.policy_backends import build_policy
    from nemotron_steps.errors import StorageError
    from tests.engine.policy.batches import grouped_batch, rl_loss

    narrow = {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16"}
    for name, megatron, changes in (
        ("tensor", LAYOUTS["qwen3"]["tensor"], {}),
        ("narrow", {"optimizer": narrow}, {"precision": "bfloat16"}),
        ("dtensor", {}, {"dtensor_cfg": DTENSOR["dtensor, data"]}),
    ):
        config = config_for(megatron, **changes)
        first, second = (build_policy(config, folder, rl_loss(), reference=False, total_steps=10) for _ in range(2))
        first.train_step(grouped_batch(0))
        first.save_checkpoint(str(out / f"{name} saved"))
        writer = Thread(target=first.snapshot().write, args=[str(out / f"{name} behind")])
        writer.start()
        expected = [first.train_step(grouped_batch(seed)) for seed in range(1, 4)]
        writer.join()
        second.load_checkpoint(str(out / f"{name} behind"))
        assert [second.train_step(grouped_batch(seed)) for seed in range(1, 4)] == expected
        try:  # rank 0 alone meets a file where it wants a folder
            (out / f"{name} refused").mkdir(exist_ok=True)
            (out / f"{name} refused" / "hf").touch()
            first.snapshot().write(str(out / f"{name} refused"))
            raise AssertionError("written over a file")
        except StorageError:
            first.train_step(grouped_batch(4))  # no rank hangs, and all go on


def run_ranks(
    ranks: int, out: Path, folders: dict[str, Path], run: Callable[[int, dict[str, Path], Path], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Start the ranks, which call `run(ranks, folders, out)`, wait, and read what each found.

    They are forked from a process that has imported torch and megatron-core, which takes seconds, and has done nothing
    else; what uses CUDA cannot be forked from safely.
    """
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    if not torch.cuda.is_available():
        context.set_forkserver_preload(IMPORTED)
    processes = [
        context.Process(target=_rank, args=(run, rank, ranks, out, folders, dict(os.environ)), daemon=True)
        for rank in range(ranks)
    ]
    end = time.monotonic() + 280
    for process in processes:
        process.start()
    try:
        while any(process.exitcode is None for process in processes):
            running = [process.sentinel for process in processes if process.exitcode is None]
            if not wait(running, end - time.monotonic()) or any(process.exitcode for process in processes):
                break  # the others would wait for one that failed
        failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
        assert not failed, "".join(f"rank {rank}: {(out / f'rank{rank}.log').read_text()[-3000:]}" for rank in failed)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def _rank(
    run: Callable[[int, dict[str, Path], Path], dict[str, Any]],
    rank: int,
    ranks: int,
    out: Path,
    folders: dict[str, Path],
    environment: dict[str, str],
) -> None:
    """What a process does: its answer and what it prints go to files."""
    log = os.open(out / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()  # what is imported is no garbage: a collection takes tenths of a second to find that out
    torch.set_num_threads(1)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    store = dist.FileStore(str(out / "store"), ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    Path(out, f"rank{rank}.json").write_text(json.dumps(run(ranks, folders, out)))
    dist.barrier()
    dist.destroy_process_group()
