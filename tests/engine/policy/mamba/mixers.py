"""A mixer of transformers, ours with its weights, and ours cut over two ranks."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from nemotron_steps.engine.policy.distributed.parallel_dims import ParallelDims, initialize
from nemotron_steps.engine.policy.token_layout import TokenLayout, build_layout
from nemotron_steps.models.architecture import Architecture, Mamba2
from tests.engine.policy.batches import grouped_batch

HIDDEN, HEADS, HEAD_DIM, STATE, EPS = 24, 8, 12, 5, 1e-5
MODELS = {"two groups": 2, "four groups": 4}
CASES = {
    "tensor": ("two groups", ParallelDims(tensor=2)),
    "tensor, sequence": ("four groups", ParallelDims(tensor=2, sequence_parallel=True)),
    "context": ("two groups", ParallelDims(context=2)),
}
"""Layouts of two ranks: model and sizes. Of four, tests/engine/policy/ranks.py has whole models."""


def architecture(groups: int, **changes: Any) -> Architecture:
    sizes: dict[str, Any] = {"num_heads": HEADS, "head_dim": HEAD_DIM, "state_size": STATE, "num_groups": groups}
    return Architecture(
        family="nemotron_h",
        hidden_size=HIDDEN,
        num_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        ffn_hidden_size=32,
        vocab_size=200,
        rope_theta=1e4,
        norm_eps=EPS,
        max_position_embeddings=256,
        pattern="M",
        mamba=Mamba2(**{**sizes, "conv_kernel": 4, "chunk_size": 8, **changes}),
    )


def transformers_mixer(groups: int):
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

    config = NemotronHConfig(
        hidden_size=HIDDEN,
        layers_block_type=["linear_attention"],
        mamba_num_heads=HEADS,
        mamba_head_dim=HEAD_DIM,
        ssm_state_size=STATE,
        n_groups=groups,
        conv_kernel=4,
        chunk_size=8,
        layer_norm_epsilon=EPS,
        time_step_min=0.0,
    )
    mixer = NemotronHMamba2Mixer(config, 0)
    generator = torch.Generator().manual_seed(groups)
    for parameter in mixer.parameters():
        scale = 0.3 if parameter.dim() > 1 else 1.0
        parameter.data = scale * torch.randn(parameter.shape, generator=generator)
    return mixer


def flat_mixer(groups: int, dims: ParallelDims | None = None, dtype: torch.dtype = torch.float32, **changes: Any):
    """Ours, without weights."""
    from megatron.core.transformer import TransformerConfig

    from nemotron_steps.engine.policy.mamba.mixer import MambaMixer
    from nemotron_steps.models.megatron_core import on_available_device

    dims = dims or ParallelDims()
    initialize(dims)
    with warnings.catch_warnings(), on_available_device():
        warnings.simplefilter("ignore")
        config = TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=4,
            perform_initialization=False,
            params_dtype=dtype,
            tensor_model_parallel_size=dims.tensor,
            context_parallel_size=dims.context,
            sequence_parallel=dims.sequence_parallel,
        )
        return MambaMixer(config, architecture(groups, **changes))


def cut(name: str, tensor: torch.Tensor, groups: int, rank: int, ranks: int) -> torch.Tensor:
    """A tensor-parallel rank's share of a parameter."""
    inner, shared = HEADS * HEAD_DIM, groups * STATE
    parts = {"in_proj.weight": [inner, inner, shared, shared, HEADS]}.get(name, [inner, shared, shared])
    if name.startswith(("in_proj", "conv1d")):
        return torch.cat([part.chunk(ranks)[rank] for part in torch.split(tensor, parts)])
    return tensor.chunk(ranks, dim=1 if name == "out_proj.weight" else 0)[rank]


def inputs(layout: TokenLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of all tokens, and the gradient of what comes out."""
    generator = torch.Generator().manual_seed(5)
    shape = (layout.token_ids.shape[0], 1, HIDDEN)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def run_mixer(mixer, hidden: torch.Tensor, upstream: torch.Tensor, layout: TokenLayout) -> dict[str, torch.Tensor]:
    """Output, and gradients of the input and of every parameter."""
    from nemotron_steps.models.megatron_core import on_available_device

    hidden = hidden.clone().requires_grad_()
    names, parameters = zip(*mixer.named_parameters(), strict=True)
    with on_available_device():
        out = mixer(hidden, layout)
        grads = torch.autograd.grad((out * upstream).sum(), [hidden, *parameters])
    return {"out": out.detach(), **dict(zip(("hidden", *names), grads, strict=True))}


def whole_layout(divisible_by: int = 8) -> TokenLayout:
    return build_layout(grouped_batch(), range(12), divisible_by=divisible_by)


def scenarios(ranks: int, folders: dict[str, Path], out: Path) -> dict[str, Any]:
    """Every layout's output and gradients, put together on rank 0."""
    from megatron.core import parallel_state as state

    layout = whole_layout()
    for case, (model, dims) in CASES.items():
        groups = MODELS[model]
        mixer = flat_mixer(groups, dims)
        tensor, context = state.get_tensor_model_parallel_rank(), state.get_context_parallel_rank()
        for name, parameter in transformers_mixer(groups).named_parameters():
            mixer.get_parameter(name).data = cut(name, parameter.data, groups, tensor, dims.tensor).contiguous()
        own = [tokens.chunk(dims.context)[context] for tokens in inputs(layout)]
        if dims.sequence_parallel:
            own = [tokens.chunk(dims.tensor)[tensor] for tokens in own]
        found = run_mixer(mixer, own[0], own[1], layout)
        gathered: list[Any] = [None] * ranks
        dist.all_gather_object(gathered, (context, tensor, found))
        if dist.get_rank():
            continue
        places = {(context, tensor): found for context, tensor, found in gathered}
        whole: dict[str, torch.Tensor] = {}
        for name in found:
            # [context][tensor]
            parts = [[places[c, t][name] for t in range(dims.tensor)] for c in range(dims.context)]
            if name in ("out", "hidden"):
                own_tokens = [torch.cat(row) if dims.sequence_parallel else row[0] for row in parts]
                whole[name] = torch.cat(own_tokens)
            else:
                for t in range(dims.tensor):
                    whole[f"{name} {t}"] = torch.stack([row[t] for row in parts]).sum(0)
        save_file({name: value.contiguous() for name, value in whole.items()}, out / f"{case}.safetensors")
    return {}
