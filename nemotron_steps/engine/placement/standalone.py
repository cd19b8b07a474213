"""A policy that trains without a generator (SFT, DPO), where `cluster` puts it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nemotron_steps.config.layout.constraints import device_violations, raise_if_violated
from nemotron_steps.config.layout.parallel_config import JudgeLayout, ParallelConfig, judge_copies, parallel_config_of
from nemotron_steps.config.schema.policy import GenerationConfig, PolicyConfig
from nemotron_steps.config.schema.rl import ClusterConfig, EnvConfig, VllmModelConfig
from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.losses.loss import Loss
from nemotron_steps.engine.placement.cluster import RayCluster
from nemotron_steps.engine.placement.policy_group import RayPolicy
from nemotron_steps.engine.setup.backends import build_policy
from nemotron_steps.engine.types import Policy
from nemotron_steps.engine.workers.workers import places
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.errors import ConfigError
from nemotron_steps.models.chat import ChatFormat

if TYPE_CHECKING:
    from nemotron_steps.config.schema.policy import PolicyConfig
    from nemotron_steps.config.schema.rl import ClusterConfig
    from nemotron_steps.engine.losses.loss import Loss
    from nemotron_steps.engine.placement.on_ray import DevicePlan


@contextmanager
def open_policy(
    cluster: ClusterConfig,
    config: PolicyConfig,
    checkpoint: Path,
    loss_fn: Loss,
    *,
    reference: bool,
    total_steps: int,
) -> Iterator[tuple[Policy, dict[str, Any]]]:
    """A policy that trains without a generator, where `cluster` puts it, until the block ends; and where that is, for
    the journal. Further arguments as `build_policy`."""
    if cluster.backend == "ray":
        placed, resources, where = place_policy(
            cluster, config, checkpoint, loss_fn, reference=reference, total_steps=total_steps
        )
        with resources:
            yield placed, where
    else:
        policy = build_policy(config, checkpoint, loss_fn, reference=reference, total_steps=total_steps)
        yield policy, {"backend": "process"}


def place_policy(
    cluster: ClusterConfig,
    config: PolicyConfig,
    checkpoint: Path,
    loss_fn: Loss,
    *,
    reference: bool,
    total_steps: int,
) -> tuple[RayPolicy, ExitStack, dict[str, Any]]:
    """Start and load one rank a device; the policy, what ends it, and where it is. Arguments as build_policy's.

    Raises:
        ConfigError: `cluster.policy_workers` is not the number of GPUs, or the layout does not divide the ranks.
        UnsupportedError, WorkerLostError: see RayCluster and RayPolicy.
    """
    sizes = parallel_config_of(SimpleNamespace(cluster=cluster, policy=config))
    raise_if_violated(sizes, found=[*device_violations(sizes)])
    ranks = sizes.ranks
    gpu = 1.0 if cluster.gpus_per_node else 0.0
    with ExitStack() as resources:
        ray = RayCluster(cluster, workers=ranks)
        resources.callback(ray.close)
        ray.reserve([{"GPU": gpu} if gpu else {}] * ranks)
        policy = RayPolicy([ray.options(rank, gpu) for rank in range(ranks)], local=ray.is_local)
        resources.callback(policy.close)
        policy.build(config, checkpoint, loss_fn, reference=reference, total_steps=total_steps)
        return policy, resources.pop_all(), {"backend": "ray", "workers": places(policy.workers)}


@dataclass(frozen=True)
class SamplingWanted:
    """What is to sample, and who grades it.

    Args:
        hf_folder: weights, config.json and tokenizer.
        chat: of that tokenizer.
        generation: how it generates.
        env: the environments' settings and judges.
        judges: roles that the rows' environments ask.
        only: the one environment of all rows; None where each names its own.
        max_total_length: longest sequence, in tokens.
        precision: of the weights while sampling.
        seed: of the judges.
    """

    hf_folder: Path
    chat: ChatFormat
    generation: GenerationConfig
    env: EnvConfig
    judges: frozenset[str]
    only: str | None
    max_total_length: int
    precision: str
    seed: int


@dataclass
class SamplingParts:
    """The live parts. `resources` frees them."""

    sampler: AsyncSampler
    environments: EnvironmentSet
    """None is created yet."""
    resources: ExitStack
    where: dict[str, Any]


def place_sampling(cluster: ClusterConfig, wanted: SamplingWanted) -> SamplingParts:
    """Load everything where `cluster` puts it.

    Raises:
        ConfigError: no generator fits the devices. UnsupportedError, WorkerLostError, JudgeUnavailableError: see the
            modules of the parts.
    """
    return _on_ray(cluster, wanted) if cluster.backend == "ray" else _in_process(wanted)


def _in_process(wanted: SamplingWanted) -> SamplingParts:
    from nemotron_steps.engine.setup.backends import build_generator
    from nemotron_steps.engine.setup.judges import build_judges
    from nemotron_steps.environments.judged.judges import HttpJudge

    gym = wanted.env.nemo_gym
    with ExitStack() as resources:
        generator = build_generator(
            wanted.hf_folder,
            wanted.generation,
            wanted.chat,
            max_total_length=wanted.max_total_length,
            precision=wanted.precision,
        )
        resources.callback(generator.close)
        sampler = AsyncSampler(generator, name="policy")
        judges = build_judges(gym, wanted.judges, defer_to=sampler, seed=wanted.seed)
        for judge in judges.values():
            if isinstance(judge, HttpJudge):
                resources.callback(judge.close)
        environments = EnvironmentSet(gym.environments, judges, only=wanted.only)
        return SamplingParts(sampler, environments, resources.pop_all(), {"backend": "process"})


def _on_ray(config: ClusterConfig, wanted: SamplingWanted) -> SamplingParts:
    from nemotron_steps.engine.placement.cluster import RayCluster
    from nemotron_steps.engine.placement.generation_worker import GeneratorSettings
    from nemotron_steps.engine.placement.generator_group import RayGenerator
    from nemotron_steps.engine.placement.on_ray import (
        generator_options,
        judge_options,
        place_environments,
        place_judges,
    )
    from nemotron_steps.engine.workers.workers import places
    from nemotron_steps.models.huggingface import load_hf_weights

    gym = wanted.env.nemo_gym
    chosen = {role: judge for role in sorted(wanted.judges) if (judge := gym.judge(role)) is not None}
    local = {role: judge for role, judge in chosen.items() if judge.backend != "http"}
    plan = device_plan(config, wanted.generation, gym.num_gpu_nodes, local)
    with ExitStack() as resources:
        cluster = RayCluster(config, workers=plan.generators * plan.width)
        resources.callback(cluster.close)
        cluster.reserve(plan.bundles)
        sharing = bool(local) and not plan.judge_devices
        generator = RayGenerator(
            GeneratorSettings(
                wanted.hf_folder, wanted.generation, wanted.max_total_length, wanted.precision, asynchronous=None
            ),
            generator_options(plan, cluster, [], judges=sharing),
        )
        resources.callback(generator.close)
        generator.update_weights(load_hf_weights(wanted.hf_folder).items(), 0)
        options = judge_options(plan, cluster, generator.workers)
        judges = place_judges(local, options, plan.judges, resources, seed=wanted.seed)
        environments = place_environments(gym, chosen, judges, cluster, resources, seed=wanted.seed, only=wanted.only)
        workers = [*generator.workers, environments.worker]
        workers += [worker for judge in judges.values() for worker in judge.workers]
        where = {"backend": "ray", "workers": places(workers)}
        return SamplingParts(AsyncSampler(generator, name="policy"), environments, resources.pop_all(), where)


def device_plan(
    cluster: ClusterConfig, generation: GenerationConfig, judge_nodes: int, local: Mapping[str, VllmModelConfig]
) -> DevicePlan:
    """The devices of generators and judges.

    Args:
        local: judges that are loaded here, by role.

    Raises:
        ConfigError: not one generator has its GPUs.
    """
    from nemotron_steps.engine.placement.on_ray import DevicePlan

    width = generation.devices_per_generator
    gpus = cluster.gpus_per_node
    sizes = ParallelConfig(nodes=cluster.num_nodes, gpus_per_node=gpus, judge_nodes=judge_nodes)
    generators = (gpus // width) * (cluster.num_nodes - judge_nodes) if gpus else cluster.policy_workers or 1
    if generators < 1:
        raise ConfigError(
            "no generator has its GPUs",
            where="cluster",
            expected=f"{width} GPUs of one node, beside those kept for judges",
            found=f"{cluster.num_nodes} nodes of {gpus} GPUs, {judge_nodes} of them for judges",
            hints=(f"cluster.num_nodes={judge_nodes + 1} cluster.gpus_per_node={max(width, gpus)}",),
        )
    judges = tuple(JudgeLayout(role, judge.tensor_parallel_size, judge.replicas) for role, judge in local.items())
    copies = judge_copies(sizes, judges)
    alone = [judge.width for judge in judges for _ in range(copies[judge.role])]
    return DevicePlan(
        policy=0,
        generators=generators,
        colocated=False,
        judges=copies,
        judge_devices=tuple(alone) if gpus and judge_nodes else (),
        gpus=gpus > 0,
        width=width,
    )
