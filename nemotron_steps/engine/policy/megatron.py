"""The policy on megatron-core: one rank's part of the model, trained and queried collectively. Every rank is given the
same global batch, computes its own micro-batches of it, and returns the same result."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nemotron_steps.config.schema.policy import MegatronConfig, PolicyConfig
from nemotron_steps.engine.kernels.fused import row_multiple
from nemotron_steps.engine.losses.distillation import DistillationLoss
from nemotron_steps.engine.losses.loss import (
    Loss,
    LossNormalizers,
    MetricSums,
    all_reduce_metric_sums,
    count_normalizers,
    finalize_metrics,
    loss_mask,
    merge_metric_sums,
)
from nemotron_steps.engine.memory_tuning import keep_freed_memory
from nemotron_steps.engine.policy import checkpoint
from nemotron_steps.engine.policy.checkpoint import PolicySnapshot
from nemotron_steps.engine.policy.distributed import parallel_dims as parallel
from nemotron_steps.engine.policy.distributed.context_parallel import sum_parts
from nemotron_steps.engine.policy.distributed.shards import ModelShards
from nemotron_steps.engine.policy.logprob import (
    OutputLayer,
    Results,
    compared,
    linear_divergence,
    linear_logprobs,
    linear_predictions,
)
from nemotron_steps.engine.policy.lora import attach_adapters, without_adapters
from nemotron_steps.engine.policy.micro_batches import RankWork, plan_micro_batches, row_use, token_multiple
from nemotron_steps.engine.policy.model import PolicyModel
from nemotron_steps.engine.policy.moe import counting, replay_metrics
from nemotron_steps.engine.policy.optimizer import FlatAdamW, refuse_non_finite
from nemotron_steps.engine.policy.token_layout import TokenLayout
from nemotron_steps.engine.schedules import learning_rate
from nemotron_steps.engine.types import TrainBatch
from nemotron_steps.models.adapters import adapter_pairs, save_adapter
from nemotron_steps.models.architecture import Architecture, hf_folder
from nemotron_steps.models.huggingface import WeightReader, save_hf_checkpoint
from nemotron_steps.models.mapping import hf_shapes, to_megatron
from nemotron_steps.models.megatron_checkpoint import is_megatron_checkpoint
from nemotron_steps.models.megatron_core import on_available_device

REDUCED_VALUES = 1 << 24
"""Of what is inferred, at once over ranks: 64 MiB in float32."""


class MegatronPolicy:
    """A trainable megatron-core model. reference: keep a frozen copy of the starting weights for `reference_logprobs`;
    with adapters they are there; total_steps: of the run, for decay styles without `lr_decay_iters`; frozen: it never
    trains, so it has no gradients and no optimizer: a teacher."""

    def __init__(
        self,
        config: PolicyConfig,
        checkpoint_path: str | Path,
        loss_fn: Loss,
        *,
        reference: bool = False,
        seed: int = 0,
        total_steps: int | None = None,
        frozen: bool = False,
    ) -> None:
        self.config, self.loss_fn = config, loss_fn
        megatron = config.megatron_cfg
        architecture = Architecture.from_folder(checkpoint_path)
        self._balanced = architecture.is_moe and megatron.moe_router_bias_update_rate > 0
        self._depths = megatron.mtp_num_layers
        self.architecture = dataclasses.replace(
            architecture, router_bias=architecture.router_bias or self._balanced, trains_mtp=self._depths > 0
        )
        self.source_folder = hf_folder(checkpoint_path)
        self.layout = parallel.ParallelDims.from_config(megatron, self.architecture)
        parallel.initialize(self.layout)
        torch.manual_seed(seed)
        self.device = parallel.device()
        generation = getattr(config, "generation", None)
        self._vllm_wakes = (
            self.device.type == "cuda"
            and generation is not None
            and generation.backend == "vllm"
            and generation.colocated.enabled
        )
        if self.device.type == "cpu":
            keep_freed_memory()
        self.groups = parallel.Groups()
        self.model = PolicyModel(
            self.architecture,
            self.layout,
            getattr(torch, config.precision),
            activation_checkpointing=megatron.activation_checkpointing,
            freeze_router=megatron.freeze_moe_router,
            detach_mtp=megatron.mtp_detach_heads,
        )
        if megatron.peft.enabled:
            pairs = adapter_pairs(self.architecture, megatron.peft, key="policy.megatron_cfg.peft")
            attach_adapters(self.model, pairs, megatron.peft, seed=seed)
        apart = self._depths > 0 and megatron.mtp_detach_heads
        self.shards = ModelShards(self.model, self.groups, mtp_apart=apart)
        if is_megatron_checkpoint(checkpoint_path):
            checkpoint.load_model(self.shards, Path(checkpoint_path))
        else:
            reader, shards = WeightReader(checkpoint_path), self.shards
            shards.load(to_megatron(reader, self.architecture, held=shards.local, experts=shards.own_experts))
        sharded = megatron.optimizer.use_distributed_optimizer
        self.buffers = [] if frozen else self.shards.make_buffers(sharded=sharded)
        self.optimizer = FlatAdamW(
            self.buffers,
            megatron.optimizer,
            self.shards.clip_groups(self.buffers, sharded=sharded),
        )
        if self._vllm_wakes:  # memory which the weights were loaded into, before they moved to the buffers
            torch.cuda.empty_cache()
        self.teacher_weights: list[Tensor] = []
        self._pipeline = parallel.Pipeline(self.groups, self.model.dtype, self.device)
        scheduler = megatron.scheduler
        if scheduler.lr_decay_iters is None and total_steps is not None:
            scheduler = scheduler.model_copy(update={"lr_decay_iters": max(total_steps, scheduler.lr_warmup_iters + 1)})
        self._scheduler = scheduler
        self._reference: list[Tensor] | None = None
        if reference and self.model.adapters:
            self._reference = []
        elif reference:
            copies = (tensor.to("cpu", copy=True) for tensor in self._moving())
            pinned = self.device.type == "cuda"  # which makes the way back faster
            self._reference = [copy.pin_memory() if pinned else copy for copy in copies]

    def logprobs(self, batch: TrainBatch) -> Tensor:
        """float32 [N, T] on CPU: logprobs of the trained tokens, else 0."""

        def of(hidden: Tensor, layout: TokenLayout) -> tuple[Tensor]:
            return (self._token_logprobs(hidden, layout, with_entropy=False)[0],)

        return self._inferred(batch, of, [torch.zeros(batch.input_ids.shape)])[0]

    def outputs(self, batch: TrainBatch, of: Callable[..., Results], results: list[Tensor]) -> list[Tensor]:
        """Fill results [N, T, …] with what a function of the output layer makes of trained tokens."""
        return self._inferred(batch, partial(self._predicted, of), results)

    def _inferred(
        self, batch: TrainBatch, of: Callable[[Tensor, TokenLayout], tuple[Tensor, ...]], results: list[Tensor]
    ) -> list[Tensor]:
        """Fill results [N, T, …] on CPU with what `of` makes of the last stage's output."""
        work = self._work(batch, range(len(batch)), train=False)

        def forward(number: int, received: Tensor | None) -> Tensor:
            layout = work.layout(number)
            hidden = self.model(layout, received)
            if self.groups.is_last_stage and not work.is_idle(number):
                rows = torch.as_tensor(work.rows(number))
                for result, values in zip(results, of(hidden, layout), strict=True):
                    result[rows, : layout.shape[1]] = _scatter(values, layout).cpu()
            return hidden

        with torch.no_grad(), on_available_device():
            self._pipeline.infer(work.count, forward, work.shape)
        for group in (self.groups.data, self.groups.pipeline):
            if dist.get_world_size(group) > 1:
                for result in filter(torch.numel, results):  # empty where no top-k tokens are wanted
                    # A part at a time: whole hidden states of a batch would not fit beside the model.
                    for part in torch.split(result.flatten(), REDUCED_VALUES):
                        moved = part.to(self.device)
                        dist.all_reduce(moved, group=group)
                        part.copy_(moved)
        return results

    def reference_logprobs(self, batch: TrainBatch) -> Tensor:
        """The same under the frozen starting weights; their routers choose themselves."""
        assert self._reference is not None, "built without reference=True"
        starting = without_adapters(self.model) if self.model.adapters else self._swapped(self._reference)
        with starting:
            return self.logprobs(dataclasses.replace(batch, routed_experts=None))

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        """One optimizer step over the global batch; its metrics, `grad_norm` (before clipping) and `lr`.
        NonFiniteLossError: the loss or the gradient is NaN or infinite; weights and optimizer are unchanged."""
        normalizers = count_normalizers(batch)
        for buffer in self.buffers:
            buffer.start_gradients()
        metrics = self._accumulate(batch, normalizers)
        for buffer in self.buffers:
            self.shards.reduce_embedding_gradient(buffer)
            buffer.reduce_gradients()
        norms = self.optimizer.gradient_norms()
        loss, norm = metrics.get("loss", 0.0), norms[0]
        refuse_non_finite(loss, norms, self.optimizer.steps, "policy.megatron_cfg.optimizer.lr")
        lr = learning_rate(self.optimizer.steps, self.config.megatron_cfg.optimizer, self._scheduler)
        self.optimizer.step(lr, [min(1.0, self.config.max_grad_norm / (each + 1e-6)) for each in norms])
        if self._vllm_wakes:
            torch.cuda.empty_cache()
        if self._balanced:
            for router in self.model.routers():
                router.rebalance(self.config.megatron_cfg.moe_router_bias_update_rate, self.groups.stage_ranks)
        of_mtp = {"mtp_grad_norm": norms[1]} if len(norms) > 1 else {}
        return {**metrics, "grad_norm": norm, **of_mtp, "lr": lr}

    def _accumulate(self, batch: TrainBatch, normalizers: LossNormalizers) -> dict[str, float]:
        """Gradients of the global batch into the buffers; returns its metrics."""
        # Multi-token prediction learns from every trained token, whatever its advantage.
        use = row_use(batch, needs_advantage=self.loss_fn.gradient_needs_advantage and not self._depths)
        parts: list[MetricSums] = []
        ahead = PredictionLoss(batch, self.config.megatron_cfg, self.device) if self._depths else None

        def run(work: RankWork, number: int, received: Tensor | None) -> Tensor:
            layout = work.layout(number)
            hidden: Tensor = self.model(layout, received)
            if not self.groups.is_last_stage:
                return hidden
            micro = work.select(number)
            loss, sums = self._loss(hidden, layout, micro, normalizers)
            parts.append(sums)
            if ahead is not None and torch.is_grad_enabled():
                loss = loss + ahead(list(self._predicted_ahead(hidden, layout)), layout, micro)
            return loss

        # Rows without a gradient load the experts as the others do.
        with on_available_device(), counting(self.model.routers()):
            if use.gradient:
                work = self._work(batch, use.gradient, train=True)
                self._pipeline.train(work.count, lambda *at: run(work, *at), work.shape)
            if use.metrics or not use.gradient:
                measured = self._work(batch, use.metrics, train=False)
                with torch.no_grad():
                    self._pipeline.infer(measured.count, lambda *at: run(measured, *at), measured.shape)
        sums = merge_metric_sums(parts)
        if self.groups.data_size > 1 and self.groups.is_last_stage:
            sums = all_reduce_metric_sums(sums, self.groups.data)
        found = finalize_metrics(sums, normalizers)
        if ahead is not None and use.gradient and self.groups.is_last_stage:
            found |= ahead.metrics(self.groups)
        metrics: dict[str, float] = self.groups.from_last_stage(found)
        if batch.routed_experts is None:
            return metrics
        return {**metrics, **replay_metrics(self.model.routers(), self.groups, self.device)}

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Hugging Face-named whole tensors that generate, adapters added. Collective."""
        return self.shards.hf_tensors(with_mtp=False)

    def save_checkpoint(self, path: str) -> None:
        """Weights, optimizer, scheduler position and RNG into a folder (torch_dist). Collective."""
        self.snapshot(copy=False).write(path)

    def snapshot(self, *, copy: bool = True) -> PolicySnapshot:
        """The same as a copy in host memory, to be written while training goes on. Collective."""
        return checkpoint.snapshot(self.shards, self.optimizer, self.source_folder, copy=copy)

    def load_checkpoint(self, path: str) -> None:
        """The inverse of save_checkpoint, in any parallel layout. Collective."""
        checkpoint.load(self.shards, self.optimizer, Path(path))

    def save_model(self, path: str | Path) -> None:
        """A Megatron checkpoint folder without optimizer state, adapters added. Collective."""
        checkpoint.save_model(self.shards, self.source_folder, Path(path))

    def save_adapter(self, path: str | Path, base: str, digest: str) -> None:
        """The adapters alone, as a folder that PEFT loads. Collective; rank 0 writes. See Policy."""
        config, every = self.config.megatron_cfg.peft, set(hf_shapes(self.architecture))
        write = partial(save_adapter, path, config=config, every=every, base=base, digest=digest)
        checkpoint.written_by_rank_0(write, self.shards.adapter_tensors())

    def save_hf(self, path: str | Path) -> None:
        """A Hugging Face checkpoint folder, adapters added. Collective; rank 0 writes."""
        write = partial(save_hf_checkpoint, path, source=self.source_folder)
        checkpoint.written_by_rank_0(write, self.shards.hf_tensors())

    def _work(self, batch: TrainBatch, rows: Sequence[int], *, train: bool) -> RankWork:
        unit = self.loss_fn.rows_per_unit if train else 1
        ahead = self._depths if train else 0
        plan = plan_micro_batches(batch, rows, self.config, self.groups.data_size, train=train, unit=unit, ahead=ahead)
        own = plan[self.groups.data_rank]
        # Expert-parallel ranks compute for each other, so all must go through equally many micro-batches; and every
        # rank needs one to know the loss's metrics.
        count = max(1, max(len(share) for share in plan) if self.layout.expert > 1 else len(own))
        shares = self.layout.context * (self.layout.tensor if self.layout.sequence_parallel else 1)
        # Experts meet any number of tokens, whatever is padded; of a hybrid's layers, most are others.
        varied = self.architecture.is_moe and not self.architecture.is_hybrid
        shapes = 1 if varied else row_multiple(self.device, self.model.dtype)
        multiple = math.lcm(shares, shapes, token_multiple(self.config))
        return RankWork(batch, own, count, unit, shares, multiple, ahead, self.architecture, self.device)

    def _loss(
        self, hidden: Tensor, layout: TokenLayout, micro: TrainBatch, normalizers: LossNormalizers
    ) -> tuple[Tensor, MetricSums]:
        if not isinstance(self.loss_fn, DistillationLoss):
            logprobs, entropy = (_scatter(values, layout) for values in self._token_logprobs(hidden, layout))
            return self.loss_fn(logprobs, micro, normalizers, entropy)
        comparison, *given = compared(self.loss_fn.divergence, layout, micro, self.teacher_weights)
        found = self._predicted(partial(linear_divergence, comparison), hidden, layout, *given)
        divergence, logprobs, entropy = (_scatter(values, layout) for values in found)
        return self.loss_fn(logprobs, micro, normalizers, entropy, divergence)

    def _token_logprobs(self, hidden: Tensor, layout: TokenLayout, *, with_entropy: bool = True) -> Results:
        of = partial(linear_logprobs, with_entropy=with_entropy, sampled_from=self.loss_fn.sampled_from)
        return self._predicted(of, hidden, layout)

    def _predicted(self, of: Callable[..., Results], hidden: Tensor, layout: TokenLayout, *given: Tensor) -> Results:
        """What a function of the output layer makes of a micro-batch's trained tokens."""
        select, weight = partial(self.model.predictors, hidden), self.model.output_weight()
        return self._outputs(of, select, weight, layout, layout.source, layout.targets, *given)

    def _outputs(
        self,
        of: Callable[..., Results],
        select: Callable[[Tensor], Tensor],
        weight: Tensor,
        layout: TokenLayout,
        source: Tensor,
        *given: Tensor,
    ) -> Results:
        """What `of` makes of R tokens' states (`select` of `source`), [R, ...] each; the first has a gradient."""
        groups = self.groups
        mine: Tensor | None = None
        total, share = source.shape[0], layout.token_ids.shape[0] // self.layout.context
        if self.layout.context > 1:  # on the ranks that have the tokens
            first = groups.context_rank * share
            mine = torch.nonzero((source >= first) & (source < first + share)).flatten()
            source, given = source[mine] - first, tuple(each[mine] for each in given)
        rows = source.shape[0]
        extra = -rows % row_multiple(weight.device, weight.dtype)
        if extra:
            source, *padded = (F.pad(each, (0, 0) * (each.dim() - 1) + (0, extra)) for each in (source, *given))
            given = tuple(padded)
        group = groups.tensor if groups.tensor_size > 1 else None
        start, vocabulary = groups.tensor_rank * weight.shape[0], self.architecture.vocab_size
        layer = OutputLayer(self.config.logprob_chunk_size, vocabulary, start, group)
        parts = (result[:rows] for result in of(select(source), weight, *given, layer))
        if mine is None:
            return tuple(parts)
        whole = (part.new_zeros(total, *part.shape[1:]).index_copy(0, mine, part) for part in parts)
        return tuple(sum_parts(values, groups.context) for values in whole)

    def _predicted_ahead(self, hidden: Tensor, layout: TokenLayout) -> Iterator[Results]:
        weight = self.model.output_weight()
        if self.config.megatron_cfg.mtp_detach_heads:
            weight = weight.detach()
        for states, ahead in zip(self.model.predict_ahead(hidden, layout), layout.ahead, strict=True):
            yield self._outputs(
                linear_predictions, partial(self.model.select, states), weight, layout, ahead.source, ahead.targets
            )

    def _moving(self) -> list[Tensor]:
        biases = [router.expert_bias.data for router in self.model.routers() if router.expert_bias is not None]
        return [*(buffer.values for buffer in self.buffers), *biases]

    @contextmanager
    def _swapped(self, values: list[Tensor]) -> Iterator[None]:
        """The model with other weights; the live ones stay where they are."""
        live = self._moving()
        self._point_at([value.to(self.device, non_blocking=True) for value in values])
        try:
            yield
        finally:
            self._point_at(live)

    def _point_at(self, values: list[Tensor]) -> None:
        for buffer, value in zip(self.buffers, values, strict=False):
            buffer.point_at(value)
        routers = [router for router in self.model.routers() if router.expert_bias is not None]
        for router, value in zip(routers, values[len(self.buffers) :], strict=True):
            assert router.expert_bias is not None
            router.expert_bias.data = value


def _scatter(values: Tensor, layout: TokenLayout) -> Tensor:
    """[R, …] → [n, W, …], zero where nothing is trained."""
    flat = values.new_zeros(layout.shape[0] * layout.shape[1], *values.shape[1:])
    return flat.index_copy(0, layout.cells, values).view(*layout.shape, *values.shape[1:])


class PredictionLoss:
    """The loss of every depth of multi-token prediction over one global batch, summed over micro-batches.

    loss_k   = − mean over trained tokens of log p(t_{i+k+1} | output_layer · h_i^k)
    gradient of    mtp_loss_scaling_factor / depths · Σ_k loss_k    is added to that of the policy's own loss
    """

    def __init__(self, batch: TrainBatch, config: MegatronConfig, on: torch.device) -> None:
        mask = loss_mask(batch.token_mask, batch.sample_mask)
        depths = range(1, config.mtp_num_layers + 1)
        self._counts = [float(mask[:, depth + 1 :].sum(dtype=torch.float64)) for depth in depths]
        self._scale = config.mtp_loss_scaling_factor / len(self._counts)
        self._sums = torch.zeros(2, len(self._counts), dtype=torch.float64, device=on)

    def __call__(self, predicted: Sequence[Results], layout: TokenLayout, micro: TrainBatch) -> Tensor:
        """This micro-batch's share of the loss, of `linear_predictions` of each depth."""
        mask = loss_mask(micro.token_mask, micro.sample_mask).flatten()
        losses, taken = [], []
        for (logprobs, hits), ahead, count in zip(predicted, layout.ahead, self._counts, strict=True):
            weights = mask[ahead.cells]
            losses.append(-torch.where(weights > 0, logprobs * weights, 0.0).sum() / max(count, 1.0))
            taken.append((hits * weights).sum() / max(count, 1.0))
        by_depth = torch.stack(losses)
        self._sums += torch.stack((by_depth.detach(), torch.stack(taken)))
        return self._scale * by_depth.sum()

    def metrics(self, groups: parallel.Groups) -> dict[str, float]:
        """Of every depth: its loss, and in percent how many tokens would be accepted."""
        if groups.data_size > 1:
            dist.all_reduce(self._sums, group=groups.data)
        found: dict[str, float] = {}
        for depth, (loss, taken, count) in enumerate(zip(*self._sums.tolist(), self._counts, strict=True), start=1):
            if count:
                found |= {f"mtp_{depth}_loss": loss, f"mtp_{depth}_acceptance_rate": 100 * taken}
        return found
