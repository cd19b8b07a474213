"""Low-rank adapters (LoRA, arXiv 2106.09685) beside frozen weights, under NeMo-RL's names.

docs/lora.md says what they do.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from nemotron_steps.config.schema.base import OnlyIf, Section


def _none_is_empty(value: Any) -> Any:
    return () if value is None else value


Modules = Annotated[tuple[str, ...], BeforeValidator(_none_is_empty)]
"""Names of linear layers, or patterns of their whole names (`*.layers.0.*.linear_qkv`)."""


_ON = OnlyIf("enabled")


class AdapterConfig(Section):
    """What both policies' adapters have: y = W x + alpha / dim · B A x, with W frozen and B starting at 0."""

    enabled: bool = False
    target_modules: Annotated[Modules, _ON] = ()
    """Linear layers that get an adapter; empty: all, of attention, of dense MLPs and, under the megatron policy, of
    Mamba-2."""
    exclude_modules: Annotated[Modules, _ON, OnlyIf("target_modules", ())] = ()
    """Without target_modules: linear layers that get none."""
    dim: Annotated[PositiveInt, _ON] = 32
    """The rank r of A [r, in] and B [out, r]."""
    alpha: Annotated[PositiveFloat, _ON] = 32.0
    dropout: Annotated[float, _ON] = Field(0.0, ge=0, lt=1)
    """Share of the adapter's input ("pre") or output ("post") that a training pass leaves out. SFT and DPO."""
    dropout_position: Annotated[Literal["pre", "post"], _ON, OnlyIf("dropout")] = "pre"


class PeftConfig(AdapterConfig):
    """`policy.megatron_cfg.peft`. Module names are Megatron's: linear_qkv, linear_proj, linear_fc1, linear_fc2,
    in_proj and out_proj of Mamba-2."""

    lora_A_init_method: Annotated[Literal["uniform", "xavier"], _ON] = "uniform"
    """uniform: Kaiming's, as PEFT starts A; xavier: Glorot's normal."""


class LoraConfig(AdapterConfig):
    """`policy.dtensor_cfg.lora_cfg`. Module names are the transformers model's: q_proj, gate_proj, …"""

    target_modules: Annotated[Modules, _ON, OnlyIf("match_all_linear", False)] = ()
    match_all_linear: Annotated[bool, _ON, OnlyIf("target_modules")] = True
    """Every linear layer of the decoder, but those of `exclude_modules`; false: those of `target_modules`."""
    dim: Annotated[PositiveInt, _ON] = 8
    lora_A_init: Annotated[Literal["uniform", "xavier"], _ON] = "uniform"
    """As lora_A_init_method of the megatron policy."""
