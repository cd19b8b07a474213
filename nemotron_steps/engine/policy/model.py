"""The megatron policy's model, from flat tokens to the last hidden states. Parameters, names, tensor-parallel linears
and sharded checkpoints are megatron-core's; its forward pass takes no TokenLayout, and its hybrid model needs mamba_ssm
and CUDA."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nemotron_steps.config.layout.parallel_config import stage_layers
from nemotron_steps.engine.kernels.fused import linear
from nemotron_steps.engine.policy.distributed.parallel_dims import ParallelDims, device
from nemotron_steps.engine.policy.layers import FlatSelfAttention, Mlp, RmsNorm
from nemotron_steps.engine.policy.mamba.mixer import MambaMixer
from nemotron_steps.engine.policy.moe import MoeLayer, Router, counting
from nemotron_steps.engine.policy.token_layout import TokenLayout
from nemotron_steps.models.adapters import AdapterPair
from nemotron_steps.models.architecture import Architecture, cos_sin
from nemotron_steps.models.mapping import EXACT
from nemotron_steps.models.megatron_core import load_megatron_core, on_available_device

load_megatron_core()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.activations import squared_relu  # noqa: E402
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear  # noqa: E402
from megatron.core.tensor_parallel.mappings import (  # noqa: E402
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig  # noqa: E402

PARTS = {
    "M": ("norm", "mixer"),  # Mamba-2
    "*": ("input_layernorm", "self_attention"),
    "-": ("pre_mlp_layernorm", "mlp"),
    "E": ("pre_mlp_layernorm", "mlp"),  # experts
}
"""Letter of a mixer → names of the norm before it and of itself."""


class Layer(torch.nn.Module):
    """Mixers behind a norm each, one of a hybrid, else attention and then an MLP or experts: a letter for each. forward
    takes the residual stream and what is still to be added to it, [T, 1, hidden] each, and returns both: the last
    addition is left to the next layer's norm, or made already (None). `number` counts from 1."""

    adapted = False

    def __init__(
        self,
        config: Any,
        number: int,
        kinds: str,
        architecture: Architecture,
        layout: ParallelDims,
        freeze_router: bool,
    ) -> None:
        super().__init__()
        self.config, self.layer_number, self.kinds = config, number, kinds
        for kind in kinds:
            mixer: torch.nn.Module
            match kind:
                case "M":
                    mixer = MambaMixer(config, architecture)
                case "*":
                    mixer = FlatSelfAttention(config, number, RmsNorm if architecture.qk_norm else None)
                case "-":
                    mixer = Mlp(config, architecture.activation, architecture.ffn_hidden_size)
                case _:
                    mixer = MoeLayer(config, architecture, layout, freeze_router)
            for name, module in zip(PARTS[kind], (_stream_norm(config), mixer), strict=True):
                self.register_module(name, module)

    def forward(
        self, hidden: Tensor, added: Tensor | None, layout: TokenLayout, angles: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """See Layer."""
        # On one rank in float32 on CPU, attention and MLP are one function each with their norm.
        alone = self.config.tensor_model_parallel_size == 1 and not self.adapted and set(self.kinds) <= {"*", "-"}
        fused = alone and hidden.device.type == "cpu" and hidden.dtype is torch.float32
        for kind in self.kinds:
            norm, mixer = (getattr(self, name) for name in PARTS[kind])
            if fused:
                hidden = mixer.after_norm(hidden if added is None else hidden + added, norm, layout, angles)
                added = None
            else:
                hidden, normed = norm.after_adding(hidden, added)
                added = mixer(normed, layout, angles)
        return hidden, added


def _stream_norm(config: Any) -> RmsNorm:
    return RmsNorm(config, config.hidden_size, config.layernorm_epsilon)


class PredictionBlock(torch.nn.Module):
    """One block of multi-token prediction (DeepSeek-V3, arXiv 2412.19437), under megatron-core's names.

    h_i^k    = block(eh_proj · [enorm(embedding of t_{i+k}), hnorm(h_i^{k−1})]),  h^0 after the last norm
    """

    def __init__(self, config: Any, layers: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layernorm_epsilon
        self.enorm, self.hnorm = RmsNorm(config, width, eps), RmsNorm(config, width, eps)
        # Every tensor-parallel rank has all of it: next to the layers it is little.
        self.eh_proj = torch.nn.Linear(2 * width, width, bias=False, device=device(), dtype=config.params_dtype)
        self.mtp_model_layer = torch.nn.Module()
        self.mtp_model_layer.layers = torch.nn.ModuleList(layers)
        self.final_layernorm = RmsNorm(config, width, eps)

    def forward(self, hidden: Tensor, embedded: Tensor, layout: TokenLayout, angles: Tensor) -> Tensor:
        """States of the depth before and embeddings of the tokens ahead → states of this depth."""
        states = linear(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1), self.eh_proj.weight)
        added: Tensor | None = None
        for layer in self.inner_layers():
            states, added = layer(states, added, layout, angles)
        return self.final_layernorm.after_adding(states, added)[1]

    def inner_layers(self) -> Iterator[Any]:
        """Its layers of the hybrid pattern."""
        yield from self.mtp_model_layer.layers  # type: ignore[misc]


class MultiTokenPrediction(torch.nn.Module):
    """One block for each depth, or one for all; `detach`: the model gets no gradient."""

    def __init__(self, blocks: Sequence[PredictionBlock], *, detach: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(blocks)
        self.detach = detach

    def inner_layers(self) -> Iterator[Any]:
        """The layers of all blocks."""
        for block in self.layers:
            assert isinstance(block, PredictionBlock)
            yield from block.inner_layers()

    def forward(
        self,
        hidden: Tensor,
        embed: Callable[[Tensor], Tensor],
        layout: TokenLayout,
        angles: Tensor,
        *,
        run: Callable[..., Tensor],
    ) -> Iterator[Tensor]:
        """States [T, 1, hidden] of each depth, from those after the last norm."""
        if self.detach:
            hidden = hidden.detach()
        for depth, ahead in enumerate(layout.ahead):
            embedded = embed(ahead.token_ids)
            if self.detach:
                embedded = embedded.detach()
            block = self.layers[depth % len(self.layers)]
            hidden = run(block, hidden, embedded, layout, angles)
            yield hidden


class PolicyModel(torch.nn.Module):
    """This rank's part of the model over flat tokens, up to the last hidden states."""

    embedding: Any
    output_layer: Any
    mtp: MultiTokenPrediction | None

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
        self.architecture, self.layout, self.dtype = architecture, layout, dtype
        self.activation_checkpointing, self.freeze_router = activation_checkpointing, freeze_router
        self.adapters: tuple[AdapterPair, ...] = ()
        self.adapter_scale = 0.0
        self.context_group = parallel_state.get_context_parallel_group() if layout.context > 1 else None
        first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        with on_available_device():
            self._build(transformer_config(architecture, layout, dtype), first, last, detach_mtp)
        for layer in self.decoder.layers:
            if isinstance(experts := getattr(layer, "mlp", None), MoeLayer):
                experts.number = architecture.mixtures.index(layer.layer_number - 1)
        self._angles = torch.empty(2, 0, 1, 1, architecture.head_dim, dtype=dtype, device=device())

    def _build(self, config: TransformerConfig, first: bool, last: bool, detach_mtp: bool) -> None:
        architecture, layout = self.architecture, self.layout
        ranks = parallel_state.get_tensor_model_parallel_group()
        vocabulary = -(-architecture.vocab_size // layout.tensor) * layout.tensor  # a multiple of the ranks
        predicts = architecture.trains_mtp and last
        self._tied_here = architecture.tied_embeddings and first
        if first or predicts:
            self.embedding = LanguageModelEmbedding(
                config=config,
                vocab_size=vocabulary,
                max_sequence_length=architecture.max_position_embeddings,
                position_embedding_type="none",
                scatter_to_sequence_parallel=layout.sequence_parallel,
                tp_group=ranks,
            )
        stage = parallel_state.get_pipeline_model_parallel_rank()
        layers = torch.nn.ModuleList()
        for layer in stage_layers(architecture.num_layers, layout.pipeline)[stage]:
            plain = "*E" if architecture.is_moe else "*-"
            kinds = architecture.pattern[layer] if architecture.is_hybrid else plain
            layers.append(Layer(config, layer + 1, kinds, architecture, layout, self.freeze_router))
        self.decoder: Any = torch.nn.Module()
        self.decoder.layers = layers
        self._last_norm = "final_norm" if architecture.is_hybrid else "final_layernorm"
        if last:
            self.decoder.register_module(self._last_norm, _stream_norm(config))
        if last and not self._tied_here:
            init = config.init_method
            self.output_layer = ColumnParallelLinear(
                config.hidden_size, vocabulary, config=config, init_method=init, bias=False, tp_group=ranks
            )
        self.mtp = None
        if predicts:
            blocks, number = [], architecture.num_layers
            for _ in range(architecture.mtp_layers):
                ahead = enumerate(architecture.mtp_pattern, start=number + 1)
                inner = [Layer(config, at, kind, architecture, layout, False) for at, kind in ahead]
                blocks.append(PredictionBlock(config, inner))
                number += len(architecture.mtp_pattern)
            self.mtp = MultiTokenPrediction(blocks, detach=detach_mtp)

    def forward(self, tokens: TokenLayout, received: Tensor | None = None) -> Tensor:
        """Hidden states after this rank's layers, before the final norm: [T, 1, hidden]."""
        hidden = self._embed(tokens.token_ids) if received is None else received
        angles = self.angles(tokens)
        added: Tensor | None = None
        for layer in self.decoder.layers:
            hidden, added = self._run(layer, hidden, added, tokens, angles)
        return hidden if added is None else hidden + added

    def _run(self, block: torch.nn.Module, *inputs: Any) -> Any:
        """With activation checkpointing computed again, which counts no experts."""
        if not (self.activation_checkpointing and torch.is_grad_enabled()):
            return block(*inputs)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), counting(self.routers(), on=False)

        return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    def predictors(self, hidden: Tensor, source: Tensor) -> Tensor:
        """Normed hidden states [R, hidden] of some of this rank's tokens."""
        return self._final_norm(self.select(hidden, source))

    def select(self, hidden: Tensor, source: Tensor) -> Tensor:
        """States [R, hidden] of some of this rank's tokens."""
        return self._of_all_tokens(hidden).flatten(0, 1).index_select(0, source)

    def predict_ahead(self, hidden: Tensor, tokens: TokenLayout) -> Iterator[Tensor]:
        """States of each depth of multi-token prediction."""
        assert self.mtp is not None
        # The last norm sees all tokens, as it does where the model itself predicts: its gradients there and here are
        # then of one kind.
        normed = self._final_norm(self._of_all_tokens(hidden))
        if self.layout.sequence_parallel:
            normed = scatter_to_sequence_parallel_region(normed)
        return self.mtp.forward(normed, self._embed, tokens, self.angles(tokens), run=self._run)

    def output_weight(self) -> Tensor:
        """This rank's rows of the output layer."""
        return (self.embedding.word_embeddings if self._tied_here else self.output_layer).weight

    def parameter_dtype(self, name: str) -> torch.dtype:
        """Type a parameter is kept in, by its name in the whole model."""
        frozen = self.freeze_router and name.startswith("decoder.") and name.endswith(".router.weight")
        return torch.float32 if name.endswith(EXACT) or frozen else self.dtype

    def routers(self) -> list[Router]:
        """Routers of this rank's layers."""
        ahead = list(self.mtp.inner_layers()) if self.mtp is not None else []
        mlps = [getattr(layer, "mlp", None) for layer in [*self.decoder.layers, *ahead]]
        return [mlp.router for mlp in mlps if isinstance(mlp, MoeLayer)]

    def own_tokens(self, values: Tensor) -> Tensor:
        """This context-parallel rank's share of token-aligned values [T, …]."""
        if self.context_group is None:
            return values
        return values.chunk(self.layout.context)[parallel_state.get_context_parallel_rank()]

    def angles(self, tokens: TokenLayout) -> Tensor:
        """Cosines and sines of the tokens' positions, [2, T, 1, 1, head_dim]."""
        architecture = self.architecture
        longest = tokens.shape[1] if architecture.rotary else 1
        if self._angles.shape[1] < longest:
            if architecture.rotary:
                length = max(longest, min(2 * longest, architecture.max_position_embeddings))
                table = torch.stack(cos_sin(architecture, length))[:, :, None, None]
            else:
                table = torch.tensor([1.0, 0.0])[:, None, None, None, None].expand(2, 1, 1, 1, architecture.head_dim)
            self._angles = table.to(device=device(), dtype=self.dtype)
        positions = tokens.positions if architecture.rotary else torch.zeros_like(tokens.positions)
        return self._angles.index_select(1, self.own_tokens(positions))

    def _final_norm(self, states: Tensor) -> Tensor:
        return getattr(self.decoder, self._last_norm)(states)

    def _of_all_tokens(self, hidden: Tensor) -> Tensor:
        if not self.layout.sequence_parallel:
            return hidden
        return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Token ids [T] of the whole layout → embeddings of this rank's share of them."""
        own = self.own_tokens(token_ids)
        if self.layout.tensor == 1:
            return F.embedding(own, self.embedding.word_embeddings.weight)[:, None]
        return self.embedding(own[None], None)


def transformer_config(architecture: Architecture, layout: ParallelDims, dtype: torch.dtype) -> TransformerConfig:
    """megatron-core's config: no dropout, no biases but QKV's, no fused kernels."""
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
            perform_initialization=False,
            params_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            pipeline_dtype=dtype,
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            context_parallel_size=layout.context,
            sequence_parallel=layout.sequence_parallel,
        )
