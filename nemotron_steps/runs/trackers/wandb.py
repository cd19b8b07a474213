"""A mirror of a run in W&B: one W&B run per executed step, its metrics, signals, samples, artifacts and edges.

Artifacts go by reference (their files stay in the home), with the digest in their metadata.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.errors import UnknownNameError
from nemotron_steps.runs.context import Record
from nemotron_steps.runs.trackers.base import ExperimentTracker

logger = logging.getLogger(__name__)

PUBLISHED = {
    ("data_prep", "prompts"): ("DataBlendsArtifact-rl", "dataset"),
    ("sft", "model"): ("ModelArtifact-sft", "model"),
    ("rl", "model"): ("ModelArtifact-rl", "model"),
}
"""(category of the step, port) → name and type in W&B, as the public recipes have them. W&B counts the outputs of all
steps of a category as versions of one artifact, which has one type."""


class WandbTracker(ExperimentTracker):
    """See ExperimentTracker."""

    target, module, table = "W&B", "wandb", "wandb"

    def _interrupt(self) -> None:
        self._finish(130)

    def _on_step_started(self, record: Record) -> None:
        planned = self._plan.step(record["step"])
        wandb = self._package
        self._run = wandb.init(
            project=self._settings.project,
            entity=self._settings.entity,
            # W&B reads its environment once in a process; a notebook sets WANDB_MODE after its first run.
            mode=self._settings.mode or os.environ.get("WANDB_MODE") or None,
            dir=str(self._folder.path),
            group=self._folder.id,
            job_type=planned.step_id,
            name=f"{planned.key} {self._folder.id}",
            config=self._redact(dict(planned.config)),
            reinit="create_new",
            # The command line and the environment may hold secrets; the run folder has both, redacted.
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, disable_code=True, x_disable_meta=True
            ),
        )
        self._run.define_metric("*", step_metric="training_step")
        self._samples.clear()

    def _on_metrics(self, record: Record) -> None:
        numbers = {name: value for name, value in record["values"].items() if isinstance(value, int | float)}
        self._run.log({**numbers, "training_step": record["index"]})

    def _on_sample(self, record: Record) -> None:
        self._samples.append(record["sample"])

    def _on_summary(self, record: Record) -> None:
        for name, value in record["values"].items():
            if isinstance(value, dict):
                self._run.summary.update({f"{name}/{key}": item for key, item in value.items()})
            else:
                self._run.summary[name] = value

    def _on_signal(self, record: Record) -> None:
        self._run.alert(
            title=record["name"],
            text=", ".join(f"{name}={value}" for name, value in record["numbers"].items()) or record["name"],
            level=self._package.AlertLevel.WARN,
        )

    def _on_step_finished(self, record: Record) -> None:
        outputs = [self._store.find(ref) for ref in record["outputs"].values()]
        for ref in dict.fromkeys(edge.ref or edge.digest for artifact in outputs for edge in artifact.inputs):
            try:
                used = self._described(self._store.find(ref))
            except UnknownNameError:
                logger.warning("W&B: input %s is no longer in the home", ref)
                continue
            if self._run.settings._offline:
                # use_artifact refuses to work offline, although the record it would send is all that syncing needs.
                self._run._log_artifact(used, aliases=[], is_user_created=True, use_after_commit=True)
            else:
                self._run.use_artifact(used)
        for artifact in outputs:
            # `vN` is what W&B itself calls its versions, from 0 on; a second one makes an artifact unreadable.
            alias = f"{artifact.name.replace('/', '-')}-v{artifact.version}"
            self._run.log_artifact(self._described(artifact), aliases=["latest", alias])
        self._finish(0)

    def _on_step_failed(self, record: Record) -> None:
        self._run.summary["error"] = record["error"]["what"]
        self._finish(1)

    def _finish(self, exit_code: int) -> None:
        run, self._run = self._run, None
        try:
            if self._samples:  # a column for each of their keys
                columns = list(dict.fromkeys(key for sample in self._samples for key in sample))
                rows = [[_cell(sample.get(column)) for column in columns] for sample in self._samples]
                run.log({"samples": self._package.Table(columns=columns, data=rows, allow_mixed_types=True)})
        finally:
            run.finish(exit_code=exit_code)

    def _described(self, artifact: Artifact) -> Any:
        made = artifact.producer
        own = (artifact.name.replace("/", "-") or artifact.digest[:12], artifact.type)
        name, kind = PUBLISHED.get((made.step.partition("/")[0], made.port), own) if made else own
        inputs = {edge.port: edge.ref or edge.digest for edge in artifact.inputs}
        metadata = {**artifact.attributes, "digest": artifact.digest, "reference": artifact.ref, "inputs": inputs}
        described = self._package.Artifact(name=name, type=kind, metadata=metadata)
        url, path = self._store.backend.url, f"artifacts/objects/{artifact.digest}"
        place = f"{url.rstrip('/')}/{path}" if "://" in url else (Path(url) / path).as_uri()
        described.add_reference(Path(artifact.location).as_uri() if artifact.location else place, checksum=False)
        return described


def _cell(value: Any) -> Any:
    return value if isinstance(value, int | float | str | None) else json.dumps(value, ensure_ascii=False)
