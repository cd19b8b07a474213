"""A generation worker that keeps what it receives instead of sampling with it."""

from pathlib import Path
from typing import Any

from nemotron_steps.config.schema.policy import GenerationConfig
from nemotron_steps.engine.placement.generator_group import GenerationWorker, GeneratorSettings

SETTINGS = GeneratorSettings(Path("/nowhere"), GenerationConfig(), 8, "float32", None)


class KeptWeights(GenerationWorker):
    """The receiving half of a GenerationWorker."""

    def _load(self, version: int) -> int:
        received = self._receiving.weights()
        self._kept = {name: tensor.clone() for name, tensor in received}
        return sum(tensor.nbytes for tensor in self._kept.values())

    def kept(self) -> dict[str, Any]:
        """Every tensor, as float32 on the CPU: exact for the types of these weights."""
        return {name: tensor.cpu().float().numpy() for name, tensor in self._kept.items()}

    def device_of_kept(self) -> set[str]:
        """Where they were received."""
        return {str(tensor.device.type) for tensor in self._kept.values()}
