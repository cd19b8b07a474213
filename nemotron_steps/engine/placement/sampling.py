"""A generator with its judges and environments and no policy in training: in this process, or in Ray actors.

On Ray, a generator has vLLM's tensor-parallel size of GPUs, and there are as many as the GPUs that are not kept for
judges give; on CPU `cluster.policy_workers`. Judges share their devices, or have nodes of their own (`num_gpu_nodes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_steps.config.layout.parallel_config import JudgeLayout, ParallelConfig, judge_copies
from nemotron_steps.config.schema.policy import GenerationConfig
from nemotron_steps.config.schema.rl import ClusterConfig, EnvConfig, VllmModelConfig
from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.errors import ConfigError
from nemotron_steps.models.chat import ChatFormat

if TYPE_CHECKING:
    from nemotron_steps.engine.placement.on_ray import DevicePlan


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
    from nemotron_steps.engine.backends.generator import build_generator
    from nemotron_steps.engine.backends.judges import build_judges
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
