"""megatron-core's GPTModel, built from an Architecture and run over flat tokens.

Parameters, their names, their tensor-parallel linears and their sharded checkpoints are megatron-core's. The forward
pass is written out here because it takes a TokenLayout and ends at hidden states: the output layer belongs to
logprob.py.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from nemotron_steps.engine.policy.attention.attention import FlatAttention, FlatSelfAttention, column_linear, row_linear
from nemotron_steps.engine.policy.kernels.feed_forward import feed_forward
from nemotron_steps.engine.policy.kernels.fused import add_rms_norm, rms_norm, swiglu
from nemotron_steps.engine.policy.moe.mixture import FlatMoe
from nemotron_steps.engine.policy.moe.router import Router
from nemotron_steps.engine.policy.parallel_dims import ParallelDims, device
from nemotron_steps.engine.policy.token_layout import TokenLayout
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.megatron_core import load_megatron_core, on_available_device
from nemotron_steps.models.rope import cos_sin

load_megatron_core()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region  # noqa: E402
from megatron.core.transformer import ModuleSpec, TransformerConfig  # noqa: E402
from megatron.core.transformer.attention import SelfAttentionSubmodules  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.mlp import MLP, MLPSubmodules  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules  # noqa: E402


@contextmanager
def _quiet_logger(name: str) -> Iterator[None]:
    """Without warnings of one of megatron-core's loggers (it comments on layers it does not know)."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class RmsNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor megatron-core's specs call."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=device(), dtype=config.params_dtype)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[…, hidden_size] → the same shape."""
        assert self.eps is not None
        return rms_norm(states, self.weight, self.eps)

    def after_adding(self, states: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """states + added, and its norm."""
        assert self.eps is not None
        return add_rms_norm(states, added, self.weight, self.eps)


class FlatLayer(TransformerLayer):  # type: ignore[misc]
    """One transformer layer over flat tokens."""

    def forward(  # type: ignore[override]
        self, hidden: torch.Tensor, added: torch.Tensor | None, layout: TokenLayout, angles: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Residual stream and what is still to be added to it, [T, 1, hidden] each → the same after this layer.

        The last addition is left to the next layer, where it shares a pass over memory with the norm, or is already
        made by the last product (None).
        """
        if self._is_plain(hidden):
            return self._plain(hidden if added is None else hidden + added, layout, angles), None
        if added is None:
            normed = self.input_layernorm(hidden)
        else:
            hidden, normed = self.input_layernorm.after_adding(hidden, added)
        attended = self.self_attention(normed, layout, angles)
        hidden, normed = self.pre_mlp_layernorm.after_adding(hidden, attended)
        if isinstance(self.mlp, FlatMoe):
            return hidden, self.mlp.forward(normed, self._own_occurrences(normed.shape[0], layout))
        return hidden, row_linear(self.mlp.linear_fc2, swiglu(column_linear(self.mlp.linear_fc1, normed)))

    def _own_occurrences(self, own: int, layout: TokenLayout) -> torch.Tensor:
        """Occurrences of this rank's `own` tokens, of those that all ranks share."""
        place: int = parallel_state.get_context_parallel_rank()
        if self.config.sequence_parallel:
            place = place * parallel_state.get_tensor_model_parallel_world_size()
            place += parallel_state.get_tensor_model_parallel_rank()
        return layout.occurrences[place * own : (place + 1) * own]

    def _plain(self, hidden: torch.Tensor, layout: TokenLayout, angles: torch.Tensor) -> torch.Tensor:
        hidden = self.self_attention.after_norm(hidden, self.input_layernorm, layout, angles)
        norm, up, down = self.pre_mlp_layernorm, self.mlp.linear_fc1, self.mlp.linear_fc2
        return feed_forward(hidden, norm.weight, up.weight, down.weight, norm.eps)

    def _is_plain(self, hidden: torch.Tensor) -> bool:
        """Whether this is a dense layer on one rank, in float32 on CPU."""
        on_cpu = hidden.device.type == "cpu" and hidden.dtype is torch.float32
        return on_cpu and not isinstance(self.mlp, FlatMoe) and self.mlp.linear_fc1.tp_group.size() == 1


class PolicyModel(GPTModel):  # type: ignore[misc]
    """GPTModel over flat tokens, up to the last hidden states."""

    def __init__(
        self,
        architecture: Architecture,
        layout: ParallelDims,
        dtype: torch.dtype,
        *,
        activation_checkpointing: bool = False,
        freeze_router: bool = False,
    ) -> None:
        self.architecture = architecture
        self.layout = layout
        self.freeze_router = freeze_router
        with on_available_device(), _quiet_logger("megatron.core.transformer.transformer_layer"):
            super().__init__(
                config=transformer_config(architecture, layout, dtype),
                transformer_layer_spec=block_spec(architecture, layout, freeze_router=freeze_router),
                vocab_size=-(-architecture.vocab_size // layout.tensor) * layout.tensor,
                max_sequence_length=architecture.max_position_embeddings,
                pre_process=parallel_state.is_pipeline_first_stage(),
                post_process=parallel_state.is_pipeline_last_stage(),
                share_embeddings_and_output_weights=architecture.tied_embeddings,
                position_embedding_type="none",
                scatter_embedding_sequence_parallel=layout.sequence_parallel,
            )
        self.activation_checkpointing = activation_checkpointing
        self.dtype = dtype
        self.context_group = parallel_state.get_context_parallel_group() if layout.context > 1 else None
        self._angles = torch.empty(2, 0, 1, 1, architecture.head_dim, dtype=dtype, device=device())

    def setup_embeddings_and_output_layer(self) -> None:
        """Nothing: weights are always loaded, on the last stage the tied embedding as well."""

    def angles(self, tokens: TokenLayout) -> torch.Tensor:
        """Cosines and sines of the tokens' positions, [2, T, 1, 1, head_dim]."""
        longest = tokens.shape[1]
        if self._angles.shape[1] < longest:
            length = max(longest, min(2 * longest, self.architecture.max_position_embeddings))
            table = torch.stack(cos_sin(self.architecture, length))[:, :, None, None]
            self._angles = table.to(device=device(), dtype=self.dtype)
        angles: torch.Tensor = self._angles.index_select(1, self.own_tokens(tokens.positions))
        return angles

    def own_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """This context-parallel rank's share of token-aligned values [T, …]."""
        if self.context_group is None:
            return values
        rank: int = parallel_state.get_context_parallel_rank()
        return values.chunk(self.layout.context)[rank]

    def parameter_dtype(self, name: str) -> torch.dtype:
        """Type a parameter is kept in, by its name in the whole model."""
        exact = name.endswith(".expert_bias") or (self.freeze_router and name.endswith(".router.weight"))
        return torch.float32 if exact else self.dtype

    def routers(self) -> list[Router]:
        """Routers of this rank's layers."""
        mixtures = [layer.mlp for layer in self.decoder.layers if isinstance(layer.mlp, FlatMoe)]
        return [mixture.router for mixture in mixtures]

    def forward(self, tokens: TokenLayout, received: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
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
        recompute = self.activation_checkpointing and torch.is_grad_enabled()
        added: torch.Tensor | None = None
        for layer in self.decoder.layers:
            run = partial(checkpoint, layer, use_reentrant=False, preserve_rng_state=False) if recompute else layer
            hidden, added = run(hidden, added, tokens, angles)
        return hidden if added is None else hidden + added

    def predictors(self, hidden: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Normed hidden states [R, hidden] of some of this rank's tokens, from the last stage's output."""
        if self.layout.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        normed: torch.Tensor = self.decoder.final_layernorm(hidden.flatten(0, 1).index_select(0, source))
        return normed

    def output_weight(self) -> torch.Tensor:
        """This rank's rows of the output layer."""
        if self.share_embeddings_and_output_weights:
            shared: torch.Tensor = self.shared_embedding_or_output_weight()
            return shared
        weight: torch.Tensor = self.output_layer.weight
        return weight

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.layout.tensor == 1:
            return F.embedding(token_ids, self.embedding.word_embeddings.weight)[:, None]
        embedded: torch.Tensor = self.embedding(token_ids[None], None)
        return embedded


def transformer_config(architecture: Architecture, layout: ParallelDims, dtype: torch.dtype) -> TransformerConfig:
    """megatron-core's config: no dropout, no biases but QKV's, no fused kernels that exist only for CUDA."""
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
            gated_linear_unit=True,
            activation_func=F.silu,
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


def block_spec(architecture: Architecture, layout: ParallelDims, *, freeze_router: bool) -> TransformerBlockSubmodules:
    """This pipeline stage's layers: megatron-core's linears, our norm and attention."""
    if architecture.is_moe:
        mlp = ModuleSpec(
            module=FlatMoe,
            params={"architecture": architecture, "layout": layout, "freeze_router": freeze_router},
        )
    else:
        mlp = ModuleSpec(
            module=MLP,
            params={"ffn_hidden_size": architecture.ffn_hidden_size},
            submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        )
    qk_norm = RmsNorm if architecture.qk_norm else IdentityOp
    layer = ModuleSpec(
        module=FlatLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RmsNorm,
            self_attention=ModuleSpec(
                module=FlatSelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=FlatAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=qk_norm,
                    k_layernorm=qk_norm,
                ),
            ),
            pre_mlp_layernorm=RmsNorm,
            mlp=mlp,
        ),
    )
    per_stage = architecture.num_layers // layout.pipeline
    return TransformerBlockSubmodules(layer_specs=[layer] * per_stage, layer_norm=RmsNorm)
