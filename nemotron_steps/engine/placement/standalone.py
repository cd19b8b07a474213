"""Half a run, where `cluster` puts it: a policy without a generator (SFT, DPO), or a generator without a policy (pass
rates)."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nemotron_steps.config.layout.constraints import device_violations, raise_if_violated
from nemotron_steps.config.layout.parallel_config import JudgeLayout, ParallelConfig, judge_copies, parallel_config_of
from nemotron_steps.config.schema.policy import GenerationConfig, PolicyConfig
from nemotron_steps.config.schema.rl import ClusterConfig, EnvConfig, VllmModelConfig
from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.losses.loss import Loss
from nemotron_steps.engine.placement.cluster import RayCluster
from nemotron_steps.engine.placement.generator_group import GeneratorSettings, RayGenerator
from nemotron_steps.engine.placement.on_ray import DevicePlan, chosen_judges, generator_options, place_graders
from nemotron_steps.engine.placement.parts import judges_here
from nemotron_steps.engine.placement.policy_group import RayPolicy
from nemotron_steps.engine.setup.backends import build_generator
from nemotron_steps.engine.setup.policy_backends import build_policy
from nemotron_steps.engine.types import Policy
from nemotron_steps.engine.workers.workers import places
from nemotron_steps.environments.environment_set import EnvironmentSet
from nemotron_steps.errors import ConfigError
from nemotron_steps.models.chat import ChatFormat


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
    """A policy that trains without a generator, until the block ends; and where it is, for the journal."""
    if cluster.backend != "ray":
        here = build_policy(config, checkpoint, loss_fn, reference=reference, total_steps=total_steps)
        yield here, {"backend": "process"}
        return
    sizes = parallel_config_of(SimpleNamespace(cluster=cluster, policy=config))
    raise_if_violated([*device_violations(sizes)])
    gpu = 1.0 if cluster.gpus_per_node else 0.0
    with ExitStack() as resources:
        ray = RayCluster(cluster, workers=sizes.ranks)
        resources.callback(ray.close)
        ray.reserve([{"GPU": gpu} if gpu else {}] * sizes.ranks)
        policy = RayPolicy([ray.options(rank, gpu) for rank in range(sizes.ranks)], local=ray.is_local)
        resources.callback(policy.close)
        policy.build(config, checkpoint, loss_fn, reference=reference, total_steps=total_steps)
        yield policy, {"backend": "ray", "workers": places(policy.workers)}


@dataclass(frozen=True)
class SamplingWanted:
    """What is to sample, and who grades it; `hf_folder` has weights, config.json and tokenizer."""

    hf_folder: Path
    chat: ChatFormat
    generation: GenerationConfig
    env: EnvConfig
    judges: frozenset[str]
    """Roles that the rows' environments ask."""
    only: str | None
    """The one environment of all rows; None where each names its own."""
    max_total_length: int
    precision: str
    seed: int
    """Of the judges."""


@dataclass
class SamplingParts:
    """The live parts, with environments of which none is created yet. `resources` frees them."""

    sampler: AsyncSampler
    environments: EnvironmentSet
    resources: ExitStack
    where: dict[str, Any]


def place_sampling(cluster: ClusterConfig, wanted: SamplingWanted) -> SamplingParts:
    """Load everything where `cluster` puts it."""
    with ExitStack() as resources:
        if cluster.backend == "ray":
            return _on_ray(cluster, wanted, resources)
        gym = wanted.env.nemo_gym
        generator = build_generator(
            wanted.hf_folder,
            wanted.generation,
            wanted.chat,
            max_total_length=wanted.max_total_length,
            precision=wanted.precision,
        )
        resources.callback(generator.close)
        sampler = AsyncSampler(generator, name="policy")
        judges = judges_here(gym, wanted.judges, resources, defer_to=sampler, seed=wanted.seed)
        environments = EnvironmentSet(gym.environments, judges, only=wanted.only)
        return SamplingParts(sampler, environments, resources.pop_all(), {"backend": "process"})


def _on_ray(config: ClusterConfig, wanted: SamplingWanted, resources: ExitStack) -> SamplingParts:
    gym = wanted.env.nemo_gym
    chosen, local = chosen_judges(gym, wanted.judges)
    plan = device_plan(config, wanted.generation, gym.num_gpu_nodes, local)
    cluster = RayCluster(config, workers=plan.generators * plan.width)
    resources.callback(cluster.close)
    cluster.reserve(plan.bundles)
    settings = GeneratorSettings(
        wanted.hf_folder, wanted.generation, wanted.max_total_length, wanted.precision, asynchronous=None
    )
    generator = RayGenerator(settings, generator_options(plan, cluster, []))
    resources.callback(generator.close)
    generator.load()
    judges, environments = place_graders(
        gym, chosen, plan, cluster, generator.workers, resources, seed=wanted.seed, only=wanted.only
    )
    workers = [*generator.workers, environments.worker, *(w for judge in judges.values() for w in judge.workers)]
    where = {"backend": "ray", "workers": places(workers)}
    return SamplingParts(AsyncSampler(generator, name="policy"), environments, resources.pop_all(), where)


def device_plan(
    cluster: ClusterConfig, generation: GenerationConfig, judge_nodes: int, local: Mapping[str, VllmModelConfig]
) -> DevicePlan:
    """The devices of generators and of judges that are loaded here, by role."""
    width, gpus = generation.devices_per_generator, cluster.gpus_per_node
    generators = (gpus // width) * (cluster.num_nodes - judge_nodes) if gpus else cluster.policy_workers or 1
    if generators < 1:
        raise ConfigError(
            "no generator has its GPUs",
            where="cluster",
            expected=f"{width} GPUs of one node, beside those kept for judges",
            found=f"{cluster.num_nodes} nodes of {gpus} GPUs, {judge_nodes} of them for judges",
            hints=(f"cluster.num_nodes={judge_nodes + 1} cluster.gpus_per_node={max(width, gpus)}",),
        )
    sizes = ParallelConfig(nodes=cluster.num_nodes, gpus_per_node=gpus, judge_nodes=judge_nodes)
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
