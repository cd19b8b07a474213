"""The engine's core types and how data flows between them.

    Prompt -> GenerationRequest --Generator--> Completion --environment--> Rollout; those of a prompt are a RolloutGroup
    RolloutGroups --advantages--> TrainBatch --Policy.train_step--> weights --Generator.update_weights--> next version

Shapes in names and docstrings: P prompts, G rollouts a group, N = P·G sequences, T tokens. Token-aligned tensors follow
one convention: element [n, t] belongs to token t, so the log probability at t is log p(token_t | tokens_<t), and
column 0 is always 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """A stop token or stop string was produced."""
    LENGTH = "length"
    """max_new_tokens or the context length was reached: the completion is truncated."""
    ABORT = "abort"
    """The request was cancelled (straggler deadline, shutdown)."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. temperature 0 is greedy. Recorded logprobs are of the distribution that tokens are drawn from: at
    `temperature`, of what top-k and top-p keep."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None
    """With a seed, rollout i of request r samples from a stream that depends on (seed, r.request_id, i) alone,
    never on what else is in the batch."""


@dataclass(frozen=True)
class GenerationRequest:
    """Sample `n` completions of one prompt. The prompt's KV cache is computed once for all n."""

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    n: int = 1


@dataclass
class Completion:
    """One finished sample. token_ids includes the stop token when one was produced."""

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    weight_versions: list[int]
    """Weight version that produced each token; more than one value after an in-flight update."""
    routed_experts: npt.NDArray[np.int16] | None = field(default=None, compare=False)
    """[prompt + sampled tokens - 1, mixtures, k], the experts that every token which was fed went through, those of the
    prompt first; -1 where they are not known. None: not recorded."""


@dataclass
class WeightSyncReport:
    """What one weight update cost."""

    version: int
    seconds: float
    bytes: int


class Generator(Protocol):
    """Continuous-batching sampler. `submit` queues, `step` advances; both are cheap to interleave, so the
    synchronous loop, the asynchronous loop and multi-turn agents drive the same object."""

    weight_version: int

    @property
    def sampled_tokens(self) -> int:
        """Grows while sequences advance, finished or not: with samples pending, standing still means dead."""

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises EngineError if the prompt leaves no room for a token."""

    def step(self) -> list[Completion]:
        """Advance every running sequence by at least one token; return those that finished."""

    def pending(self) -> int:
        """Completions not yet returned (queued or running)."""

    def cancel(self, request_id: str) -> None:
        """Drop a request; its unfinished rollouts are never returned."""

    def finish_generation(self) -> None:
        """Nothing is asked for until the next `update_weights`: give the policy's GPU the memory of caches back."""

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightSyncReport:
        """Load Hugging Face-named weights; running sequences go on under the new version; prefix cache is dropped."""

    def close(self) -> None:
        """Free memory and processes."""


@dataclass
class Rollout:
    """One graded sample: prompt and response tokens, the generator's logprobs, and its reward.

    token_mask marks what is trained: 1 for tokens the policy sampled, 0 for prompt, tool output and padding.
    logprobs is aligned with token_ids (0 where token_mask is 0). `failure` names why it could not be graded;
    then sample_mask is 0 and reward must not be read.
    """

    group_id: str
    index: int
    token_ids: list[int]
    token_mask: list[int]
    logprobs: list[float]
    weight_versions: list[int]
    reward: float
    environment: str
    truncated: bool
    components: dict[str, float] = field(default_factory=dict)
    failure: str | None = None
    turns: list[tuple[int, int]] = field(default_factory=list)
    """[start, end) token span of each assistant turn, for message-level penalties."""
    metadata: dict[str, Any] = field(default_factory=dict)
    routed_experts: npt.NDArray[np.int16] | None = field(default=None, compare=False)
    """[at most all tokens, mixtures, k], as a Completion's; of the tokens after those nothing is known."""


@dataclass
class RolloutGroup:
    """All rollouts of one prompt. Groups are told apart by group_id, never by their tokens."""

    group_id: str
    prompt_index: int
    rollouts: list[Rollout]
    weight_version: int
    """Oldest version that produced any trained token of the group."""


def oldest_version(rollouts: Iterable[Rollout], default: int) -> int:
    """Oldest weights that sampled any token of these rollouts; `default` when none was sampled."""
    return min((min(r.weight_versions) for r in rollouts if r.weight_versions), default=default)


@dataclass
class TrainBatch:
    """N right-padded sequences of T tokens on the CPU, token-aligned (see the module docstring)."""

    input_ids: torch.Tensor
    """int64 [N, T]"""
    lengths: torch.Tensor
    """int64 [N], tokens before padding"""
    token_mask: torch.Tensor
    """float32 [N, T]"""
    sample_mask: torch.Tensor
    """float32 [N]"""
    generation_logprobs: torch.Tensor
    """float32 [N, T]"""
    advantages: torch.Tensor
    """float32 [N, T]"""
    prev_logprobs: torch.Tensor | None = None
    """float32 [N, T]; None under force_on_policy_ratio when no correction needs it"""
    reference_logprobs: torch.Tensor | None = None
    """float32 [N, T]; None when the KL penalty is 0"""
    teacher_logprobs: torch.Tensor | None = None
    """float32 [N, T] of each row's teacher; None without teachers"""
    teacher_topk_logprobs: torch.Tensor | None = None
    """float32 [N, T, k], the teacher's logprobs of its top-k tokens, most likely first; 0 where nothing is trained"""
    teacher_topk_indices: torch.Tensor | None = None
    """int32 [N, T, k], those tokens"""
    teacher_states: torch.Tensor | None = None
    """float32 [N, T, hidden], what each row's teacher feeds its output layer, zeros after it where another is wider;
    in place of the two above where whole distributions are compared"""
    teacher_number: torch.Tensor | None = None
    """int64 [N], which teacher each row's states are of"""
    routed_experts: torch.Tensor | None = None
    """int16 [N, T, mixtures, k], the experts that the generator chose for each token in every layer of experts; all -1
    where they are not known. None: the policy's routers choose."""
    packed_row: torch.Tensor | None = None
    """int64 [N], the row that a sequence was packed into ahead of training; None: the policy packs"""

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])


class Teachers(Protocol):
    """Frozen models that grade what the policy samples (on-policy distillation). Collective, as a Policy is."""

    def score(self, batch: TrainBatch, names: Sequence[str | None]) -> TrainBatch:
        """The batch with `teacher_logprobs`, and either `teacher_topk_*` or `teacher_states` and `teacher_number`;
        `names` [N]: the teacher of each row, None for rows that are not trained."""


class Snapshot(Protocol):
    """A policy's training state at one step, on its way to disk."""

    def write(self, path: str) -> None:
        """Write it into a folder, byte for byte what save_checkpoint would have written. Callable from another thread
        while the policy trains; collective over the policy's ranks. Raises StorageError."""


class Policy(Protocol):
    """The trained model. Every method is collective: all ranks of a parallel layout call it together."""

    def logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """float32 [N, T] logprobs of batch.input_ids under the current weights, without gradient."""

    def reference_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """The same under the frozen reference weights."""

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        """One optimizer step over the global batch. Raises NonFiniteLossError before touching a weight."""

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Hugging Face-named current weights, full (gathered) tensors, one at a time."""

    def save_checkpoint(self, path: str) -> None:
        """Weights, optimizer, scheduler and RNG into a folder (distributed format)."""

    def snapshot(self) -> Snapshot:
        """What save_checkpoint would write now, copied to host memory."""

    def load_checkpoint(self, path: str) -> None:
        """The inverse of save_checkpoint, in any parallel layout."""

    def save_model(self, path: str | Path) -> None:
        """The weights, adapters added, config and tokenizer alone, as a Megatron checkpoint folder."""

    def save_hf(self, path: str | Path) -> None:
        """The same as a Hugging Face folder."""

    def save_adapter(self, path: str | Path, base: str, digest: str) -> None:
        """The adapters alone, as a folder that PEFT loads, of the checkpoint at `base` with that digest."""
