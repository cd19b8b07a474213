"""AdamW over flat buffers, each data-parallel rank updating its shard (the distributed optimizer); learning rates.
float32 master weights and moments; precision-aware, they take less room (docs/decisions/optimizer-precision.md)."""

import math
import warnings
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import lr_scheduler
from torch.optim.adamw import adamw

from nemotron_steps.config.schema.policy import OptimizerConfig, TorchSchedulerConfig
from nemotron_steps.engine.policy.param_and_grad_buffer import (
    PIECE,
    ParameterBuffer,
    SplitTensor,
    gather_shards,
    join_float32,
    split_float32,
    through_device,
)
from nemotron_steps.errors import NonFiniteLossError

MOMENTS = ("exp_avg", "exp_avg_sq")
ClipGroup = Sequence[tuple[Sequence[ParameterBuffer], Sequence[dist.ProcessGroup]]]


class FlatAdamW:
    """Decoupled weight decay Adam (arXiv 1711.05101), on CPU and CUDA."""

    def __init__(
        self, buffers: Sequence[ParameterBuffer], config: OptimizerConfig, clip_groups: Sequence[ClipGroup]
    ) -> None:
        self.buffers, self.config = list(buffers), config
        self.steps = 0
        self._clip_groups = clip_groups
        self.masters: list[Tensor] = []
        self.moments: list[dict[str, SplitTensor]] = []
        offloaded = config.optimizer_offload_fraction if config.optimizer_cpu_offload else 0.0
        kept = {"exp_avg": config.exp_avg_dtype, "exp_avg_sq": config.exp_avg_sq_dtype}
        for buffer in self.buffers:
            buffer.release_gradients()
            own = buffer.values[buffer.shard]
            if own.dtype is torch.float32:
                self.masters.append(own)
            elif config.use_precision_aware_optimizer:
                self.masters.append(torch.zeros_like(own, dtype=torch.int16))
            else:
                self.masters.append(own.float())
            self.moments.append(
                {
                    name: SplitTensor(own.numel(), offloaded, dtype=getattr(torch, kept[name]), device=own.device)
                    for name in MOMENTS
                }
            )

    def gradient_norms(self) -> list[float]:
        """Of the reduced gradient of each clip group over the whole model. Collective."""
        norms = []
        for clip_group in self._clip_groups:
            total = 0.0
            for buffers, groups in clip_group:
                squared = torch.zeros((), dtype=torch.float32, device=self.buffers[0].grads.device)
                for buffer in buffers:
                    squared += buffer.squared_norm()
                for group in groups:
                    if dist.get_world_size(group) > 1:
                        dist.all_reduce(squared, group=group)
                total += float(squared)
            norms.append(math.sqrt(total) if total >= 0 else math.nan)
        return norms

    def step(self, lr: float, scales: Sequence[float]) -> None:
        """One update with the gradients of each clip group times its scale. Collective."""
        self.steps += 1
        scale_of = {
            id(buffer): scale
            for group, scale in zip(self._clip_groups, scales, strict=True)
            for buffers, _ in group
            for buffer in buffers
        }
        for buffer, master, moments in zip(self.buffers, self.masters, self.moments, strict=True):
            scale = scale_of[id(buffer)]
            if scale != 1.0:
                buffer.grads[buffer.shard].mul_(scale)
            for decayed in (True, False):
                self._update(buffer, master, moments, lr, decayed=decayed)
            if master.dtype is torch.float32 and buffer.values.dtype is not torch.float32:
                buffer.values[buffer.shard].copy_(master)
            buffer.release_gradients()
            buffer.gather_values()

    def _update(
        self, buffer: ParameterBuffer, master: Tensor, moments: dict[str, SplitTensor], lr: float, *, decayed: bool
    ) -> None:
        first = buffer.shard.start
        ranges = [
            slice(segment.start - first, segment.end - first)
            for segment in buffer.own_segments(lambda kind: kind.decayed is decayed)
        ]
        gradients, values = buffer.grads[buffer.shard], buffer.values[buffer.shard]

        def update(piece: slice, state: dict[str, Tensor]) -> None:
            """In float32, whatever the state is kept in."""
            wide = {name: moment.float() for name, moment in state.items()}
            joined = master[piece] if master.dtype is torch.float32 else join_float32(values[piece], master[piece])
            self._adamw([[joined], [gradients[piece]], *([moment] for moment in wide.values())], lr, decayed)
            for name, moment in state.items():
                moment.copy_(wide[name])
            if master.dtype is not torch.float32:
                weights, remainders = split_float32(joined)
                values[piece].copy_(weights)
                master[piece].copy_(remainders)

        kept = moments[MOMENTS[0]].on_device.numel()
        here = [slice(r.start, min(r.stop, kept)) for r in ranges if r.start < kept]
        resident = {name: moment.on_device for name, moment in moments.items()}
        if master.dtype is torch.float32 and all(moment.dtype is torch.float32 for moment in resident.values()):
            self._adamw([[tensor[r] for r in here] for tensor in (master, gradients, *resident.values())], lr, decayed)
        else:
            for whole in here:
                for start in range(whole.start, whole.stop, PIECE):
                    piece = slice(start, min(start + PIECE, whole.stop))
                    update(piece, {name: moment[piece] for name, moment in resident.items()})
        through_device(moments, ranges, update)

    def _adamw(self, state: list[list[Tensor]], lr: float, decayed: bool) -> None:
        weights, gradients, exp_avg, exp_avg_sq = state
        if not weights:
            return
        adamw(
            weights,
            gradients,
            exp_avg,
            exp_avg_sq,
            [],
            [torch.tensor(float(self.steps - 1), device=tensor.device) for tensor in weights],
            fused=True,
            amsgrad=False,
            beta1=self.config.adam_beta1,
            beta2=self.config.adam_beta2,
            lr=lr,
            weight_decay=self.config.weight_decay if decayed else 0.0,
            eps=self.config.adam_eps,
            maximize=False,
        )

    def whole_state(self) -> dict[str, dict[str, Tensor]]:
        """state name → parameter name → tensor, of this rank's parameters, unsharded. Collective."""
        state: dict[str, dict[str, Tensor]] = {}
        for buffer, master, moments in zip(self.buffers, self.masters, self.moments, strict=True):
            shards = {name: moment.whole().float() for name, moment in moments.items()}
            if master.dtype is torch.int16:
                shards["master"] = join_float32(buffer.values[buffer.shard], master)
            elif buffer.values.dtype is not torch.float32:
                shards["master"] = master
            for name, shard in shards.items():
                state.setdefault(name, {}).update(buffer.unflatten(gather_shards(buffer, shard)))
        return state

    def load_whole_state(self, state: dict[str, dict[str, Tensor]], steps: int) -> None:
        """The inverse of `whole_state`. Collective over data-parallel ranks."""
        self.steps = steps
        for buffer, master, moments in zip(self.buffers, self.masters, self.moments, strict=True):
            for name, moment in moments.items():
                moment.copy_(_own_shard(buffer, state[name]))
            if master.dtype is torch.int16:
                weights, remainders = split_float32(_own_shard(buffer, state["master"]))
                buffer.values[buffer.shard].copy_(weights)
                master.copy_(remainders)
                buffer.gather_values()
            elif buffer.values.dtype is not torch.float32:
                master.copy_(_own_shard(buffer, state["master"]))


def _own_shard(buffer: ParameterBuffer, tensors: dict[str, Tensor]) -> Tensor:
    whole = torch.zeros(buffer.values.numel(), dtype=torch.float32, device=buffer.values.device)
    for slot in buffer.slots:
        whole[slot.start : slot.end].copy_(tensors[slot.parameter.name].reshape(-1))
    return whole[buffer.shard]


class TorchLearningRate:
    """The rate of each optimizer step, by `policy.scheduler`; without, a constant."""

    def __init__(self, lr: float, entries: Sequence[TorchSchedulerConfig]) -> None:
        self._rates = _rates(lr, entries)
        self._known: list[float] = []

    def at(self, step: int) -> float:
        """The rate of optimizer step `step` (0-based)."""
        while len(self._known) <= step:
            self._known.append(next(self._rates))
        return self._known[step]


def _rates(lr: float, entries: Sequence[TorchSchedulerConfig]) -> Iterator[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
    schedulers: list[lr_scheduler.LRScheduler] = []
    for entry in entries:
        if entry.name is None:
            continue
        whole = ("total_iters", "T_max")
        kwargs = {name: int(value) if name in whole else value for name, value in entry.kwargs.items()}
        schedulers.append(getattr(lr_scheduler, entry.name.rpartition(".")[2])(optimizer, **kwargs))
    if len(schedulers) > 1:
        milestones = [step for entry in entries for step in entry.milestones or ()]
        with warnings.catch_warnings(action="ignore"):
            schedulers = [lr_scheduler.SequentialLR(optimizer, schedulers, milestones)]
    while True:
        yield float(optimizer.param_groups[0]["lr"])
        optimizer.step()
        with warnings.catch_warnings(action="ignore"):  # SequentialLR calls its parts in a way that torch deprecates
            for scheduler in schedulers:
                scheduler.step()


def refuse_non_finite(loss: float, norms: Sequence[float], step: int, lr_key: str) -> None:
    """NonFiniteLossError where a step's loss or gradient is NaN or infinite."""
    if not all(map(math.isfinite, (loss, *norms))):
        raise NonFiniteLossError(
            "the loss or its gradient is not finite; no weight was changed",
            where=f"optimizer step {step}",
            expected="finite numbers",
            found=f"loss {loss}, gradient norm {' and '.join(map(str, norms))}",
            hints=(f"{lr_key}=1e-7", "policy.precision=float32"),
        )
