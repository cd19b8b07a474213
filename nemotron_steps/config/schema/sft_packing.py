"""Config of `data_prep/sft_packing`: chats to rows of tokens of one length."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from nemotron_steps.config.schema.base import OPERATIONAL, Section
from nemotron_steps.config.schema.data_prep import SplitRows
from nemotron_steps.config.schema.sft import SftDataConfig


class PackingConfig(Section):
    """`packing.*`"""

    pack_size: PositiveInt = 4096
    """Tokens of a row at most; longer chats are left out, and counted."""
    algorithm: Literal["modified_first_fit_decreasing", "first_fit_decreasing", "concatenative"] = (
        "modified_first_fit_decreasing"
    )
    """As policy.sequence_packing.algorithm."""
    tokenizer: str | None = None
    """A folder with the tokenizer and chat template of the model that is to be trained, or its checkpoint. None:
    data.tokenizer, which the chats bring where one was trained on them."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """As policy.tokenizer.chat_template_kwargs, which has no part in training on packed rows."""


class SftPackingConfig(Section):
    """The whole config of the step."""

    data: SftDataConfig = SftDataConfig()
    packing: PackingConfig = PackingConfig()
    sample: PositiveInt | None = None
    """Chats read of each split at most."""
    max_refused_share: float = Field(0.0, ge=0, le=1)
    """Share of unusable chats that is left out, each one named and counted; above it the step fails."""
    num_workers: Annotated[PositiveInt | None, OPERATIONAL] = None
    """Processes that tokenise. None: one for each processor."""

    @property
    def rows(self) -> SplitRows:
        """See Preparation: the splits are what they are."""
        return SplitRows(validation=0)
