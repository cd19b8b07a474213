"""Arithmetic that can be checked before a GPU is touched: batch sizes and parallel layouts of training steps.

A check is a function of one step's config and the cluster it will run on. Add one to `CHECKS`, or pass a list of
your own to `resolve`. A check looks only at keys that are there, so that it holds for any step that has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nemotron_steps.manifest.models import StepManifest
from nemotron_steps.resolver.problems import BatchSizeProblem, LayoutProblem, PlanProblem
from nemotron_steps.resolver.request import StepConfig


@dataclass(frozen=True)
class CheckSubject:
    """One step to check.

    Attributes:
        key: how the plan calls it.
        manifest: its manifest.
        config: its composed config.
        profile: the env.toml profile it will be launched with (nodes, gpus_per_node, …); empty for none.
    """

    key: str
    manifest: StepManifest
    config: StepConfig
    profile: Mapping[str, Any]

    def integer(self, key: str) -> int | None:
        """An integer config value, or None."""
        value = self.config.flat.get(key)
        return value if type(value) is int else None

    def flag(self, key: str) -> bool:
        """Whether a config value is true."""
        return self.config.flat.get(key) is True

    def where(self, key: str) -> str | None:
        """What set a config key."""
        return self.config.where(key)


Check = Callable[[CheckSubject], Iterable[PlanProblem]]
_TENSOR = "policy.generation.vllm_cfg.tensor_parallel_size"


def batch_sizes(subject: CheckSubject) -> Iterator[PlanProblem]:
    """Rollouts of a step fill whole training batches, and exactly one under force_on_policy_ratio."""
    prompts = subject.integer("grpo.num_prompts_per_step")
    group = subject.integer("grpo.num_generations_per_prompt")
    batch = subject.integer("policy.train_global_batch_size")
    if prompts is None or group is None or batch is None or batch <= 0:
        return
    rollouts = prompts * group
    product = f"num_prompts_per_step {prompts} × num_generations_per_prompt {group} = {rollouts}"
    hint = (f"policy.train_global_batch_size={rollouts}",)
    if subject.flag("loss_fn.force_on_policy_ratio") and batch != rollouts:
        yield BatchSizeProblem(
            f"loss_fn.force_on_policy_ratio in {subject.key} needs one update per step",
            chain=(subject.key,),
            where=subject.where("policy.train_global_batch_size"),
            expected=f"policy.train_global_batch_size = {product}",
            found=str(batch),
            hints=(*hint, "loss_fn.force_on_policy_ratio=false"),
        )
    elif rollouts % batch:
        yield BatchSizeProblem(
            f"the rollouts of a step of {subject.key} do not fill whole training batches",
            chain=(subject.key,),
            where=subject.where("policy.train_global_batch_size"),
            expected=f"policy.train_global_batch_size that divides {product}",
            found=str(batch),
            hints=hint,
        )


def layout_fits(subject: CheckSubject) -> Iterator[PlanProblem]:
    """The training batch splits over the ranks; TP × PP × CP divides the training GPUs (on CPU, the policy's ranks), EP
    divides what is left; generation has GPUs, and vLLM's TP fits on them."""
    layout = _Layout.of(subject)
    yield from _rank_batches(subject, layout)
    if layout.gpus and layout.training > 0:
        yield from _training_layout(subject, layout)
        yield from _vllm_layout(subject, layout)
    elif layout.gpus:
        yield LayoutProblem(
            f"{subject.key} leaves no GPU for training",
            chain=(subject.key,),
            where=subject.where("policy.generation.colocated.generation_devices"),
            expected=f"fewer than {layout.gpus} generation GPUs",
            found=f"{layout.generation} of {layout.gpus}",
            hints=(f"policy.generation.colocated.generation_devices={max(1, layout.gpus // 2)}",),
        )
    elif subject.config.flat.get("cluster.backend") == "ray":
        yield from _cpu_layout(subject, layout)


def profile_size(subject: CheckSubject) -> Iterator[PlanProblem]:
    """The config asks for no more nodes and GPUs than its profile has."""
    for key, name in (("cluster.num_nodes", "nodes"), ("cluster.gpus_per_node", "gpus_per_node")):
        wanted, offered = subject.integer(key), subject.profile.get(name)
        if wanted is None or not isinstance(offered, int) or isinstance(offered, bool) or wanted <= offered:
            continue
        yield LayoutProblem(
            f"{subject.key} asks for more than its profile offers",
            chain=(subject.key,),
            where=subject.where(key),
            expected=f"{key} of at most {offered} (the profile's {name})",
            found=str(wanted),
            hints=(f"{key}={offered}", f"set {name} = {wanted} in the profile of env.toml"),
        )


@dataclass(frozen=True)
class _Layout:
    """How a step's ranks are laid out.

    Attributes:
        sizes: model-parallel sizes by their usual names (TP, PP, CP).
        gpus: GPUs of the whole cluster but those kept for judges; 0 on CPU.
        generation: GPUs that only generate; None when generation shares the training GPUs.
        workers: policy ranks on CPU; None for one.
    """

    sizes: Mapping[str, int]
    gpus: int
    generation: int | None
    workers: int | None

    @staticmethod
    def of(subject: CheckSubject) -> _Layout:
        if subject.flag("policy.dtensor_cfg.enabled"):
            keys = {
                "TP": "policy.dtensor_cfg.tensor_parallel_size",
                "CP": "policy.dtensor_cfg.context_parallel_size",
            }
        else:
            keys = {
                "TP": "policy.megatron_cfg.tensor_model_parallel_size",
                "PP": "policy.megatron_cfg.pipeline_model_parallel_size",
                "CP": "policy.megatron_cfg.context_parallel_size",
            }
        separate = subject.config.flat.get("policy.generation.colocated.enabled") is False
        devices = subject.integer("policy.generation.colocated.generation_devices") or _generator_width(subject)
        return _Layout(
            {name: subject.integer(key) or 1 for name, key in keys.items()},
            (subject.integer("cluster.gpus_per_node") or 0)
            * ((subject.integer("cluster.num_nodes") or 1) - (subject.integer("env.nemo_gym.num_gpu_nodes") or 0)),
            devices if separate else None,
            subject.integer("cluster.policy_workers"),
        )

    @property
    def model_parallel(self) -> int:
        """Ranks that hold one copy of the model."""
        return math.prod(self.sizes.values())

    @property
    def training(self) -> int:
        """GPUs that train."""
        return self.gpus - (self.generation or 0)

    @property
    def data_parallel(self) -> int | None:
        """Copies of the model; None when the layout does not come out even, or on CPU with one rank."""
        ranks = self.training if self.gpus else self.workers or 0
        return ranks // self.model_parallel if ranks > 0 and ranks % self.model_parallel == 0 else None


def _rank_batches(subject: CheckSubject, layout: _Layout) -> Iterator[PlanProblem]:
    batch, ranks = subject.integer("policy.train_global_batch_size"), layout.data_parallel
    if batch is None or ranks is None or batch % ranks == 0:
        return
    yield BatchSizeProblem(
        f"the training batch of {subject.key} does not split over its data-parallel ranks",
        chain=(subject.key,),
        where=subject.where("policy.train_global_batch_size"),
        expected=f"a multiple of {ranks} ranks",
        found=str(batch),
        hints=(f"policy.train_global_batch_size={max(1, round(batch / ranks)) * ranks}",),
    )


def _training_layout(subject: CheckSubject, layout: _Layout) -> Iterator[PlanProblem]:
    if layout.training % layout.model_parallel:
        nodes = _nodes_for(subject, layout)
        yield LayoutProblem(
            f"the parallel layout of {subject.key} does not divide its GPUs",
            chain=(subject.key,),
            where=subject.where("cluster.num_nodes") or subject.where("cluster.gpus_per_node"),
            expected=f"a multiple of {_shown(layout)}",
            found=f"{layout.training} training GPUs",
            hints=(f"cluster.num_nodes={nodes}",) if nodes is not None else (),
        )
        return
    expert = subject.integer("policy.megatron_cfg.expert_model_parallel_size") or 1
    per_stage = layout.training // layout.sizes.get("PP", 1)
    if subject.flag("policy.megatron_cfg.enabled") and per_stage % expert:
        yield LayoutProblem(
            f"the expert parallelism of {subject.key} does not divide the GPUs of a pipeline stage",
            chain=(subject.key,),
            where=subject.where("policy.megatron_cfg.expert_model_parallel_size"),
            expected=f"a divisor of {per_stage}",
            found=str(expert),
        )


def _cpu_layout(subject: CheckSubject, layout: _Layout) -> Iterator[PlanProblem]:
    ranks = layout.workers or 1
    if ranks % layout.model_parallel:
        whole = -(-ranks // layout.model_parallel) * layout.model_parallel
        yield LayoutProblem(
            f"the parallel layout of {subject.key} does not divide its policy ranks",
            chain=(subject.key,),
            where=subject.where("cluster.policy_workers") or subject.where("cluster.backend"),
            expected=f"a multiple of {_shown(layout)}",
            found=f"{ranks} rank{'s' if ranks > 1 else ''} on CPU",
            hints=(f"cluster.policy_workers={whole}",),
        )


def _shown(layout: _Layout) -> str:
    return " × ".join(f"{name} {size}" for name, size in layout.sizes.items()) + f" = {layout.model_parallel}"


def _vllm_layout(subject: CheckSubject, layout: _Layout) -> Iterator[PlanProblem]:
    """A generator's GPUs are on one node, and the GPUs that generate make whole generators."""
    key, tensor = _TENSOR, _generator_width(subject)
    available = layout.gpus if layout.generation is None else layout.generation
    per_node = subject.integer("cluster.gpus_per_node") or 1
    limit = min(available, per_node)
    if tensor > limit:
        yield LayoutProblem(
            f"vLLM's tensor parallelism in {subject.key} needs more GPUs than generate on a node",
            chain=(subject.key,),
            where=subject.where(key),
            expected=f"at most {limit}",
            found=str(tensor),
            hints=(f"{key}={_largest_power_of_two(limit)}",),
        )
    elif available % tensor or per_node % tensor:
        yield LayoutProblem(
            f"vLLM's tensor parallelism in {subject.key} does not divide the GPUs that generate",
            chain=(subject.key,),
            where=subject.where(key),
            expected=f"a divisor of {available} GPUs, and of {per_node} on a node",
            found=str(tensor),
            hints=(f"{key}={math.gcd(tensor, available, per_node)}",),
        )


def _generator_width(subject: CheckSubject) -> int:
    """GPUs of one generator."""
    vllm = subject.config.flat.get("policy.generation.backend") == "vllm"
    return (subject.integer(_TENSOR) or 1) if vllm else 1


def _nodes_for(subject: CheckSubject, layout: _Layout) -> int | None:
    """Fewest nodes, no fewer than asked for, whose GPUs the layout divides; None if no number of nodes does."""
    per_node = subject.integer("cluster.gpus_per_node") or 1
    first = subject.integer("cluster.num_nodes") or 1
    for nodes in range(first, first + layout.model_parallel + 1):
        training = nodes * per_node - (layout.generation or 0)
        if training > 0 and training % layout.model_parallel == 0:
            return nodes
    return None


def _largest_power_of_two(limit: int) -> int:
    return 1 << (max(1, limit).bit_length() - 1)


CHECKS: tuple[Check, ...] = (batch_sizes, layout_fits, profile_size)
"""What every plan is checked with unless told otherwise."""
