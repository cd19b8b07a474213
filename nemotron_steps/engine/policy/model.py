"""megatron-core's GPTModel over flat tokens: every layer attention, then an MLP or experts (see flat_model.py)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nemotron_steps.engine.policy.attention.attention import FlatAttention, FlatSelfAttention, column_linear, row_linear
from nemotron_steps.engine.policy.flat_model import FlatModel, own_routing, padded_vocabulary, transformer_config
from nemotron_steps.engine.policy.kernels.feed_forward import feed_forward
from nemotron_steps.engine.policy.kernels.fused import swiglu
from nemotron_steps.engine.policy.moe.mixture import FlatMoe
from nemotron_steps.engine.policy.norm import RmsNorm
from nemotron_steps.engine.policy.parallel_dims import ParallelDims
from nemotron_steps.engine.policy.token_layout import TokenLayout
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.megatron_core import load_megatron_core, on_available_device

load_megatron_core()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer import ModuleSpec  # noqa: E402
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


class FlatLayer(TransformerLayer):  # type: ignore[misc]
    """One transformer layer over flat tokens."""

    adapted = False
    """Whether any of its linears has an adapter: those are not among what is computed as one function."""

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
            return hidden, self.mlp.forward(normed, *own_routing(normed.shape[0], layout, self.config, self.mlp.number))
        return hidden, row_linear(self.mlp.linear_fc2, swiglu(column_linear(self.mlp.linear_fc1, normed)))

    def _plain(self, hidden: torch.Tensor, layout: TokenLayout, angles: torch.Tensor) -> torch.Tensor:
        hidden = self.self_attention.after_norm(hidden, self.input_layernorm, layout, angles)
        norm, up, down = self.pre_mlp_layernorm, self.mlp.linear_fc1, self.mlp.linear_fc2
        return feed_forward(hidden, norm.weight, up.weight, down.weight, norm.eps)

    def _is_plain(self, hidden: torch.Tensor) -> bool:
        """Whether this is a dense layer on one rank, in float32 on CPU."""
        on_cpu = hidden.device.type == "cpu" and hidden.dtype is torch.float32
        dense = not isinstance(self.mlp, FlatMoe) and self.mlp.linear_fc1.tp_group.size() == 1
        return on_cpu and dense and not self.adapted


class PolicyModel(FlatModel, GPTModel):  # type: ignore[misc]
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
        with on_available_device(), _quiet_logger("megatron.core.transformer.transformer_layer"):
            super().__init__(
                config=transformer_config(architecture, layout, dtype),
                transformer_layer_spec=block_spec(architecture, layout, freeze_router=freeze_router),
                vocab_size=padded_vocabulary(architecture, layout),
                max_sequence_length=architecture.max_position_embeddings,
                pre_process=parallel_state.is_pipeline_first_stage(),
                post_process=parallel_state.is_pipeline_last_stage(),
                share_embeddings_and_output_weights=architecture.tied_embeddings,
                position_embedding_type="none",
                scatter_embedding_sequence_parallel=layout.sequence_parallel,
            )
        self.finish(
            architecture,
            layout,
            dtype,
            activation_checkpointing=activation_checkpointing,
            freeze_router=freeze_router,
        )

    def setup_embeddings_and_output_layer(self) -> None:
        """Nothing: weights are always loaded, on the last stage the tied embedding as well."""

    def final_norm(self) -> Any:
        """The norm after the last layer."""
        return self.decoder.final_layernorm

    def output_weight(self) -> torch.Tensor:
        """This rank's rows of the output layer."""
        tied_here = self.share_embeddings_and_output_weights and self.pre_process
        weight: torch.Tensor = (self.embedding.word_embeddings if tied_here else self.output_layer).weight
        return weight


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
