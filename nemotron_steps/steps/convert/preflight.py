"""What a conversion refuses before any step of a run starts: a folder whose parts are not of one model."""

from __future__ import annotations

from collections.abc import Mapping

from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.config.schema.convert import ConvertConfig
from nemotron_steps.steps.hub_folder import check_tensors


def check(config: ConvertConfig, inputs: Mapping[str, Artifact | None]) -> None:
    """Refuse a Hugging Face folder that cannot be converted. See StepTable.preflight."""
    for source in inputs.values():
        if source is not None:
            check_tensors(source.path)
