"""Config of the weight conversion steps."""

from typing import Literal

from nemotron_steps.config.schema.base import Section


class ConvertConfig(Section):
    """What a conversion may choose."""

    precision: Literal["keep", "float32", "bfloat16"] = "keep"
    """Type of the written weights; keep: that of the input, bit for bit."""


class MergeConfig(Section):
    """Config of `convert/merge_adapter`."""

    base: str | None = None
    """Path of the checkpoint that the adapter was trained on; None: the one that the adapter names."""
