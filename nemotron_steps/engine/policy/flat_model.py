"""What every policy model does, however its layers are built: from flat tokens to hidden states.

Parameters, their names, their tensor-parallel linears and their sharded checkpoints are megatron-core's. The forward
pass is written out here because it takes a TokenLayout and ends at hidden states: the output layer belongs to
logprob.py. Built by model.py (layers of attention and MLP) and hybrid.py (layers of one mixer each).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from nemotron_steps.engine.policy.moe.mixture import FlatMoe
from nemotron_steps.engine.policy.moe.router import Router, counting
from nemotron_steps.engine.policy.multi_token_prediction import MultiTokenPrediction
from nemotron_steps.engine.policy.parallel_dims import ParallelDims, device
from nemotron_steps.engine.policy.token_layout import TokenLayout
from nemotron_steps.models.adapters import AdapterPair
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.mapping import EXACT
from nemotron_steps.models.megatron_core import load_megatron_core
from nemotron_steps.models.rope import cos_sin

load_megatron_core()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.activations import squared_relu  # noqa: E402
from megatron.core.tensor_parallel.mappings import (  # noqa: E402
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig  # noqa: E402


class FlatModel(torch.nn.Module):
    """A model over flat tokens, up to the last hidden states.

    Whoever builds it gives it `embedding` (first stage), `decoder.layers` (each with its `layer_number`, from 1) and
    `output_layer` (last stage), and then calls `finish`.
    """

    embedding: Any
    decoder: Any
    output_layer: Any
    adapters: tuple[AdapterPair, ...] = ()
    """Of the whole model, where its weights are frozen and adapters beside them are trained (lora.py)."""
    adapter_scale: float = 0.0
    """What B A is multiplied with."""
    mtp: MultiTokenPrediction | None
    """On the last stage of a model that trains it."""

    def finish(
        self,
        architecture: Architecture,
        layout: ParallelDims,
        dtype: torch.dtype,
        *,
        activation_checkpointing: bool,
        freeze_router: bool,
    ) -> None:
        """What the forward pass needs beside the parameters."""
        if not hasattr(self, "mtp"):
            self.register_module("mtp", None)
        self.architecture, self.layout, self.dtype = architecture, layout, dtype
        self.activation_checkpointing, self.freeze_router = activation_checkpointing, freeze_router
        self.context_group = parallel_state.get_context_parallel_group() if layout.context > 1 else None
        for layer in self.decoder.layers:
            if isinstance(mixture := getattr(layer, "mlp", None), FlatMoe):
                mixture.number = architecture.mixtures.index(layer.layer_number - 1)
        self._angles = torch.empty(2, 0, 1, 1, architecture.head_dim, dtype=dtype, device=device())

    def angles(self, tokens: TokenLayout) -> torch.Tensor:
        """Cosines and sines of the tokens' positions, [2, T, 1, 1, head_dim]; of no angle where attention has none."""
        longest = tokens.shape[1] if self.architecture.rotary else 1
        if self._angles.shape[1] < longest:
            self._angles = self._table(longest).to(device=device(), dtype=self.dtype)
        positions = tokens.positions if self.architecture.rotary else torch.zeros_like(tokens.positions)
        angles: torch.Tensor = self._angles.index_select(1, self.own_tokens(positions))
        return angles

    def _table(self, longest: int) -> torch.Tensor:
        if not self.architecture.rotary:
            return torch.tensor([1.0, 0.0])[:, None, None, None, None].expand(2, 1, 1, 1, self.architecture.head_dim)
        length = max(longest, min(2 * longest, self.architecture.max_position_embeddings))
        return torch.stack(cos_sin(self.architecture, length))[:, :, None, None]

    def own_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """This context-parallel rank's share of token-aligned values [T, …]."""
        if self.context_group is None:
            return values
        rank: int = parallel_state.get_context_parallel_rank()
        return values.chunk(self.layout.context)[rank]

    def parameter_dtype(self, name: str) -> torch.dtype:
        """Type a parameter is kept in, by its name in the whole model."""
        frozen = self.freeze_router and name.startswith("decoder.") and name.endswith(".router.weight")
        exact = name.endswith(EXACT) or frozen
        return torch.float32 if exact else self.dtype

    def routers(self) -> list[Router]:
        """Routers of this rank's layers."""
        ahead = list(self.mtp.inner_layers()) if self.mtp is not None else []
        mixtures = [getattr(layer, "mlp", None) for layer in [*self.decoder.layers, *ahead]]
        return [mixture.router for mixture in mixtures if isinstance(mixture, FlatMoe)]

    def forward(self, tokens: TokenLayout, received: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states after this rank's layers, before the final norm: [T, 1, hidden].

        Args:
            tokens: on this rank's device.
            received: hidden states of the previous pipeline stage; None on the first.
        """
        if received is None:
            hidden = self._embed(self.own_tokens(tokens.token_ids))
        else:
            hidden = received
        angles = self.angles(tokens)
        added: torch.Tensor | None = None
        for layer in self.decoder.layers:
            hidden, added = self._run(layer, hidden, added, tokens, angles)
        return hidden if added is None else hidden + added

    def _run(self, block: torch.nn.Module, *inputs: Any) -> Any:
        """A block's outputs; with activation checkpointing computed again in the backward pass, which is not counted as
        another pass through its experts."""
        if not (self.activation_checkpointing and torch.is_grad_enabled()):
            return block(*inputs)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), counting(self.routers(), on=False)

        return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    def final_norm(self) -> Any:
        """The norm after the last layer."""
        return self.decoder.final_norm

    def predictors(self, hidden: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Normed hidden states [R, hidden] of some of this rank's tokens, from the last stage's output."""
        normed: torch.Tensor = self.final_norm()(self.select(hidden, source))
        return normed

    def select(self, hidden: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """States [R, hidden] of some of this rank's tokens."""
        return self._of_all_tokens(hidden).flatten(0, 1).index_select(0, source)

    def predict_ahead(self, hidden: torch.Tensor, tokens: TokenLayout) -> Iterator[torch.Tensor]:
        """States of each depth of multi-token prediction, from the last stage's output and like it."""
        assert self.mtp is not None
        # The last norm sees all tokens, as it does where the model itself predicts: its gradients there and here are
        # then of one kind.
        normed: torch.Tensor = self.final_norm()(self._of_all_tokens(hidden))
        if self.layout.sequence_parallel:
            normed = scatter_to_sequence_parallel_region(normed)
        return self.mtp.forward(
            normed,
            lambda token_ids: self._embed(self.own_tokens(token_ids)),
            tokens,
            self.angles(tokens),
            run=self._run,
        )

    def _of_all_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """Without sequence parallelism."""
        if not self.layout.sequence_parallel:
            return hidden
        whole: torch.Tensor = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return whole

    def output_weight(self) -> torch.Tensor:
        """This rank's rows of the output layer."""
        weight: torch.Tensor = self.output_layer.weight
        return weight

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.layout.tensor == 1:
            return F.embedding(token_ids, self.embedding.word_embeddings.weight)[:, None]
        embedded: torch.Tensor = self.embedding(token_ids[None], None)
        return embedded


def own_routing(
    own: int, tokens: TokenLayout, config: TransformerConfig, mixture: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Occurrences [own] of this rank's `own` tokens, of those that all ranks share, and the experts [own, k] that the
    generator chose for them in a mixture of this number; None where they are not replayed, or it has no number."""
    place: int = parallel_state.get_context_parallel_rank()
    if config.sequence_parallel:
        place = place * parallel_state.get_tensor_model_parallel_world_size()
        place += parallel_state.get_tensor_model_parallel_rank()
    mine = slice(place * own, (place + 1) * own)
    routed = tokens.routed_experts
    return tokens.occurrences[mine], None if routed is None or mixture is None else routed[mine, mixture]


def padded_vocabulary(architecture: Architecture, layout: ParallelDims) -> int:
    """Rows of the embedding, a multiple of the tensor-parallel size."""
    return -(-architecture.vocab_size // layout.tensor) * layout.tensor


def transformer_config(architecture: Architecture, layout: ParallelDims, dtype: torch.dtype) -> TransformerConfig:
    """megatron-core's config: no dropout, no biases but QKV's, no fused kernels that exist only for CUDA."""
    gated = architecture.activation == "swiglu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about defaults of its own
        return TransformerConfig(
            num_layers=architecture.num_layers,
            hidden_size=architecture.hidden_size,
            num_attention_heads=architecture.num_attention_heads,
            num_query_groups=architecture.num_key_value_heads,
            kv_channels=architecture.head_dim,
            ffn_hidden_size=architecture.ffn_hidden_size,
            normalization="RMSNorm",
            layernorm_epsilon=architecture.norm_eps,
            qk_layernorm=architecture.qk_norm,
            add_bias_linear=False,
            add_qkv_bias=architecture.qkv_bias,
            gated_linear_unit=gated,
            activation_func=F.silu if gated else squared_relu,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            apply_rope_fusion=False,
            gradient_accumulation_fusion=False,
            perform_initialization=False,
            params_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            pipeline_dtype=dtype,
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            context_parallel_size=layout.context,
            sequence_parallel=layout.sequence_parallel,
        )
