"""The vLLM generator: vLLM's own engine, stepped like the embedded one.

engine.py starts it, in this process or beside it; weights arrive through vLLM's weight-transfer API (transfer.py).
Works with vLLM 0.25 (CUDA) to 0.32 (CPU).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nemotron_steps.engine.generation.embedded.sampling import stream_key, versions_of
from nemotron_steps.engine.generation.vllm.engine import on_cpu, start_engine
from nemotron_steps.engine.generation.vllm.transfer import WorkersTransfer, call, hand_over, wait_for_output
from nemotron_steps.engine.types import Completion, FinishReason, GenerationRequest, WeightSyncReport
from nemotron_steps.engine.weight_sync.transfer import ChannelHandles
from nemotron_steps.errors import EngineError
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.stopping import left_to_us
from nemotron_steps.waiting import waiting

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from nemotron_steps.config.schema.policy import VllmConfig
    from nemotron_steps.engine.types import SamplingParams

_LARGEST_SEED = 2**63 - 1
WAKE_SECONDS = 180.0
"""For giving memory back, or taking it."""
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


@dataclass
class _Sequence:
    """One running sample; `versions`: (tokens sampled before, weight version)."""

    request_id: str
    index: int
    versions: list[tuple[int, int]] = field(default_factory=list)


class VllmGenerator:
    """A `Generator` over vLLM.

    Seeds: with `config.seed_requests` a seeded sample depends on its seed, request and index alone, as the embedded
    generator's; without, on vLLM's one random state and so on whatever was sampled before.

    The folder needs no weight files where `weights` come; an offer of them is read at the first `update_weights`. With
    `in_flight_updates` they may change while sequences run: the version of every token follows from how long each
    sample was at each change; an engine in another process samples ahead, so that one token may be of the version
    before. UnsupportedError when vLLM cannot do here what is asked of it; from every method WorkerLostError when a
    process of the engine's died or does not answer.
    """

    def __init__(
        self,
        hf_folder: Path,
        config: VllmConfig,
        *,
        max_total_length: int,
        precision: str,
        weights: Iterable[tuple[str, torch.Tensor]] | ChannelHandles | None = None,
        in_flight_updates: bool = True,
        recompute_kv_cache: bool = False,
        shares_device: bool = False,
        record_routed_experts: bool = False,
        options: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.weight_version = 0
        self._returned_tokens = 0
        self._finished: list[Completion] = []
        self._asleep: set[str] = set()
        """What sleeps: `weights`, `kv_cache`."""
        self._recompute = recompute_kv_cache
        self._in_flight = in_flight_updates
        self._max_total_length = max_total_length
        self._sequences: dict[str, _Sequence] = {}
        self._mixtures = Architecture.from_folder(hf_folder).mixtures if record_routed_experts else ()
        with left_to_us(), waiting(f"vLLM to start with {hf_folder}"):
            self._engine, self._own_process, workers, self._sleeps = start_engine(
                hf_folder,
                config,
                max_total_length=max_total_length,
                precision=precision,
                load=weights is None,
                seed=seed,
                shares_device=shares_device,
                record_routed_experts=record_routed_experts,
                options=options or {},
            )
        self._seed_requests = on_cpu() if config.seed_requests is None else config.seed_requests
        self._to_workers: WorkersTransfer | None = None
        if workers:
            self._to_workers = WorkersTransfer(self._engine, workers, own_process=self._own_process)
        try:
            if isinstance(weights, ChannelHandles):
                self.open_channel(weights)
            elif weights is not None:
                self.update_weights(weights, 0)
        except BaseException:
            self.close()
            raise

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. EngineError when the prompt leaves no room for a token."""
        from vllm.inputs import TokensPrompt

        room = self._max_total_length - len(request.prompt_ids)
        if not request.prompt_ids or room < 1:
            raise EngineError("the prompt leaves no room for a token", where=f"request {request.request_id}")
        if "weights" in self._asleep:
            raise EngineError("the generator sleeps until it is given weights", where=f"request {request.request_id}")
        if self._asleep:
            call(self._engine, lambda: self._engine.wake_up(["kv_cache"]), WAKE_SECONDS)
            self._asleep.clear()
        params = _sampling_params(request.params, room)
        seed = request.params.seed if self._seed_requests else None
        # vLLM drops no cached prefix while any request runs: the salt keeps those of older weights from being found.
        prompt = TokensPrompt(prompt_token_ids=list(request.prompt_ids), cache_salt=f"weights {self.weight_version}")
        for index in range(request.n):
            key = f"{request.request_id}#{index}"
            if seed is not None:
                stream = stream_key(seed, request.request_id, index) & _LARGEST_SEED
                params = _sampling_params(request.params, room, seed=stream)
            with self._alive():
                self._engine.add_request(key, prompt, params)
            self._sequences[key] = _Sequence(request.request_id, index, [(0, self.weight_version)])

    def step(self) -> list[Completion]:
        """One decoding step of every running sequence."""
        finished, self._finished = self._finished, []
        return finished + self._completed(self._decode()) if self._sequences else finished

    def _completed(self, outputs: Iterable[Any]) -> list[Completion]:
        """vLLM is asked for whole samples: reports of hundreds of sequences a step cost more than their decoding."""
        completions = []
        for output in outputs:
            sequence = self._sequences.pop(output.request_id, None)
            if sequence is None:  # cancelled
                continue
            sample = output.outputs[0]
            tokens = list(sample.token_ids)
            fed = len(output.prompt_token_ids) + len(tokens) - 1
            self._returned_tokens += len(tokens)
            logprobs = list(sample.logprobs.logprobs)  # with `logprobs=0`, a flat list of exactly the sampled tokens'
            if len(logprobs) != len(tokens):
                what = "vLLM returned another number of logprobs than tokens"
                raise EngineError(what, expected=str(len(tokens)), found=str(len(logprobs)))
            completions.append(
                Completion(
                    request_id=sequence.request_id,
                    index=sequence.index,
                    token_ids=tokens,
                    logprobs=logprobs,
                    finish_reason=FINISH[sample.finish_reason],
                    weight_versions=versions_of(sequence.versions, len(tokens)),
                    routed_experts=recorded_experts(sample, self._mixtures, fed) if self._mixtures and tokens else None,
                )
            )
        return completions

    def _decode(self) -> Any:
        if self._own_process:
            wait_for_output(self._engine)
        with self._alive():
            return self._engine.step()

    def _alive(self) -> AbstractContextManager[None]:
        """A failure that comes from a dead or silent worker is a WorkerLostError, where there are workers."""
        return nullcontext() if self._to_workers is None else self._to_workers.alive()

    @property
    def sampled_tokens(self) -> int:
        """Tokens of returned samples and of running ones. Grows while anything is sampled; a cancelled sample takes its
        own away."""
        return self._returned_tokens + sum(self._running().values())

    def _running(self) -> dict[str, int]:
        """Tokens that have arrived of every unfinished sample, by its key."""
        states = self._engine.output_processor.request_states.values()
        return {state.external_req_id: state.detokenizer.num_output_tokens() for state in states}

    def pending(self) -> int:
        """Samples not yet returned."""
        return len(self._sequences) + len(self._finished)

    def cancel(self, request_id: str) -> None:
        """Abort the unfinished sequences of a request."""
        keys = [key for key, sequence in self._sequences.items() if sequence.request_id == request_id]
        for key in keys:
            del self._sequences[key]
        self._finished = [completion for completion in self._finished if completion.request_id != request_id]
        self._engine.abort_request(keys)

    def finish_generation(self) -> None:
        """Give the GPU's memory back, where a policy shares it; `update_weights` brings it again."""
        if self._sleeps and not self._asleep and not self.pending():
            # Level 2: the weights come anew, so none is kept.
            call(self._engine, lambda: self._engine.sleep(level=2), WAKE_SECONDS)
            self._asleep = {"weights", "kv_cache"}

    def open_channel(self, offered: ChannelHandles) -> None:
        """Open a channel of weights that the tensor-parallel workers fetch themselves in later updates."""
        assert self._to_workers is not None, "an engine in one process is given tensors"
        self._to_workers.open_channel(offered)

    def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]] | ChannelHandles, version: int
    ) -> WeightSyncReport:
        """Load new weights; the prefix cache is dropped, running sequences go on under the new weights. EngineError for
        those without in-flight updates."""
        if self._sequences and not self._in_flight:
            raise EngineError("weights changed under running sequences", expected="in_flight_updates=True")
        started = time.perf_counter()
        if "weights" in self._asleep:
            call(self._engine, lambda: self._engine.wake_up(["weights"]), WAKE_SECONDS)
            self._asleep.discard("weights")
        if self._to_workers is not None:
            moved = self._to_workers.load(weights)
        else:
            assert not isinstance(weights, ChannelHandles), "only processes of their own take up offers"
            moved = hand_over(self._engine, weights)
        if self._own_process and self._sequences:
            # Its answer to the update came after all that it had sampled before.
            arrived = self._engine.engine_core.outputs_queue
            while not arrived.empty():
                self._finished += self._completed(self._decode())
        lengths = self._running() if self._sequences else {}
        for key, sequence in self._sequences.items():
            sequence.versions.append((lengths.get(key, 0), version))
        self._engine.reset_prefix_cache(reset_running_requests=self._recompute)  # frees what the new salt hides
        self.weight_version = version
        return WeightSyncReport(version, time.perf_counter() - started, moved)

    def close(self) -> None:
        """Shut the engine down. torch.distributed stays as it is: a policy of this process may train on."""
        import torch.distributed as dist

        core, self._engine = getattr(self._engine, "engine_core", None), None
        if core is None:
            return
        # vLLM ends its own process groups, and then torch.distributed as a whole, whoever started that.
        destroy = dist.destroy_process_group
        dist.destroy_process_group = lambda group=None: None if group in (None, dist.group.WORLD) else destroy(group)
        try:
            core.shutdown()
        finally:
            dist.destroy_process_group = destroy


def _sampling_params(params: SamplingParams, room: int, *, seed: int | None = None) -> Any:
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
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def recorded_experts(sample: Any, mixtures: Sequence[int], fed: int) -> npt.NDArray[np.int16]:
    """int16 [fed, mixtures, k] of vLLM's CompletionOutput, -1 for last tokens of which it says nothing; what it
    recorded of tokens that it sampled and took back is dropped. A token that has an expert twice is how vLLM's buffers
    look where a kernel routes by itself and nothing was recorded."""
    record = sample.routed_experts
    if record is None or record.ndim != 3 or record.shape[1] <= mixtures[-1]:
        raise EngineError(
            "vLLM returned no experts of this model's layers",
            where="CompletionOutput.routed_experts",
            expected=f"[tokens, more than {mixtures[-1]} layers, experts a token]",
            found="nothing" if record is None else "x".join(map(str, record.shape)),
        )
    known = record[:fed, list(mixtures)].astype(np.int16)
    twice = (np.diff(np.sort(known), axis=-1) == 0).any((-1, -2))
    if twice.any():
        raise EngineError(
            "vLLM did not record the experts of all tokens",
            where="CompletionOutput.routed_experts",
            expected="different experts of a token in a layer",
            found=f"an expert twice for {int(twice.sum())} of {len(known)} tokens",
            hints=[
                "+policy.generation.vllm_kwargs.moe_backend=triton   # a kernel that leaves routing to vLLM",
                "policy.router_replay.enabled=false",
            ],
        )
    return np.pad(known, ((0, fed - len(known)), (0, 0), (0, 0)), constant_values=-1)
