"""What a conversion refuses before any step of a run starts: a folder whose parts are not of one model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.config.schema.convert import ConvertConfig, MergeConfig
from nemotron_steps.models.adapters import recorded_base
from nemotron_steps.steps.hub_folder import check_known_tensors, check_tensors


def check(config: ConvertConfig, inputs: Mapping[str, Artifact | None]) -> None:
    """Refuse a Hugging Face folder that cannot be converted. See StepTable.preflight."""
    for source in inputs.values():
        if source is not None:
            check_tensors(source.path)


def check_base(config: MergeConfig, inputs: Mapping[str, Artifact | None]) -> None:
    """Refuse a Hugging Face folder that an adapter cannot be added to: the one that is given, else the one that the
    adapter names. See StepTable.preflight."""
    adapter, base = inputs.get("adapter"), config.base
    if base is None and adapter is not None:
        base = recorded_base(adapter.path)
    made_later = "base" in inputs and inputs["base"] is None
    if base is not None and not made_later and Path(base).is_dir():
        check_known_tensors(Path(base))
