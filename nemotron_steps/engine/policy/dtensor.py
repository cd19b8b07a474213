"""The policy on a plain Hugging Face model: FSDP2 over data-parallel ranks, DTensor tensor parallelism. For any causal
LM that transformers knows. Float32 master weights; under `precision: bfloat16` FSDP2 computes in bfloat16 and reduces
gradients in float32. A hybrid's float32 parameters (A_log, D, dt_bias) are whole on every rank."""

import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from nemotron_steps.config.families import rope_type
from nemotron_steps.config.schema.policy import PolicyConfig, TorchOptimizerConfig
from nemotron_steps.engine.batching import select_rows
from nemotron_steps.engine.losses.loss import (
    Loss,
    MetricSums,
    all_reduce_metric_sums,
    count_normalizers,
    finalize_metrics,
    merge_metric_sums,
)
from nemotron_steps.engine.policy.checkpoint import (
    PolicySnapshot,
    position,
    restored_position,
    written_by_rank_0,
)
from nemotron_steps.engine.policy.distributed.parallel_dims import device
from nemotron_steps.engine.policy.hf_model import LogprobModel, checkpoint_tensors, load_hf_model, tensor_parallel
from nemotron_steps.engine.policy.lora import HfAdapters
from nemotron_steps.engine.policy.micro_batches import on_device, plan_micro_batches, row_use
from nemotron_steps.engine.policy.optimizer import MOMENTS, TorchLearningRate, refuse_non_finite
from nemotron_steps.engine.policy.token_layout import TokenLayout, build_layout
from nemotron_steps.engine.types import TrainBatch
from nemotron_steps.errors import ConfigError, EngineError, UnsupportedError
from nemotron_steps.models.adapters import low_rank_sum, save_adapter
from nemotron_steps.models.architecture import Architecture, hf_folder
from nemotron_steps.models.distributed_checkpoint import load_tensors, stage_tensors
from nemotron_steps.models.huggingface import copy_model_files, save_hf_checkpoint
from nemotron_steps.models.mapping import EXACT, to_megatron
from nemotron_steps.models.megatron_checkpoint import (
    WEIGHTS,
    convert_megatron_to_hf,
    is_megatron_checkpoint,
    save_megatron_weights,
)
from nemotron_steps.models.megatron_core import ensure_process_group


class DTensorPolicy:
    """A trainable Hugging Face causal LM; arguments as MegatronPolicy's."""

    def __init__(
        self,
        config: PolicyConfig,
        checkpoint_path: str | Path,
        loss_fn: Loss,
        *,
        reference: bool = False,
        seed: int = 0,
        total_steps: int | None = None,
    ) -> None:
        self.config, self.loss_fn = config, loss_fn
        self.source_folder = hf_folder(checkpoint_path)
        ensure_process_group()
        torch.manual_seed(seed)
        self.device = device()
        self.mesh = _mesh(config.dtensor_cfg.tensor_parallel_size, self.device)
        self.data_group = self.mesh.get_group("data")
        self.data_rank, self.data_size = self.mesh.get_local_rank("data"), dist.get_world_size(self.data_group)
        self.dtype: torch.dtype = getattr(torch, config.precision)
        recompute = config.dtensor_cfg.activation_checkpointing
        if is_megatron_checkpoint(checkpoint_path):
            with tempfile.TemporaryDirectory() as temporary:
                convert_megatron_to_hf(checkpoint_path, temporary)
                hf = load_hf_model(Path(temporary), activation_checkpointing=recompute)
        else:
            hf = load_hf_model(Path(checkpoint_path), activation_checkpointing=recompute)
        self._rope = rope_type(hf.config.get_text_config().to_dict())
        longest = max(config.max_total_sequence_length, getattr(config, "max_total_sequence_length_end", None) or 0)
        self._check_width(longest + -longest % config.make_sequence_length_divisible_by)
        lora = config.dtensor_cfg.lora_cfg
        self._adapters = HfAdapters(hf, lora, seed=seed) if lora.enabled else None
        self.model = LogprobModel(
            hf.to(self.device), chunk=config.logprob_chunk_size, sampled_from=loss_fn.sampled_from
        )
        self._shard()
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._settings = (config.optimizer or TorchOptimizerConfig()).kwargs
        self.optimizers = self._make_optimizers()
        self.steps = 0
        self._learning_rate = TorchLearningRate(self._settings.lr, config.scheduler or ())
        self._reference: list[Tensor] | None = None
        if reference:
            frozen = self._adapters is not None
            self._reference = [] if frozen else [_local(p).to("cpu", copy=True) for p in self.parameters]

    @torch.no_grad()
    def logprobs(self, batch: TrainBatch) -> Tensor:
        """float32 [N, T] on CPU: logprobs of the trained tokens, else 0."""
        result = torch.zeros(batch.input_ids.shape, dtype=torch.float32)
        for rows, idle in self._micro_batches(batch, range(len(batch)), train=False):
            logprobs, _, layout = self._forward(batch, rows)
            if not idle:
                result[torch.as_tensor(rows), : layout.shape[1]] = logprobs.cpu()
        if self.data_size > 1:
            moved = result.to(self.device)
            dist.all_reduce(moved, group=self.data_group)
            result = moved.cpu()
        return result

    def reference_logprobs(self, batch: TrainBatch) -> Tensor:
        """The same under the frozen starting weights."""
        assert self._reference is not None, "built without reference=True"
        if self._adapters is not None:
            with self._adapters.off():
                return self.logprobs(batch)
        live = [_local(parameter).clone() for parameter in self.parameters]
        self._assign(self._reference)
        try:
            return self.logprobs(batch)
        finally:
            self._assign(live)

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        """One optimizer step over the global batch."""
        normalizers = count_normalizers(batch)
        use = row_use(batch, needs_advantage=self.loss_fn.gradient_needs_advantage)
        parts: list[MetricSums] = []
        for parameter in self.parameters:
            parameter.grad = None

        def run(rows: list[int], idle: bool) -> Tensor:
            logprobs, entropy, layout = self._forward(batch, rows)
            micro = select_rows(batch, rows, width=layout.shape[1])
            if idle:
                micro.sample_mask = torch.zeros_like(micro.sample_mask)
            loss, sums = self.loss_fn(logprobs, on_device(micro, self.device), normalizers, entropy)
            parts.append(sums)
            return loss

        if use.gradient:
            for rows, idle in self._micro_batches(batch, use.gradient, train=True):
                # FSDP2 averages gradients over data-parallel ranks; losses are normalised to be summed.
                (run(rows, idle) * self.data_size).backward()
        if use.metrics or not use.gradient:
            with torch.no_grad():
                for rows, idle in self._micro_batches(batch, use.metrics, train=False):
                    run(rows, idle)
        sums = merge_metric_sums(parts)
        if self.data_size > 1:
            sums = all_reduce_metric_sums(sums, self.data_group)
        metrics = finalize_metrics(sums, normalizers)
        self._agree_on_replicas()
        total = 0.0
        for parameter in self.parameters:
            if parameter.grad is not None:
                own = torch.linalg.vector_norm(parameter.grad)
                total += float(own.full_tensor() if isinstance(own, DTensor) else own) ** 2
        norm = math.sqrt(total) if total >= 0 else math.nan
        refuse_non_finite(metrics.get("loss", 0.0), [norm], self.steps, "policy.optimizer.kwargs.lr")
        lr = self._learning_rate.at(self.steps)
        scale = min(1.0, self.config.max_grad_norm / (norm + 1e-6))
        for parameter in self.parameters:
            if parameter.grad is None:  # no row had a gradient: weight decay and moments go on, as in any step
                parameter.grad = torch.zeros_like(parameter)
            elif scale != 1.0:
                parameter.grad.mul_(scale)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        self.steps += 1
        return {**metrics, "grad_norm": norm, "lr": lr}

    # ------------------------------------------------------------------------------------------ weights and files

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face-named whole tensors as computed with. Collective."""
        hf, adapters = self.model.hf, self._adapters
        named = dict(hf.named_parameters())
        for name, parameter in named.items():
            if ".lora_" in name:
                continue
            whole = _whole(parameter)
            if adapters is not None and name in adapters.names:
                stem = name.removesuffix("weight")
                linear_in, linear_out = (_whole(named[f"{stem}lora_{letter}.weight"]) for letter in "AB")
                whole = low_rank_sum(whole, linear_in, linear_out, adapters.scale)
            yield from self._named(name, whole)
        # A router's bias is part of the model, but not a parameter.
        saved = hf.state_dict(keep_vars=True).keys()  # detached, tensors of inference mode raise
        for name, buffer in hf.named_buffers():
            if name in saved:
                yield from checkpoint_tensors(name, buffer, hf.config.model_type)

    def _named(self, name: str, whole: Tensor) -> Iterable[tuple[str, Tensor]]:
        """A parameter as checkpoints have it."""
        dtype = torch.float32 if name.endswith(EXACT) else self.dtype
        return checkpoint_tensors(name, whole.to(dtype), self.model.hf.config.model_type)

    def _halves(self) -> Iterator[tuple[str, Tensor]]:
        """PEFT-named A and B of each projection."""
        for name, parameter in self.model.hf.named_parameters():
            if ".lora_" in name:
                (named, _), *_ = checkpoint_tensors(name, parameter, self.model.hf.config.model_type)
                yield f"base_model.model.{named}", _whole(parameter)

    def save_checkpoint(self, path: str) -> None:
        """Weights, optimizer, scheduler position and RNG into a folder. Collective."""
        self.snapshot(copy=False).write(path)

    def snapshot(self, *, copy: bool = True) -> PolicySnapshot:
        """The same as a copy in host memory, to be written while training goes on. Collective."""
        place = position(self.steps, (self.config.dtensor_cfg.tensor_parallel_size,))
        return PolicySnapshot(stage_tensors(self._state(), copy=copy), place, self.source_folder)

    def load_checkpoint(self, path: str) -> None:
        """The inverse of save_checkpoint, on any number of ranks. Collective."""
        with restored_position(Path(path), (self.config.dtensor_cfg.tensor_parallel_size,)) as steps:
            load_tensors(self._state(), Path(path) / WEIGHTS)
            for optimizer in self.optimizers:
                for state in optimizer.state.values():
                    state["step"].fill_(steps)
            self.steps = steps

    def save_hf(self, path: str | Path) -> None:
        """A Hugging Face checkpoint folder. Collective; rank 0 writes."""
        write = partial(save_hf_checkpoint, path, source=self.source_folder)
        written_by_rank_0(write, self.weights())

    def save_adapter(self, path: str | Path, base: str, digest: str) -> None:
        """The adapters alone, as a folder that PEFT loads. Collective; rank 0 writes. See Policy."""
        if self._adapters is None:
            raise EngineError("no adapters are trained", where=str(path))
        config = self.config.dtensor_cfg.lora_cfg
        every = {name for name, _ in self.model.hf.named_parameters() if ".lora_" not in name}
        write = partial(save_adapter, path, config=config, every=every, base=base, digest=digest)
        written_by_rank_0(write, self._halves())

    def save_model(self, path: str | Path) -> None:
        """A Megatron checkpoint folder. Collective. UnsupportedError when the family has no Megatron mapping."""
        architecture, folder = Architecture.from_folder(self.source_folder), Path(path)
        whole = dict(self.weights())
        save_megatron_weights(to_megatron(whole, architecture), architecture, folder / WEIGHTS)
        written_by_rank_0(partial(copy_model_files, self.source_folder, folder / "hf"))

    def _shard(self) -> None:
        if self.mesh.size(1) > 1:
            tensor_parallel(self.model.hf, self.mesh["tensor"])
        precision = MixedPrecisionPolicy(
            param_dtype=None if self.dtype is torch.float32 else self.dtype, reduce_dtype=torch.float32
        )
        offload = CPUOffloadPolicy() if self.config.dtensor_cfg.cpu_offload else OffloadPolicy()
        settings: dict[str, Any] = {"mesh": self.mesh["data"], "mp_policy": precision, "offload_policy": offload}
        if self.dtype is not torch.float32:
            named = self.model.named_parameters()
            settings["ignored_params"] = {parameter for name, parameter in named if name.endswith(EXACT)}
        for layer in self.model.layers():
            fully_shard(layer, **settings)
        # The root would otherwise keep its gathered weights, and not see a swap of the sharded ones.
        fully_shard(self.model, reshard_after_forward=True, **settings)

    def _make_optimizers(self) -> list[torch.optim.AdamW]:
        settings = self._settings
        # A fused update cannot mix tensors of different meshes (tensor-parallel ones live on two dimensions).
        meshes: dict[Any, list[torch.nn.Parameter]] = {}
        for parameter in self.parameters:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            meshes.setdefault(mesh, []).append(parameter)
        optimizers = []
        for parameters in meshes.values():
            groups = [
                {"params": [p for p in parameters if p.dim() > 1], "weight_decay": settings.weight_decay},
                {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
            ]
            groups = [group for group in groups if group["params"]]
            given: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
            optimizers.append(torch.optim.AdamW(groups, **given, fused=True))
        return optimizers

    def _micro_batches(
        self, batch: TrainBatch, rows: Sequence[int], *, train: bool
    ) -> Iterator[tuple[list[int], bool]]:
        """This rank's (rows, is idle); every rank gets equally many, since FSDP gathers weights for each."""
        unit = self.loss_fn.rows_per_unit if train else 1
        if batch.routed_experts is not None:
            raise EngineError(
                "the dtensor policy cannot replay experts",
                where="TrainBatch.routed_experts",
                expected="None",
                hints=("policy.dtensor_cfg.enabled=false   # the megatron policy can",),
            )
        plan = plan_micro_batches(batch, rows, self.config, self.data_size, train=train, unit=unit, padded=True)
        own = plan[self.data_rank]
        for number in range(max(1, *(len(share) for share in plan))):
            yield (own[number], False) if number < len(own) else (list(range(unit)), True)

    def _forward(self, batch: TrainBatch, rows: list[int]) -> tuple[Tensor, Tensor, TokenLayout]:
        """[n, W] logprobs and entropies of the trained tokens of some rows."""
        layout = build_layout(batch, rows, share_prompts=False)
        width = layout.shape[1]
        ids = batch.input_ids[torch.as_tensor(rows), :width].to(self.device)
        cells = layout.cells.to(self.device)
        padding = -width % self.config.make_sequence_length_divisible_by
        self._check_width(width + padding)
        source = cells - 1 + cells // width * padding  # cells of the padded rows
        logprobs, entropy = self.model(F.pad(ids, (0, padding)), source, layout.targets.to(self.device))
        flat = torch.zeros(layout.shape[0] * width, device=self.device)
        scattered = [flat.index_copy(0, cells, values).view(layout.shape) for values in (logprobs, entropy)]
        return scattered[0], scattered[1], layout

    def _check_width(self, width: int) -> None:
        """UnsupportedError where transformers would take the positions of a micro-batch's rows from its longest."""
        kind, fixed = self._rope
        if fixed is not None and width > fixed:
            raise UnsupportedError(
                f"rows longer than {fixed} positions would change the rows beside them (rope_type {kind})",
                where="policy.max_total_sequence_length",
                expected=f"at most {fixed}, padding included (policy.make_sequence_length_divisible_by)",
                found=str(width),
                hints=(f"policy.max_total_sequence_length={fixed} policy.make_sequence_length_divisible_by=1",),
            )

    def _agree_on_replicas(self) -> None:
        """Average gradients of what several ranks hold whole, or replicas would drift apart on a GPU."""
        for parameter in self.parameters:
            if parameter.grad is not None and not isinstance(parameter, DTensor) and self.data_size > 1:
                dist.all_reduce(parameter.grad, group=self.data_group)
                parameter.grad.div_(self.data_size)
        if self.mesh.size(1) == 1:
            return
        group = self.mesh.get_group("tensor")
        for parameter in self.parameters:
            split = isinstance(parameter, DTensor) and "tensor" in (parameter.device_mesh.mesh_dim_names or ())
            if parameter.grad is not None and not split:
                gradient = _local(parameter.grad)
                dist.all_reduce(gradient, group=group)
                gradient.div_(self.mesh.size(1))

    def _state(self) -> dict[str, Tensor]:
        state = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if not optimizer.state[parameter]:
                        optimizer.state[parameter].update(
                            step=torch.tensor(0.0, device=parameter.device),
                            **{name: torch.zeros_like(parameter) for name in MOMENTS},
                        )
        for name, parameter in self.model.hf.named_parameters():
            if self._adapters is not None and not parameter.requires_grad:
                continue  # frozen: it is where the policy was started from
            state[name] = parameter.detach()
            for optimizer in self.optimizers:
                for moment in MOMENTS:
                    if parameter in optimizer.state:
                        state[f"optimizer.{moment}.{name}"] = optimizer.state[parameter][moment]
        return state

    def _assign(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters, values, strict=True):
                _local(parameter).copy_(value)


def _mesh(tensor: int, device: torch.device) -> DeviceMesh:
    ranks = dist.get_world_size()
    if ranks % tensor:
        raise ConfigError(
            "the number of ranks is not a multiple of the tensor-parallel size",
            where="policy.dtensor_cfg.tensor_parallel_size",
            expected=f"a divisor of {ranks}",
            found=str(tensor),
            hints=(f"policy.dtensor_cfg.tensor_parallel_size={math.gcd(ranks, tensor)}",),
        )
    return init_device_mesh(device.type, (ranks // tensor, tensor), mesh_dim_names=("data", "tensor"))


def _whole(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
