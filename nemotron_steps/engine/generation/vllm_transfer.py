"""A weight-transfer backend for vLLM engines that live in the trainer's process: tensors change hands by reference.

vLLM's own backends move weights between processes (NCCL, CUDA IPC). Here the iterator itself is put where the worker
finds it, and vLLM's layerwise reload takes it from there: it knows how each layer re-packs its weights, which
`model.load_weights` alone does not after loading.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

BACKEND = "nemotron_steps_in_process"

_handed_over: dict[str, Iterator[tuple[str, torch.Tensor]]] = {}
"""Weights on their way to the worker, by ticket. Filled and emptied within one `hand_over`."""


def register() -> None:
    """Make the backend known to vLLM's factory, once."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND in WeightTransferEngineFactory._registry:
        return

    @dataclass
    class InitInfo(WeightTransferInitInfo):
        """Nothing to agree on."""

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):
        """Where the weights wait."""

        ticket: str

    class InProcessTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
        """Takes weights out of `_handed_over`."""

        init_info_cls = InitInfo
        update_info_cls = UpdateInfo

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            """No rendezvous."""

        def start_weight_update(self) -> None:
            """Prepare layers to be loaded again from checkpoint-format tensors."""
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: UpdateInfo, *_: Any) -> None:
            """Load every tensor."""
            self.model.load_weights(_handed_over.pop(update_info.ticket))  # type: ignore[operator]

        def finish_weight_update(self) -> None:
            """Process layers that are still open."""
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]

        def shutdown(self) -> None:
            """Nothing is held."""

        @staticmethod
        def trainer_send_weights(*_: Any, **__: Any) -> None:
            """Abstract in older versions; the trainer side is `hand_over`."""
            raise NotImplementedError

    WeightTransferEngineFactory.register_engine(BACKEND, InProcessTransfer)


def hand_over(engine: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Load Hugging Face-named weights into a vLLM engine of this process. Returns the bytes handed over."""
    moved = 0
    tied = bool(getattr(engine.vllm_config.model_config.hf_text_config, "tie_word_embeddings", False))

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal moved
        for name, tensor in weights:
            moved += tensor.numel() * tensor.element_size()
            yield name, tensor.detach()
            if tied and name.endswith("embed_tokens.weight"):
                # Its own head is another layer on CPU, and would keep the weights it was started with.
                yield "lm_head.weight", tensor.detach()

    _handed_over["weights"] = counted()
    try:
        engine.collective_rpc("start_weight_update")
        engine.collective_rpc("update_weights", kwargs={"update_info": {"ticket": "weights"}})
        engine.collective_rpc("finish_weight_update")
    finally:
        _handed_over.pop("weights", None)
    return moved
