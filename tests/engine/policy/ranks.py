"""What ranks (gloo, or NCCL where there are GPUs) find: each subject in each layout, answered as JSON and safetensors.

Ranks take seconds to meet and to make their groups, so one group of them runs all cases.
"""

import gc
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
CONTEXT, EXPERT = "context_parallel_size", "expert_model_parallel_size"
SEQUENCE, AGAIN = {"sequence_parallel": True}, {"activation_checkpointing": True}
SHARDED = {"optimizer": {"use_distributed_optimizer": True}}
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 150, "sequence_length_round": 1}}
ALL_TO_ALL = {EXPERT: 2, TENSOR: 2, **SEQUENCE}
RATE = {"moe_router_bias_update_rate": 1e-3}
TWO_DEPTHS = {**RATE, "mtp_num_layers": 2, "mtp_use_repeated_layer": True}
ADAPTERS = {"peft": {"enabled": True, "dim": 4, "alpha": 8}}


@dataclass(frozen=True)
class Subject:
    """What is trained: a shape of tests/models/checkpoints.py or hybrid_twins.py with changes, and how.

    Of those that clip, gradients are not compared: the distributed optimizer clips its own shard of them alone.
    """

    shape: str
    model: dict[str, Any] = field(default_factory=dict)
    megatron: dict[str, Any] = field(default_factory=dict)
    loss: str = "rl"
    dtensor: bool = False
    clips: bool = False


SUBJECTS = {
    "qwen3": Subject("qwen3"),
    "truncated": Subject("qwen3", loss="truncated", clips=True),
    "tied": Subject("qwen2_tied", clips=True),
    "mixture": Subject("qwen3_moe", megatron=RATE, clips=True),
    "one head": Subject("qwen3", {"num_key_value_heads": 1}),
    "two heads": Subject("llama", {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}),
    "three heads": Subject("qwen3", {"num_attention_heads": 3, "num_key_value_heads": 3}),
    "six heads": Subject("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 2}),
    "biases": Subject("qwen2_tied", {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}),
    "mixture, one head": Subject("qwen3_moe", {"num_key_value_heads": 1}),
    # Five layers, so that stages are unequal. Of latent's stages, ME* and -M, only the first has experts.
    "dense": Subject("dense", {"pattern": "M-M*-"}),
    "latent": Subject("latent", {"pattern": "ME*-M"}, RATE),
    "two mixtures": Subject("mixture", {"pattern": "ME*-E"}, RATE),
    "latent, one head": Subject("latent", {"num_attention_heads": 2, "num_key_value_heads": 1, "n_groups": 2}, RATE),
    "ahead": Subject("mtp", {"pattern": "ME*-M"}, TWO_DEPTHS),
    "ahead, detached": Subject("mtp", {"pattern": "ME*-M"}, {**TWO_DEPTHS, "mtp_detach_heads": True}, clips=True),
    "ahead, preferences": Subject("mtp", {"pattern": "ME*-M"}, TWO_DEPTHS, loss="preferences"),
    "adapters": Subject("qwen3", megatron=ADAPTERS),
    "adapters, dense": Subject("dense", {"pattern": "M-M*-"}, ADAPTERS),
    "dtensor": Subject("qwen3", dtensor=True),
    "dtensor, tied": Subject("qwen2_tied", dtensor=True, clips=True),
    "dtensor, dense": Subject("dense", {"pattern": "M-M*-"}, dtensor=True),
    "dtensor, latent": Subject("latent", {"pattern": "ME*-M"}, dtensor=True),
}
CASES: dict[int, dict[str, dict[str, dict[str, Any]]]] = {
    2: {
        "qwen3": {
            "data": {},
            "data, distributed optimizer": SHARDED,
            "tensor": {TENSOR: 2},
            "tensor, sequence": {TENSOR: 2, **SEQUENCE, **AGAIN},
            "pipeline": {PIPELINE: 2},
            "context": {CONTEXT: 2},
        },
        "truncated": {"tensor": {TENSOR: 2}, "context": {CONTEXT: 2}},
        "tied": {"tensor": {TENSOR: 2}, "pipeline": {PIPELINE: 2, **SHARDED}},
        "mixture": {
            "data": {},
            "expert, distributed optimizer": {EXPERT: 2, **SHARDED},
            "expert, packed": {EXPERT: 2, **PACKED},
            "expert, tensor, sequence": ALL_TO_ALL,
            "pipeline": {PIPELINE: 2},
            "expert, context": {EXPERT: 2, CONTEXT: 2},
        },
        "one head": {"tensor": {TENSOR: 2}, "tensor, sequence": {TENSOR: 2, **SEQUENCE}, "context": {CONTEXT: 2}},
        "three heads": {"context": {CONTEXT: 2}, "context, packed": {CONTEXT: 2, **PACKED}},
        "dense": {
            "data, distributed optimizer": SHARDED,
            "tensor": {TENSOR: 2, **AGAIN},
            "pipeline": {PIPELINE: 2},
            "context": {CONTEXT: 2},
        },
        "latent": {
            "data": {},
            "expert, distributed optimizer": {EXPERT: 2, **SHARDED},
            "expert, tensor, sequence": ALL_TO_ALL,
            "pipeline": {PIPELINE: 2, **SHARDED},
            "expert, context": {EXPERT: 2, CONTEXT: 2},
        },
        "two mixtures": {"pipeline": {PIPELINE: 2}},
        "ahead": {
            "data, distributed optimizer": SHARDED,
            "expert, tensor, sequence": {**ALL_TO_ALL, **AGAIN},
            "pipeline": {PIPELINE: 2, **SHARDED},
            "expert, context": {EXPERT: 2, CONTEXT: 2},
        },
        "ahead, detached": {"pipeline": {PIPELINE: 2, **SHARDED}, "expert, tensor, sequence": ALL_TO_ALL},
        "ahead, preferences": {"pipeline": {PIPELINE: 2}, "expert, context": {EXPERT: 2, CONTEXT: 2}},
        "dtensor": {"data": {}, "tensor": {"tensor_parallel_size": 2}},
        "dtensor, tied": {"data": {}, "tensor": {"tensor_parallel_size": 2}},
        "dtensor, dense": {"data": {}},
        "dtensor, latent": {"data": {}},
    },
    4: {
        "qwen3": {
            "data, distributed optimizer": SHARDED,
            "tensor, data": {TENSOR: 2},
            "tensor, pipeline": {TENSOR: 2, PIPELINE: 2},
            "context, pipeline": {CONTEXT: 2, PIPELINE: 2},
            "pipeline": {PIPELINE: 4},
        },
        "mixture": {
            "expert, pipeline": {EXPERT: 2, PIPELINE: 2},
            "expert, tensor, sequence, data": {**ALL_TO_ALL, **SHARDED},
        },
        "one head": {
            "tensor": {TENSOR: 4},
            "tensor, data": {TENSOR: 2, **SHARDED},
            "tensor, context": {TENSOR: 2, CONTEXT: 2, **SEQUENCE},
            "context, packed": {CONTEXT: 4, **PACKED},
        },
        "two heads": {
            "tensor, sequence": {TENSOR: 4, **SEQUENCE},
            "tensor, packed": {TENSOR: 4, **AGAIN, **PACKED},
            "tensor, context": {TENSOR: 2, CONTEXT: 2},
        },
        "three heads": {"context, packed": {CONTEXT: 4, **PACKED}},
        "six heads": {
            "context": {CONTEXT: 4, **SHARDED},
            "context, packed": {CONTEXT: 4, **AGAIN, **PACKED},
            "tensor, context": {TENSOR: 2, CONTEXT: 2, **SEQUENCE},
        },
        "biases": {"tensor": {TENSOR: 4}, "tensor, context, packed": {TENSOR: 2, CONTEXT: 2, **PACKED}},
        "mixture, one head": {
            "tensor, expert": {TENSOR: 4, EXPERT: 2, **SEQUENCE},
            "context, expert": {CONTEXT: 4, EXPERT: 2},
        },
        "dense": {"tensor, pipeline": {TENSOR: 2, PIPELINE: 2}, "pipeline": {PIPELINE: 4}, "tensor": {TENSOR: 4}},
        "latent": {
            "expert, tensor, sequence, pipeline": {**ALL_TO_ALL, PIPELINE: 2},
            "expert of four, distributed optimizer": {EXPERT: 4, **SHARDED},
            "tensor, sequence, context": {TENSOR: 2, **SEQUENCE, CONTEXT: 2},
        },
        "latent, one head": {
            "context, packed": {CONTEXT: 4, EXPERT: 2, **PACKED},
            "tensor, context": {TENSOR: 2, CONTEXT: 2, EXPERT: 2, **SEQUENCE},
        },
        "ahead": {"expert, tensor, sequence, pipeline": {**ALL_TO_ALL, PIPELINE: 2}},
        "adapters": {
            "data, distributed optimizer": SHARDED,
            "tensor": {TENSOR: 2},
            "tensor, sequence": {TENSOR: 2, **SEQUENCE, **AGAIN},
            "pipeline": {PIPELINE: 2},
            "context": {CONTEXT: 2},
        },
        "adapters, dense": {"tensor, sequence": {TENSOR: 2, **SEQUENCE}, "context": {CONTEXT: 2}},
        "dtensor": {"data": {}, "data, tensor": {"tensor_parallel_size": 2}},
    },
}
"""Ranks → subject → layouts."""
RESHARDED = [
    (2, "qwen3", "data, distributed optimizer", "tensor"),
    (2, "qwen3", "data, distributed optimizer", "pipeline"),
    (2, "qwen3", "tensor", "data"),
    (2, "qwen3", "tensor", "context"),
    (2, "qwen3", "pipeline", "tensor, sequence"),
    (2, "tied", "pipeline", "tensor"),
    (2, "mixture", "data", "expert, tensor, sequence"),
    (2, "mixture", "expert, distributed optimizer", "pipeline"),
    (2, "mixture", "pipeline", "expert, distributed optimizer"),
    (2, "one head", "tensor", "context"),
    (2, "dense", "tensor", "pipeline"),
    (2, "latent", "expert, tensor, sequence", "pipeline"),
    (2, "latent", "pipeline", "expert, distributed optimizer"),
    (2, "ahead", "pipeline", "expert, tensor, sequence"),
    (2, "dtensor", "data", "tensor"),
    (2, "dtensor", "tensor", "data"),
    (2, "dtensor, latent", "data", "data"),
    (4, "six heads", "context", "tensor, context"),
    (4, "adapters", "tensor", "pipeline"),
]
"""(ranks, subject, layout a checkpoint is saved in, layout it is loaded in)"""
IMPORTED = [
    "nemotron_steps.engine.policy.megatron",
    "nemotron_steps.engine.policy.dtensor",
    "torch._dynamo",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.nemotron_h.modeling_nemotron_h",
]
"""What most ranks import, and takes seconds."""


def write_subject(name: str, folder: Path) -> None:
    """Its checkpoint: four or five layers for the stages, and an odd vocabulary for the padding."""
    from tests.models.checkpoints import write_checkpoint
    from tests.models.hybrid_twins import TWINS, write_hybrid

    subject = SUBJECTS[name]
    alike = {"initializer_range": 0.1, "vocab_size": 201, **subject.model}
    if subject.shape in TWINS:
        write_hybrid(subject.shape, folder, **alike)
    else:
        write_checkpoint(subject.shape, folder, num_hidden_layers=4, **alike)


def config_for(megatron: dict[str, Any], **changes: Any):
    from tests.engine.policy.batches import SMOOTH, policy_config

    optimizer = {**SMOOTH, **megatron.get("optimizer", {})}
    return policy_config(megatron_cfg={**megatron, "optimizer": optimizer}, **changes)


def policy_of(folder: Path, name: str, layout: dict[str, Any], **changes: Any) -> Any:
    """Several micro-batches a rank, so that schedules have something to schedule."""
    from nemotron_steps.engine.policy.dtensor import DTensorPolicy
    from nemotron_steps.engine.policy.megatron import MegatronPolicy
    from tests.engine.policy.batches import ALL_TOKENS, SOME_TOKENS, preference_loss, rl_loss

    subject = SUBJECTS[name]
    rl = rl_loss(SOME_TOKENS if subject.loss == "truncated" else ALL_TOKENS)
    loss: Any = preference_loss() if subject.loss == "preferences" else rl
    changes = {"train_micro_batch_size": 3, "max_grad_norm": 1.0 if subject.clips else 1e9, **changes}
    if subject.dtensor:
        config = config_for({}, dtensor_cfg={"enabled": True, **layout}, **changes)
        return DTensorPolicy(config, folder, loss, reference=True, total_steps=10)
    layout = dict(layout)
    changes |= {key: layout.pop(key) for key in ("sequence_packing",) if key in layout}
    config = config_for({**subject.megatron, **layout}, **changes)
    return MegatronPolicy(config, folder, loss, reference=True, total_steps=10)


def batches_of(name: str) -> list[Any]:
    """Of three steps; experts are replayed in the second one, where there are any."""
    from tests.engine.policy.batches import grouped_batch, paired

    batches = [grouped_batch(seed) for seed in range(3)]
    return [paired(batch) for batch in batches] if SUBJECTS[name].loss == "preferences" else batches


def gradients(policy: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole gradients of the last step under Hugging Face names; 0 of what is not trained. Collective."""
    if not hasattr(policy, "shards"):
        for name, parameter in policy.model.hf.named_parameters():
            gradient = parameter.grad
            yield name, gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        return
    shards, live = policy.shards, policy.shards.local
    flat = {name: view for buffer in policy.buffers for name, view in buffer.unflatten(buffer.grads).items()}
    shards.local = {name: flat.get(name, torch.zeros_like(tensor)) for name, tensor in live.items()}
    try:
        yield from shards.hf_tensors()
    finally:
        shards.local = live


def steps(policy: Any, batches: list[Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Figures of two optimizer steps; the first one's gradients, and the weights after both. Collective."""
    from tests.engine.policy.routes import some_routes

    first, second, _ = batches
    before = policy.logprobs(first)
    found: dict[str, Any] = {"before": before.tolist(), "metrics": [policy.train_step(first)]}
    kept = policy.config.max_grad_norm > 1 and not torch.cuda.is_available()  # a GPU frees them
    adapted = hasattr(policy, "shards") and policy.model.adapters
    tensors = (
        {} if adapted or not kept else {f"gradient of {name}": tensor.clone() for name, tensor in gradients(policy)}
    )
    architecture = getattr(policy, "architecture", None)
    if architecture is not None and architecture.mixtures:
        mixtures, experts = len(architecture.mixtures), architecture.num_experts
        second.routed_experts = some_routes(second, mixtures, architecture.experts_per_token, experts)
    found["metrics"].append(policy.train_step(second))
    assert torch.equal(policy.reference_logprobs(first), before)
    found["after"] = policy.logprobs(first).tolist()
    live = policy.shards.hf_tensors() if hasattr(policy, "shards") else policy.weights()
    return found, tensors | {name: tensor.clone() for name, tensor in live}


def alone(name: str, folder: Path, *batches: Any) -> dict[str, Any]:
    """What one process finds, and in a third step."""
    policy = policy_of(folder, name, {})
    found, tensors = steps(policy, list(batches))
    return {**found, "tensors": tensors, "third": policy.train_step(batches[2])}


def scenarios(ranks: int, folders: dict[str, Path], out: Path) -> dict[str, Any]:
    """By "subject: layout" what `steps` found, and third steps, those of checkpoints in other layouts as well."""
    results: dict[str, Any] = {}
    cases = [(name, each, layout) for name, layouts in CASES[ranks].items() for each, layout in layouts.items()]
    # Process groups are made whenever the layout changes, which takes longer than training.
    cases.sort(key=lambda case: [case[2].get(size, 1) for size in (TENSOR, PIPELINE, CONTEXT, EXPERT)])
    saved = {(name, before) for at, name, before, _ in RESHARDED if at == ranks}
    for name, each, layout in cases:
        case = f"{name}: {each}"
        policy = policy_of(folders[name], name, layout)
        results[case], tensors = steps(policy, batches_of(name))
        if dist.get_rank() == 0:
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, out / f"{case}.safetensors")
        if (name, each) in saved:
            policy.save_checkpoint(str(out / case))
            policy.save_model(out / f"{case} as megatron")
        if name.startswith("adapters"):
            policy.save_adapter(out / f"{case} adapter", str(folders[name]), "")
        results[case]["third"] = policy.train_step(batches_of(name)[2])
    for at, name, before, after in RESHARDED:
        if at == ranks:
            policy = policy_of(folders[name], name, CASES[ranks][name][after])
            policy.load_checkpoint(str(out / f"{name}: {before}"))
            results[f"{name}: {before} → {after}"] = policy.train_step(batches_of(name)[2])
    return results | (of_two_alone(folders, out) if ranks == 2 else {})


def of_two_alone(folders: dict[str, Path], out: Path) -> dict[str, Any]:
    """What is asked of two ranks besides."""
    from nemotron_steps.engine.policy.checkpoint import random_states
    from nemotron_steps.errors import NonFiniteLossError
    from tests.engine.policy.batches import grouped_batch

    written_behind(folders, out)
    results: dict[str, Any] = {"groups": [groups_of(tensor) for tensor in (1, 2, 1, 2)]}
    nan = grouped_batch(0)
    nan.advantages = nan.advantages.clone()
    nan.advantages[-1, 12] = float("nan")  # only the last data-parallel rank sees it
    policy = policy_of(folders["qwen3"], "qwen3", {})
    try:
        policy.train_step(nan)
    except NonFiniteLossError:
        results["nan refused"] = policy.optimizer.steps == 0
    policy = policy_of(folders["latent"], "latent", CASES[2]["latent"]["pipeline"], precision="bfloat16")
    policy.train_step(grouped_batch(0))
    results["dtypes"] = {name: str(tensor.dtype) for name, tensor in policy.weights()}
    policy = policy_of(folders["dtensor, latent"], "dtensor, latent", {}, precision="bfloat16")
    policy.train_step(grouped_batch(0))
    exact = {name: tensor.tolist() for name, tensor in gradients(policy) if name.endswith(("A_log", ".D", "dt_bias"))}
    dropped = {"peft": {**ADAPTERS["peft"], "dropout": 0.5}}
    unbroken, resumed = (policy_of(folders["qwen3"], "qwen3", dropped) for _ in range(2))
    for seed in range(2):
        unbroken.train_step(grouped_batch(seed))
    unbroken.save_checkpoint(str(out / "dropped"))
    drawn = random_states(())["of_rank"]
    expected = unbroken.train_step(grouped_batch(2))
    resumed.load_checkpoint(str(out / "dropped"))
    same = resumed.train_step(grouped_batch(2)) == expected
    return results | {"exact": exact, "dropout": {"drawn": drawn, "same": same}}


def groups_of(tensor: int) -> int:
    """How many process groups there are once those of a layout are made."""
    from nemotron_steps.engine.policy.distributed.parallel_dims import ParallelDims, initialize

    initialize(ParallelDims(tensor=tensor))
    return len(dist.distributed_c10d._world.pg_map)


def written_behind(folders: dict[str, Path], out: Path) -> None:
    """Checkpoints of one step: saved, and written by a thread from a snapshot while all ranks train on."""
    from threading import Thread

    from nemotron_steps.errors import StorageError
    from tests.engine.policy.batches import grouped_batch

    narrow = {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16"}
    for name, subject, layout, changes in (
        ("tensor", "qwen3", {TENSOR: 2}, {}),
        ("narrow", "qwen3", {"optimizer": narrow}, {"precision": "bfloat16"}),
        ("dtensor", "dtensor", {}, {}),
    ):
        first, second = (policy_of(folders[subject], subject, layout, **changes) for _ in range(2))
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
    end = time.monotonic() + 900
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
