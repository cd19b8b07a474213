"""The `embedded` generator: continuous batching in this process, on any device, with no server.

Members of a group share one prefill. A finished sequence leaves the batch and a waiting one takes its place at the
next step. Weights may change between two steps. Not for large models at full speed (vllm/).
"""

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from nemotron_steps.engine.generation.embedded.cached_model import CachedModel
from nemotron_steps.engine.generation.embedded.decode_batch import DecodeBatch, NewRow
from nemotron_steps.engine.generation.embedded.decoders import GraphDecoder, NativeDecoder
from nemotron_steps.engine.generation.embedded.dense_model import CachedDenseModel
from nemotron_steps.engine.generation.embedded.hybrid_model import CachedHybridModel
from nemotron_steps.engine.generation.embedded.prefix_cache import Prefix, PrefixCache
from nemotron_steps.engine.generation.embedded.sampling import SamplingPlan, make_plan, sample, stream_key, versions_of
from nemotron_steps.engine.memory_tuning import release_gpu_memory
from nemotron_steps.engine.types import Completion, FinishReason, GenerationRequest, SamplingParams, WeightSyncReport
from nemotron_steps.errors import EngineError
from nemotron_steps.models.architecture import Architecture

_SHARE = 8  # rows are dropped or added when an eighth of the batch is free, or after as many steps
_SMALL_CACHE = 8
"""A KV cache of at most this part of a GPU's memory is kept between generations."""
_CACHED_PROMPTS = 32  # prompts of full length that the prefix cache may hold


@dataclass(eq=False)
class _Group:
    """A request of at most `budget` tokens a sequence, and its prompt's cache as long as it may still be used."""

    request: GenerationRequest
    prompt: tuple[int, ...]
    budget: int
    prefix: Prefix | None = None


@dataclass(eq=False)
class _Sequence:
    """One of the n samples of a request."""

    group: _Group
    index: int
    answer: int = 0
    """Column of its first sampled token"""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(index of the first token, weight version) runs"""
    prompt_experts: npt.NDArray[np.int16] | None = None
    """[prompt, mixtures, k], where they are recorded"""

    @property
    def params(self) -> SamplingParams:
        return self.group.request.params


class EmbeddedGenerator:
    """A `Generator` in plain torch, but for the decoding step: CUDA graphs, or a kernel in C for tiny models on CPU.

    Seeded samples do not depend on the batch, up to the rounding of matrix products of different sizes. Scores, softmax
    and logprobs are float32 in any dtype. `decode`, token ids to text, is for stop strings alone. UnsupportedError for
    other layers or types, EngineError for weights that are missing, unknown or misshapen.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        max_sequences: int,
        max_total_length: int,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        eos_token_ids: Sequence[int],
        decode: Callable[[Sequence[int]], str] | None = None,
        recompute_kv_cache: bool = False,
        record_routed_experts: bool = False,
    ) -> None:
        self.weight_version = 0
        self.sampled_tokens = 0
        """Those of cancelled rows included, and the first of a row counted as the step's others are."""
        self._recompute = recompute_kv_cache
        self._device = torch.device(device)
        self._max_sequences = max_sequences
        self._max_total_length = max_total_length
        self._vocab_size = architecture.vocab_size
        self._eos = frozenset(eos_token_ids)
        self._decode = decode
        with torch.inference_mode():
            self._model: CachedModel
            if architecture.is_hybrid:
                self._model = CachedHybridModel(architecture, device=self._device, dtype=dtype)
            else:
                self._model = CachedDenseModel(
                    architecture, max_positions=max_total_length, device=self._device, dtype=dtype
                )
            self._model.load(weights)
            if record_routed_experts:
                self._model.chosen = []
            self._batch = DecodeBatch(self._model, max_sequences, max_total_length)
        self._decoder = GraphDecoder.of(self._model, self._batch) or NativeDecoder.of(self._model, self._batch)
        """What decodes faster than operator by operator, where there is anything."""
        self._prompts = PrefixCache(self._model, _CACHED_PROMPTS * max_total_length)
        self._waiting: deque[_Sequence] = deque()
        self._held_back = 0
        self._rows: list[_Sequence | None] = []
        self._stop_sets: dict[frozenset[int], int] = {}
        self._stop_table = torch.zeros(0, dtype=torch.bool, device=self._device)
        self._plan = SamplingPlan(1.0)
        self._deadline = 0
        self._watches_text = False
        self._pieces: dict[int, str] = {}
        self._unfinished: dict[str, int] = {}

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. EngineError for one that cannot be sampled."""
        prompt, params = tuple(request.prompt_ids), request.params
        wrong = {
            "the prompt is empty": not prompt,
            "the prompt leaves no room for a token": len(prompt) >= self._max_total_length,
            "the prompt holds a token the model lacks": min(prompt, default=0) < 0
            or max(prompt, default=0) >= self._vocab_size,
            "the request asks for nothing": request.n < 1 or params.max_new_tokens < 1,
            "a sampling parameter is out of range": not (
                params.temperature >= 0 and 0 < params.top_p <= 1 and params.top_k >= 0
            ),
            "a request with this id is pending": request.request_id in self._unfinished,
            "stop strings need a generator with a tokenizer": bool(params.stop_strings) and self._decode is None,
            "a stop string is empty": "" in params.stop_strings,
        }
        for what, is_wrong in wrong.items():
            if is_wrong:
                raise EngineError(what, where=f"request {request.request_id}")
        group = _Group(request, prompt, min(params.max_new_tokens, self._max_total_length - len(prompt)))
        self._waiting.extend(_Sequence(group, i) for i in range(request.n))
        self._unfinished[request.request_id] = request.n

    def step(self) -> list[Completion]:
        """Admit what fits, advance every running sequence, and return what finished."""
        with torch.inference_mode():
            finished = self._admit()
            if self._rows:
                self._advance()
                finished += self._collect()
        self.sampled_tokens += len(self._rows) + len(finished)
        return finished

    def pending(self) -> int:
        """Completions not yet returned."""
        return sum(self._unfinished.values())

    def cancel(self, request_id: str) -> None:
        """Drop a request's unfinished sequences. Unknown and finished requests are ignored."""
        if self._unfinished.pop(request_id, None) is None:
            return
        self._waiting = deque(m for m in self._waiting if m.group.request.request_id != request_id)
        with torch.inference_mode():
            for row, sequence in enumerate(self._rows):
                if sequence is not None and sequence.group.request.request_id == request_id:
                    self._rows[row] = None
            self._compact(force=True)

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightSyncReport:
        """Replace every weight; running sequences go on under the new version, with the KV cache they have unless
        `recompute_kv_cache` was asked for. EngineError as CachedModel.load."""
        begin = time.perf_counter()
        with torch.inference_mode():
            received = self._model.load(weights)
        self.weight_version = version
        self._prompts.clear()
        for sequence in self._waiting:
            sequence.group.prefix = None
        for running in self._rows:
            if running is not None:
                running.group.prefix = None
                running.versions.append((self._batch.column - running.answer + 1, version))
        if self._recompute and self._rows:
            with torch.inference_mode():
                self._refill()
        return WeightSyncReport(version, time.perf_counter() - begin, received)

    def finish_generation(self) -> None:
        """Free the KV cache where it takes much of a GPU. A small one stays, whose addresses CUDA graphs hold."""
        if self._device.type != "cuda" or self._unfinished:
            return
        _, whole = torch.cuda.mem_get_info(self._device)
        if self._batch.cache_bytes * _SMALL_CACHE > whole:
            with torch.inference_mode():
                self._prompts.clear()
                self._batch.free()
            release_gpu_memory()

    def close(self) -> None:
        """Drop every request and free the cache and the weights."""
        self._waiting.clear()
        self._rows.clear()
        self._unfinished.clear()
        del self._decoder, self._batch, self._prompts, self._model

    def _refill(self) -> None:
        self._compact(force=True)
        batch, rows = self._batch, [(row, each) for row, each in enumerate(self._rows) if each is not None]
        sampled = [batch.tokens[row, each.answer : batch.column].tolist() for row, each in rows]
        fed = [(*each.group.prompt, *tokens) for (_, each), tokens in zip(rows, sampled, strict=True)]
        shared = batch.prefixes
        computed = self._prompts.compute(dict.fromkeys([*fed, *(prefix.tokens for prefix in shared)]))
        batch.refill([computed[tokens] for tokens in fed], {prefix: computed[prefix.tokens] for prefix in shared})

    def _advance(self) -> None:
        batch = self._batch
        if batch.column + 1 >= batch.columns:
            self._compact(force=True)  # a dead row may reach further left than any live one
            self._shifted(batch.make_room(0))
        if self._decoder is not None and self._decoder.takes(self._plan):
            self._decoder.step(self._plan)
            return
        tokens, positions = batch.newest()
        logits = self._model.decode(tokens, positions, batch.decode_view())
        chosen = self._model.take_chosen()
        if chosen is not None:
            batch.routed_experts[: batch.size, batch.column] = chosen
        batch.column += 1
        self._draw(logits.float(), first=0, plan=self._plan)

    def _draw(self, logits: torch.Tensor, *, first: int, plan: SamplingPlan) -> None:
        """Sample the current column's token of rows from `first` on; overwrites the logits."""
        rows, column = slice(first, self._batch.size), self._batch.column
        sampled = sample(logits, self._batch.uniforms(first), plan)
        self._batch.tokens[rows, column], self._batch.logprobs[rows, column] = sampled

    def _shifted(self, columns: int) -> None:
        if columns:
            self._deadline += columns
            for sequence in self._rows:
                if sequence is not None:
                    sequence.answer += columns

    def _admit(self) -> list[Completion]:
        """Bring waiting sequences into free rows and sample their first tokens; return those already finished."""
        if not self._waiting:
            return []
        free = self._max_sequences - sum(m is not None for m in self._rows)
        count = min(free, len(self._waiting))
        if not count:
            return []
        # Joining costs a forward pass, so sequences join together, but none waits longer than a few steps.
        if self._rows and free < len(self._waiting) and free * _SHARE < self._max_sequences:
            self._held_back += 1
            if self._held_back < _SHARE:
                return []
        self._held_back = 0
        self._compact(force=True)
        joining = [self._waiting.popleft() for _ in range(count)]
        batch, groups = self._batch, {sequence.group: None for sequence in joining if sequence.group.prefix is None}
        computed = self._prompts.compute(dict.fromkeys(group.prompt for group in groups))
        for group in groups:
            group.prefix = computed[group.prompt]
        prompts = [sequence.group.prefix for sequence in joining if sequence.group.prefix is not None]
        shared = self._prompts.choose_shared(prompts, batch.prefixes)
        new_rows = []
        for sequence, prompt, prefix in zip(joining, prompts, shared, strict=True):
            seed, request_id = sequence.params.seed, sequence.group.request.request_id
            stream = secrets.randbits(63) if seed is None else stream_key(seed, request_id, sequence.index)
            new_rows.append(NewRow(prompt, prefix, stream, self._stop_offset(sequence.params.stop_token_ids)))
        lengths = [row.own_length for row in new_rows]
        most = max(length + sequence.group.budget for length, sequence in zip(lengths, joining, strict=True))
        self._shifted(batch.make_room(max(lengths), most=most))
        first = batch.size
        batch.add(new_rows)
        for sequence, prompt in zip(joining, prompts, strict=True):
            sequence.answer = batch.column
            sequence.versions = [(0, self.weight_version)]
            sequence.prompt_experts = prompt.routed_experts
            self._rows.append(sequence)
        self._replan()
        logits = torch.stack([prompt.logits for prompt in prompts if prompt.logits is not None])
        self._draw(logits, first=first, plan=make_plan([m.params for m in joining], self._vocab_size, self._device))
        return self._collect()

    def _stop_offset(self, stop_token_ids: Sequence[int]) -> int:
        stops = self._eos.union(stop_token_ids)
        if stops not in self._stop_sets:
            self._stop_sets[stops] = len(self._stop_sets) * self._vocab_size
            row = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            row[[s for s in stops if 0 <= s < self._vocab_size]] = True
            self._stop_table = torch.cat((self._stop_table, row))
        return self._stop_sets[stops]

    def _collect(self) -> list[Completion]:
        """Completions that end at the current column; their rows leave the batch."""
        batch = self._batch
        newest, _ = batch.newest()
        stopped = batch.stopped(newest, self._stop_table)
        if batch.column < self._deadline and not self._watches_text and not stopped.any().item():
            return []
        stops = stopped.tolist()
        ended: dict[int, FinishReason] = {}
        for row, sequence in enumerate(self._rows):
            if sequence is None:
                continue
            length = batch.column - sequence.answer + 1
            if stops[row] or (sequence.params.stop_strings and self._has_stop_string(row, sequence)):
                ended[row] = FinishReason.STOP
            elif length >= sequence.group.budget:
                ended[row] = FinishReason.LENGTH
        if not ended:
            return []
        finished = self._complete(ended)
        for row in ended:
            self._rows[row] = None
        self._compact(force=False)
        return finished

    def _has_stop_string(self, row: int, sequence: _Sequence) -> bool:
        assert self._decode is not None
        stop_strings = sequence.params.stop_strings
        newest = int(self._batch.tokens[row, self._batch.column])
        if newest not in self._pieces:
            self._pieces[newest] = self._decode([newest])
        piece = self._pieces[newest]
        # Decoding costs more than sampling did. A token that brings no last character of a stop string completes none,
        # but a part of a character shows as U+FFFD, and white space may be dropped where it comes first.
        if "\ufffd" not in piece and not any(stop[-1] in piece or stop[-1].isspace() for stop in stop_strings):
            return False
        # A character is at most four tokens, and older text was searched at earlier steps.
        width = 4 * max(map(len, stop_strings)) + 8
        begin = max(sequence.answer, self._batch.column + 1 - width)
        text = self._decode(self._batch.tokens[row, begin : self._batch.column + 1].tolist())
        return any(stop in text for stop in stop_strings)

    def _complete(self, ended: dict[int, FinishReason]) -> list[Completion]:
        """Completions of rows that ended at the current column."""
        batch = self._batch
        sequences = {row: sequence for row in ended if (sequence := self._rows[row]) is not None}
        first = min(sequence.answer for sequence in sequences.values())
        # All rows in one transfer: on a GPU each costs a wait.
        index = torch.tensor(list(sequences), device=self._device)
        tokens = batch.tokens[:, first : batch.column + 1].index_select(0, index).tolist()
        logprobs = batch.logprobs[:, first : batch.column + 1].index_select(0, index).tolist()
        chosen: Sequence[npt.NDArray[np.int16] | None] = [None] * len(ended)
        if self._model.chosen is not None:  # of all but the newest token, which has not been fed
            chosen = [*batch.routed_experts[:, first : batch.column].index_select(0, index).cpu().numpy()]
        finished = []
        for (row, sequence), row_tokens, row_logprobs, experts in zip(
            sequences.items(), tokens, logprobs, chosen, strict=True
        ):
            request_id, sampled = sequence.group.request.request_id, row_logprobs[sequence.answer - first :]
            if any(p != p for p in sampled):
                raise EngineError("sampling met NaN logits", where=f"request {request_id}")
            versions = versions_of(sequence.versions, len(sampled))
            if experts is not None and sequence.prompt_experts is not None:
                experts = np.concatenate((sequence.prompt_experts, experts[sequence.answer - first :]))
            self._unfinished[request_id] -= 1
            if not self._unfinished[request_id]:
                del self._unfinished[request_id]
            own = row_tokens[sequence.answer - first :]
            finished.append(Completion(request_id, sequence.index, own, sampled, ended[row], versions, experts))
        return finished

    def _compact(self, *, force: bool) -> None:
        """Close the holes that finished rows left, at once or when there are enough of them to pay for the copying."""
        dead = [row for row, sequence in enumerate(self._rows) if sequence is None]
        if not dead or (not force and len(dead) * _SHARE < len(self._rows)):
            self._replan()
            return
        for source, target in self._batch.remove(dead):
            self._rows[target] = self._rows[source]
        del self._rows[self._batch.size :]
        self._replan()

    def _replan(self) -> None:
        """Recompute what depends on which rows are live."""
        live = [m for m in self._rows if m is not None]
        self._watches_text = any(m.params.stop_strings for m in live)
        if live:
            self._deadline = min(m.answer + m.group.budget - 1 for m in live)
            filler = live[0].params
            params = [filler if m is None else m.params for m in self._rows]
            self._plan = make_plan(params, self._vocab_size, self._device)
