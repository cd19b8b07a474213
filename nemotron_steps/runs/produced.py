"""The config that made an artifact, as the run that made it wrote it down."""

from __future__ import annotations

from typing import Any

from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import UnknownNameError
from nemotron_steps.runs.run_folder import get_run, run_file


def config_of(store: ArtifactStore, artifact: Artifact) -> dict[str, Any] | None:
    """The merged config, redacted, of the step that made an artifact; None where no step did, or its run is gone."""
    import yaml

    if artifact.producer is None:
        return None
    try:
        info = get_run(store, artifact.producer.run)
        text = run_file(store, info.id, "config.yaml").read_text(encoding="utf-8")
    except UnknownNameError:
        return None
    made = artifact.producer.made_under
    key = next((key for key, step in info.steps.items() if step.get("cache_key") == made), None)
    values = yaml.safe_load(text)
    config = values.get(key) if isinstance(values, dict) else None
    return config if isinstance(config, dict) else None
