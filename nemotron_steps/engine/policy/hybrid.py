"""Hybrid models (Nemotron-H): every layer one mixer behind one norm, of the kind that the pattern names.

    M   Mamba-2               *   attention without positions
    E   experts               -   an MLP

megatron-core's own hybrid model needs mamba_ssm and CUDA. This one has its names and its tensor-parallel linears, and
pipeline stages of unequal length.
"""

from __future__ import annotations

from typing import Any

import torch

from nemotron_steps.config.layout.parallel_config import stage_layers
from nemotron_steps.engine.policy.attention.attention import FlatAttention, FlatSelfAttention
from nemotron_steps.engine.policy.flat_model import FlatModel, own_routing, padded_vocabulary, transformer_config
from nemotron_steps.engine.policy.kernels.feed_forward import feed_forward
from nemotron_steps.engine.policy.mamba.mixer import FlatMamba
from nemotron_steps.engine.policy.mlp import FlatMlp
from nemotron_steps.engine.policy.moe.mixture import FlatMoe
from nemotron_steps.engine.policy.multi_token_prediction import MultiTokenPrediction, PredictionBlock
from nemotron_steps.engine.policy.norm import RmsNorm
from nemotron_steps.engine.policy.parallel_dims import ParallelDims
from nemotron_steps.engine.policy.token_layout import TokenLayout
from nemotron_steps.models.architecture import Architecture
from nemotron_steps.models.megatron_core import load_megatron_core, on_available_device

load_megatron_core()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer.attention import SelfAttentionSubmodules  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402


class HybridLayer(torch.nn.Module):
    """A norm, a mixer and the residual stream around them.

    Args:
        config: megatron-core's.
        number: of the layer in the whole model, from 1.
        norm: the norm's name, as megatron-core has it for this kind of layer.
    """

    adapted = False
    """As FlatLayer's."""

    def __init__(self, config: Any, number: int, norm: str) -> None:
        super().__init__()
        self.config, self.layer_number, self._norm = config, number, norm
        self.register_module(norm, RmsNorm(config, config.hidden_size, config.layernorm_epsilon))

    def forward(
        self, hidden: torch.Tensor, added: torch.Tensor | None, layout: TokenLayout, angles: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Residual stream and what is still to be added to it, [T, 1, hidden] each → the same after this layer.

        The last addition is left to the next layer, where it shares a pass over memory with the norm, or is already
        made by the last product (None).
        """
        norm: RmsNorm = getattr(self, self._norm)
        if self._is_plain(hidden):
            return self.after_norm(hidden if added is None else hidden + added, norm, layout, angles)
        if added is None:
            normed = norm(hidden)
        else:
            hidden, normed = norm.after_adding(hidden, added)
        return hidden, self.mix(normed, layout, angles)

    def mix(self, normed: torch.Tensor, layout: TokenLayout, angles: torch.Tensor) -> torch.Tensor:
        """What the mixer makes of normed states, [T, 1, hidden] → the same shape."""
        raise NotImplementedError

    def after_norm(
        self, hidden: torch.Tensor, norm: RmsNorm, layout: TokenLayout, angles: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`forward` with everything added, on one tensor-parallel rank, in float32 on CPU: where a kind of layer is
        faster as one function."""
        return hidden, self.mix(norm(hidden), layout, angles)

    def _is_plain(self, hidden: torch.Tensor) -> bool:
        alone = self.config.tensor_model_parallel_size == 1
        return alone and hidden.device.type == "cpu" and hidden.dtype is torch.float32 and not self.adapted


class MambaLayer(HybridLayer):
    """M: a Mamba-2 mixer."""

    def __init__(self, config: Any, number: int, architecture: Architecture) -> None:
        super().__init__(config, number, "norm")
        self.mixer = FlatMamba(config, architecture)

    def mix(self, normed: torch.Tensor, layout: TokenLayout, angles: torch.Tensor) -> torch.Tensor:
        """See HybridLayer."""
        return self.mixer.forward(normed, layout)


class AttentionLayer(HybridLayer):
    """*: attention without positions."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__(config, number, "input_layernorm")
        self.self_attention = FlatSelfAttention(
            config=config,
            submodules=SelfAttentionSubmodules(
                linear_qkv=ColumnParallelLinear,
                core_attention=FlatAttention,
                linear_proj=RowParallelLinear,
                q_layernorm=IdentityOp,
                k_layernorm=IdentityOp,
            ),
            layer_number=number,
            attn_mask_type=AttnMaskType.causal,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"]),
        )

    def mix(self, normed: torch.Tensor, layout: TokenLayout, angles: torch.Tensor) -> torch.Tensor:
        """See HybridLayer."""
        return self.self_attention.forward(normed, layout, angles)

    def after_norm(
        self, hidden: torch.Tensor, norm: RmsNorm, layout: TokenLayout, angles: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See HybridLayer."""
        return self.self_attention.after_norm(hidden, norm, layout, angles), None


class MlpLayer(HybridLayer):
    """-: an MLP."""

    def __init__(self, config: Any, number: int, architecture: Architecture) -> None:
        super().__init__(config, number, "pre_mlp_layernorm")
        self.mlp = FlatMlp(config, architecture.activation, architecture.ffn_hidden_size)

    def mix(self, normed: torch.Tensor, layout: TokenLayout, angles: torch.Tensor) -> torch.Tensor:
        """See HybridLayer."""
        return self.mlp.forward(normed)

    def after_norm(
        self, hidden: torch.Tensor, norm: RmsNorm, layout: TokenLayout, angles: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See HybridLayer."""
        up, down = self.mlp.linear_fc1.weight, self.mlp.linear_fc2.weight
        assert norm.eps is not None
        return feed_forward(hidden, norm.weight, up, down, norm.eps, gated=self.mlp.gated), None


class MoeLayer(HybridLayer):
    """E: experts."""

    def __init__(
        self, config: Any, number: int, architecture: Architecture, layout: ParallelDims, freeze_router: bool
    ) -> None:
        super().__init__(config, number, "pre_mlp_layernorm")
        self.mlp = FlatMoe(config, architecture, layout, freeze_router)

    def mix(self, normed: torch.Tensor, layout: TokenLayout, angles: torch.Tensor) -> torch.Tensor:
        """See HybridLayer."""
        return self.mlp.forward(normed, *own_routing(normed.shape[0], layout, self.config, self.mlp.number))


def _layer(
    config: Any, number: int, kind: str, architecture: Architecture, layout: ParallelDims, *, freeze_router: bool
) -> HybridLayer:
    """The layer that a letter of the pattern stands for."""
    match kind:
        case "M":
            return MambaLayer(config, number, architecture)
        case "*":
            return AttentionLayer(config, number)
        case "-":
            return MlpLayer(config, number, architecture)
        case _:
            return MoeLayer(config, number, architecture, layout, freeze_router)


def _prediction(config: Any, architecture: Architecture, layout: ParallelDims, *, detach: bool) -> MultiTokenPrediction:
    """The blocks of multi-token prediction, with numbers of layers after the model's. Nothing generates with their
    routers, so they are trained even where the model's are frozen, as NeMo-RL has it."""
    blocks, number = [], architecture.num_layers
    for _ in range(architecture.mtp_layers):
        layers = []
        for kind in architecture.mtp_pattern:
            number += 1
            layers.append(_layer(config, number, kind, architecture, layout, freeze_router=False))
        blocks.append(PredictionBlock(config, layers))
    return MultiTokenPrediction(blocks, detach=detach)


class HybridDecoder(torch.nn.Module):
    """This pipeline stage's layers, and the last norm on the last one."""

    def __init__(self, config: Any, architecture: Architecture, layout: ParallelDims, *, freeze_router: bool) -> None:
        super().__init__()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        own = stage_layers(architecture.num_layers, layout.pipeline)[stage]
        self.layers = torch.nn.ModuleList(
            _layer(config, layer + 1, architecture.pattern[layer], architecture, layout, freeze_router=freeze_router)
            for layer in own
        )
        if parallel_state.is_pipeline_last_stage():
            self.final_norm = RmsNorm(config, config.hidden_size, config.layernorm_epsilon)


class HybridModel(FlatModel):
    """Embedding, layers of the pattern and output layer, over flat tokens."""

    def __init__(
        self,
        architecture: Architecture,
        layout: ParallelDims,
        dtype: torch.dtype,
        *,
        activation_checkpointing: bool = False,
        freeze_router: bool = False,
        detach_mtp: bool = False,
    ) -> None:
        super().__init__()
        ranks = parallel_state.get_tensor_model_parallel_group()
        rows = padded_vocabulary(architecture, layout)
        with on_available_device():
            config = transformer_config(architecture, layout, dtype)
            predicts = architecture.trains_mtp and parallel_state.is_pipeline_last_stage()
            if parallel_state.is_pipeline_first_stage() or predicts:
                self.embedding = LanguageModelEmbedding(
                    config=config,
                    vocab_size=rows,
                    max_sequence_length=architecture.max_position_embeddings,
                    position_embedding_type="none",
                    scatter_to_sequence_parallel=layout.sequence_parallel,
                    tp_group=ranks,
                )
            self.decoder = HybridDecoder(config, architecture, layout, freeze_router=freeze_router)
            if parallel_state.is_pipeline_last_stage():
                self.output_layer = ColumnParallelLinear(
                    config.hidden_size, rows, config=config, init_method=config.init_method, bias=False, tp_group=ranks
                )
            if predicts:
                self.mtp = _prediction(config, architecture, layout, detach=detach_mtp)
        self.finish(
            architecture,
            layout,
            dtype,
            activation_checkpointing=activation_checkpointing,
            freeze_router=freeze_router,
        )
