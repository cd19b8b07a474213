"""A worker that says which GPUs it was given."""

import os

from nemotron_steps.engine.workers.workers import WorkerProcess


class VisibleGpus(WorkerProcess):
    """Names, as CUDA would read them."""

    def visible(self) -> list[str]:
        """Those of this process."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
