"""What runs inside vLLM's own workers: backends of its weight-transfer API that load Hugging Face-named tensors.

InProcessTransfer is for the one worker of an engine in this process, by reference; OfferedTransfer for a worker in a
process of its own, which takes up an offer of the policy's ranks itself. Both use vLLM's layerwise reload, which knows
how each layer cuts its shard and re-packs it; `model.load_weights` alone does not after loading. The driver's side is
transfer.py. Imports vLLM: not for any other process.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from nemotron_steps.engine.generation.vllm.transfer import HANDED_OVER, IN_PROCESS, OFFERED, from_plain
from nemotron_steps.engine.workers.workers import end_with_parent

if TYPE_CHECKING:
    import torch

    from nemotron_steps.engine.weight_sync.transfer import StreamReceiver


@dataclass
class Opening(WeightTransferInitInfo):  # type: ignore[misc]
    """A channel to open: one plain handle for each worker, in rank order (transfer.py)."""

    channel: str
    handles: list[Any]


@dataclass
class Channel(WeightTransferUpdateInfo):  # type: ignore[misc]
    """An open channel to read from; within one process, where the weights wait."""

    channel: str


class _LayerwiseTransfer(WeightTransferEngine):  # type: ignore[misc,type-arg]
    """What both backends share."""

    init_info_cls = Opening
    update_info_cls = Channel
    _kernels: list[tuple[Any, Any]]
    """Kernels of experts, to be put back where those are not reloaded."""

    def start_weight_update(self) -> None:
        """Prepare layers to be loaded again from checkpoint-format tensors."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
        from vllm.platforms import current_platform

        self._kernels = []
        initialize_layerwise_reload(self.model)
        if not current_platform.is_cpu():
            return
        # On CPU vLLM packs the experts of a mixture only while it has no kernel for them: without this, reloaded ones
        # would be read as if they were packed.
        for module in self.model.modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                self._kernels.append((method, method.moe_kernel))
                method.moe_kernel = None

    def finish_weight_update(self) -> None:
        """Process layers that are still open."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]
        for method, kernel in self._kernels:
            if method.moe_kernel is None:
                method.moe_kernel = kernel
        self._kernels = []
        # Mamba-2 reads its convolution from a view of the weight. In bfloat16 on CPU vLLM packs the weight into other
        # memory, which leaves the view with the values that the engine was started with.
        for module in self.model.modules():
            unpacked = getattr(getattr(module, "conv1d", None), "_cpu_unpacked_conv_weight", None)
            view = getattr(module, "conv_weights", None)
            if unpacked is not None and view is not None:
                view.data.copy_(unpacked)

    def shutdown(self) -> None:
        """Nothing is held."""

    @staticmethod
    def trainer_send_weights(*_: Any, **__: Any) -> None:
        """Abstract in older versions; the trainer's side is transfer.py."""
        raise NotImplementedError

    def _load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))

        def with_head() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                yield name, tensor
                if tied and name.endswith("embed_tokens.weight"):
                    # vLLM's own head is another layer on CPU, and would keep the weights it was started with.
                    yield "lm_head.weight", tensor

        self.model.load_weights(with_head())  # type: ignore[operator]


class InProcessTransfer(_LayerwiseTransfer):
    """See the module docstring."""

    def init_transfer_engine(self, init_info: Opening) -> None:
        """No rendezvous."""

    def receive_weights(self, update_info: Channel, *_: Any) -> None:
        """Load every tensor that waits."""
        self._load(HANDED_OVER.pop(update_info.channel))


class OfferedTransfer(_LayerwiseTransfer):
    """See the module docstring."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _end_with_ours()
        self._ends: dict[str, StreamReceiver] = {}

    def init_transfer_engine(self, init_info: Opening) -> None:
        """Take up this worker's offer."""
        from nemotron_steps.engine.weight_sync.transfer import StreamReceiver

        offered = from_plain(init_info.handles[self.parallel_config.rank])
        self._ends[init_info.channel] = StreamReceiver.of(offered)

    def receive_weights(self, update_info: Channel, *_: Any) -> None:
        """Read one transfer to its end; every layer keeps its shard."""
        self._load(self._ends[update_info.channel].weights())


def _end_with_ours() -> None:
    """A process of vLLM's own has nothing to do without ours. Said where such a process begins to work as well as when
    this module is loaded: one that was forked is born with the modules of its parent."""
    if multiprocessing.parent_process() is not None:
        end_with_parent()


_end_with_ours()
for _name, _backend in ((IN_PROCESS, InProcessTransfer), (OFFERED, OfferedTransfer)):
    WeightTransferEngineFactory.register_engine(_name, _backend)


class WorkerExtension:
    """vLLM mixes this class into its workers (`worker_extension_cls`): finding it makes the backends known there."""

    def load_offered(self, channel: str) -> None:
        """One whole weight update from an open channel, between two steps of the engine."""
        worker: Any = self
        worker.start_weight_update()
        worker.update_weights({"channel": channel})
        worker.finish_weight_update()
