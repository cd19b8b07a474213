"""The outputs of a step that has ended: whether it left them, and their commit to the store."""

from __future__ import annotations

import re
from collections.abc import Mapping

from nemotron_steps.artifacts.files import storage_errors
from nemotron_steps.artifacts.models import Artifact, Edge, Producer
from nemotron_steps.artifacts.store import ArtifactStore
from nemotron_steps.errors import ArtifactError, DataError, StepFailedError
from nemotron_steps.manifest.typegraph import TypeGraph
from nemotron_steps.resolver.plan import PlannedStep
from nemotron_steps.runs.context import OutputSlot
from nemotron_steps.runs.work import WorkFolder


def stage_outputs(
    planned: PlannedStep,
    slots: Mapping[str, OutputSlot],
    work: WorkFolder,
    store: ArtifactStore,
    types: TypeGraph,
    inputs: Mapping[str, Artifact],
    run_id: str,
    key: str,
) -> dict[str, Artifact]:
    """What a step filled, checked and ready for `commit_outputs`; an output that need not be may be empty.

    Args:
        work: rejected where an output is missing or not valid, so that the step is made again.
        inputs: what the outputs were made from.
        key: the step's cache key.

    Raises StepFailedError for a required output that is empty, and for one that is not valid.
    """
    edges = tuple(Edge(port, artifact.digest, artifact.ref) for port, artifact in inputs.items())
    staged: dict[str, Artifact] = {}
    filled = {port: slot for port, slot in slots.items() if any(path.is_file() for path in slot.path.rglob("*"))}
    for port, slot in slots.items():
        if port not in filled and planned.manifest.outputs[port].required:
            work.reject()
            raise StepFailedError(
                f"step '{planned.step_id}' left its output '{port}' empty",
                where=str(slot.path),
                expected=f"a {slot.type}",
                found="no file",
            )
    for port, slot in filled.items():
        producer = Producer(planned.step_id, port, run_id, planned.manifest.step.version, key, planned.config_name)
        try:
            with storage_errors(slot.path):
                staged[port] = store.stage(
                    slot.path,
                    slot.type,
                    name=artifact_name(planned.step_id, port),
                    supertypes=types.ancestors(slot.type),
                    attributes=slot.attributes,
                    producer=producer,
                    inputs=edges,
                )
        except (ArtifactError, DataError) as error:
            work.reject()
            raise StepFailedError(
                f"step '{planned.step_id}' left an output '{port}' that is not a valid {slot.type}: {error.what}",
                where=error.where,
                expected=error.expected,
                found=error.found,
            ) from error
    return staged


def commit_outputs(staged: Mapping[str, Artifact], store: ArtifactStore) -> dict[str, Artifact]:
    """Commit what was staged, port by port."""
    outputs: dict[str, Artifact] = {}
    for port, artifact in staged.items():
        with storage_errors(artifact.path):
            outputs[port] = store.publish(artifact)
    return outputs


def artifact_name(step_id: str, port: str) -> str:
    """What an output is called: a pack's folder, in `PACK:ID`, may have a name that no artifact can have."""
    return re.sub(r"[^A-Za-z0-9._/-]", "-", step_id.replace(":", "/")) + f"/{port}"
