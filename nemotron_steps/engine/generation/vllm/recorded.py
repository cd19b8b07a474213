"""The experts that vLLM's tokens went through, as a `Completion` has them.

vLLM returns, of every layer and not of the mixtures alone, the experts of all tokens that were fed: the prompt's first,
those found in its prefix cache included, then those of all sampled ones but the last. uint8, or uint16 of more than 256
experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nemotron_steps.errors import EngineError


def recorded_experts(sample: Any, mixtures: Sequence[int], fed: int) -> npt.NDArray[np.int16]:
    """int16 [fed, mixtures, k], -1 for last tokens of which vLLM says nothing.

    Args:
        sample: vLLM's CompletionOutput, of an engine that records.
        mixtures: layers that have experts, from 0.
        fed: tokens of the prompt and of the sample, without the last. What vLLM recorded beyond them, of tokens that it
            sampled and took back, is dropped.

    Raises:
        EngineError: there is no record, or one of fewer layers; or a token has an expert twice, which is how vLLM's
            buffers look where a kernel routes by itself and nothing was recorded.
    """
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
