"""A run's policy, generator, judges and environments as Ray actors (`cluster.backend=ray`); teachers beside the policy,
or on devices of their own.

    devices       policy rank i    generator i                     judges
    colocated     device i         devices i t to i t + t - 1      share the generators' devices
    separate      device i         t devices of its own            share the generators' devices
    num_gpu_nodes > 0                                              all devices of those nodes, shared equally

t is vLLM's tensor-parallel size. A bundle of the placement group is a device, or the t devices of a generator. Ray
gives an actor either part of one GPU or whole GPUs: whoever shares those of a generator with t > 1 gets their names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

from nemotron_steps.config.layout.constraints import device_violations, raise_if_violated
from nemotron_steps.config.layout.parallel_config import JudgeLayout, ParallelConfig, judge_copies, parallel_config_of
from nemotron_steps.config.schema.policy import GenerationConfig
from nemotron_steps.config.schema.rl import ClusterConfig, EnvConfig, NemoGymConfig, RlConfig, VllmModelConfig
from nemotron_steps.engine.generation.sampler import AsyncSampler
from nemotron_steps.engine.placement.cluster import RayCluster
from nemotron_steps.engine.placement.environment_actor import (
    EnvironmentWorker,
    PlacedEnvironmentSet,
    PlacedJudge,
    start_judge,
)
from nemotron_steps.engine.placement.generator_group import GeneratorSettings, RayGenerator
from nemotron_steps.engine.placement.policy_group import PlacedTeachers, RayPolicy
from nemotron_steps.engine.placement.run import Parts, SamplingParts, SamplingWanted, Wanted
from nemotron_steps.engine.setup.backends import build_judge
from nemotron_steps.engine.workers.workers import Worker, places, start_workers, stop_workers
from nemotron_steps.errors import ConfigError
from nemotron_steps.models.architecture import Architecture

_SHARED_BY_JUDGES = 0.2
"""Of a generator's GPU, as Ray counts; memory is bounded by the backends themselves."""


@dataclass(frozen=True)
class DevicePlan:
    """How many devices each part gets; `judges`: copies of each local one."""

    policy: int
    generators: int
    colocated: bool
    judges: Mapping[str, int]
    judge_devices: tuple[int, ...]
    """Devices of each copy, role by role; none when judges share the generators'."""
    gpus: bool
    width: int = 1
    """Devices of one generator."""
    teachers: Mapping[str, int] = field(default_factory=dict)
    """Ranks of each teacher that has devices of its own."""

    @classmethod
    def of(cls, config: RlConfig, judges: Mapping[str, VllmModelConfig]) -> DevicePlan:
        """The plan for `cluster.*`, `policy.generation` and the judges that are loaded here."""
        sizes = replace(parallel_config_of(config), judges=_local(judges))
        raise_if_violated([*device_violations(sizes)])
        return cls(
            policy=sizes.ranks,
            generators=sizes.generating // sizes.generator_width,
            colocated=sizes.colocated,
            width=sizes.generator_width,
            teachers={teacher.name: teacher.ranks(sizes.gpus_per_node) for teacher in sizes.teachers},
            **_for_judges(sizes),
        )

    @classmethod
    def of_sampling(
        cls, cluster: ClusterConfig, config: GenerationConfig, judge_nodes: int, judges: Mapping[str, VllmModelConfig]
    ) -> DevicePlan:
        """The plan of generators without a policy."""
        width, gpus = config.devices_per_generator, cluster.gpus_per_node
        generators = (gpus // width) * (cluster.num_nodes - judge_nodes) if gpus else cluster.policy_workers or 1
        if generators < 1:
            raise ConfigError(
                "no generator has its GPUs",
                where="cluster",
                expected=f"{width} GPUs of one node, beside those kept for judges",
                found=f"{cluster.num_nodes} nodes of {gpus} GPUs, {judge_nodes} of them for judges",
                hints=(f"cluster.num_nodes={judge_nodes + 1} cluster.gpus_per_node={max(width, gpus)}",),
            )
        sizes = ParallelConfig(
            nodes=cluster.num_nodes, gpus_per_node=gpus, judge_nodes=judge_nodes, judges=_local(judges)
        )
        return cls(policy=0, generators=generators, colocated=False, width=width, **_for_judges(sizes))

    @property
    def by_name(self) -> bool:
        """Whether sharing a generator's GPUs goes by their names: it has several, which Ray does not divide."""
        return self.gpus and self.width > 1

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Policy ranks, then separate generators, teachers and judges; colocated, a bundle for each generator."""
        if not self.gpus:
            return [{}] * (self._before_teachers + sum(self.teachers.values()))
        together = [{"GPU": float(self.width)}] * self.generators
        policy = together if self.colocated else [{"GPU": 1.0}] * self.policy + together
        policy += [{"GPU": 1.0}] * sum(self.teachers.values())
        return policy + [{"GPU": float(devices)} for devices in self.judge_devices]

    def policy_bundle(self, rank: int) -> int:
        """Where a policy rank lives."""
        return rank // self.width if self.colocated and self.gpus else rank

    @property
    def _before_teachers(self) -> int:
        """Bundles of policy and generators."""
        if not self.colocated:
            return self.policy + self.generators
        return self.generators if self.gpus else self.policy

    def teacher_bundles(self, name: str) -> range:
        """Where the ranks of a teacher live."""
        first = self._before_teachers
        for each, ranks in self.teachers.items():
            if each == name:
                return range(first, first + ranks)
            first += ranks
        raise KeyError(name)

    def generator_bundle(self, number: int) -> int:
        """Where a generator lives."""
        return number if self.colocated else self.policy + number


def _local(judges: Mapping[str, VllmModelConfig]) -> tuple[JudgeLayout, ...]:
    return tuple(
        JudgeLayout(role, judge.tensor_parallel_size, judge.replicas)
        for role, judge in judges.items()
        if judge.backend != "http"
    )


def _for_judges(sizes: ParallelConfig) -> dict[str, Any]:
    copies = judge_copies(sizes, sizes.judges)
    alone = [judge.width for judge in sizes.judges for _ in range(copies[judge.role])]
    apart = sizes.gpus_per_node and sizes.judge_nodes
    return {"judges": copies, "judge_devices": tuple(alone) if apart else (), "gpus": sizes.gpus_per_node > 0}


def place(config: RlConfig, wanted: Wanted) -> Parts:
    """Start and load everything."""
    chosen = chosen_judges(config.env.nemo_gym, wanted.judges)
    plan = DevicePlan.of(config, chosen)
    with ExitStack() as resources:
        processes = plan.policy + plan.generators * plan.width + sum(plan.teachers.values())
        cluster = RayCluster(config.cluster, workers=processes)
        resources.callback(cluster.close)
        cluster.reserve(plan.bundles)
        policy = RayPolicy(policy_options(plan, cluster), local=cluster.is_local)
        resources.callback(policy.close)
        policy.build(
            config.policy,
            wanted.checkpoint,
            wanted.loss_fn,
            reference=wanted.reference,
            total_steps=wanted.total_steps,
        )
        apart = place_teachers(wanted, plan, cluster, resources)
        beside = None if wanted.teachers is None or apart is not None else policy.build_teachers(wanted.teachers)
        settings = GeneratorSettings(
            wanted.hf_folder,
            config.policy.generation,
            wanted.max_total_length,
            config.policy.precision,
            config.grpo.async_grpo,
            config.policy.router_replay.enabled,
        )
        generator = RayGenerator(settings, generator_options(plan, cluster, policy.workers))
        resources.callback(generator.close)
        generator.update_weights(policy.weights(), 0)
        judges, environments = place_graders(
            config.env, chosen, plan, cluster, generator.workers, resources, seed=config.grpo.seed
        )
        workers = [*policy.workers, *generator.workers, environments.worker]
        workers += [worker for judge in judges.values() for worker in judge.workers]
        workers += apart.workers if apart is not None else []
        return Parts(
            policy,
            generator,
            AsyncSampler(generator, name="policy"),
            [*judges.values(), environments],
            environments,
            resources.pop_all(),
            {"backend": "ray", "workers": places(workers), "weight_sync": generator.transports},
            beside if apart is None else apart,
        )


def policy_options(plan: DevicePlan, cluster: RayCluster) -> list[dict[str, Any]]:
    """Ray's options for the policy's ranks. A share of a GPU is Ray's count: memory is bounded by the backends."""
    # More than half where a bundle has several GPUs, or Ray would put two ranks on one of them.
    share = (0.6 if plan.by_name else 0.4) if plan.colocated else 1.0
    share = share if plan.gpus else 0.0
    return [cluster.options(plan.policy_bundle(rank), share) for rank in range(plan.policy)]


def generator_options(plan: DevicePlan, cluster: RayCluster, ranks: Sequence[Worker]) -> list[dict[str, Any]]:
    """Ray's options for the generators; `ranks` are the policy's, already placed."""
    if plan.by_name and plan.colocated:
        gpus = [
            [gpu for rank in ranks[n * plan.width :][: plan.width] for gpu in rank.gpus] for n in range(plan.generators)
        ]
        return [cluster.options(plan.generator_bundle(number), named=own) for number, own in enumerate(gpus)]
    shared = bool(plan.judges) and not plan.judge_devices
    alone = float(plan.width) if plan.by_name or not shared else 1.0 - _SHARED_BY_JUDGES
    share = 0.0 if not plan.gpus else 0.4 if plan.colocated else alone
    return [cluster.options(plan.generator_bundle(number), share) for number in range(plan.generators)]


def place_teachers(
    wanted: Wanted, plan: DevicePlan, cluster: RayCluster, resources: ExitStack
) -> PlacedTeachers | None:
    """Teachers on devices of their own, loaded; None without such teachers."""
    asked = wanted.teachers
    if asked is None or not plan.teachers:
        return None
    assert asked.topk is not None, "config/schema/opd.py"
    share = 1.0 if plan.gpus else 0.0
    options = {name: [cluster.options(at, share) for at in plan.teacher_bundles(name)] for name in plan.teachers}
    vocab_size = Architecture.from_folder(wanted.hf_folder).vocab_size
    teachers = PlacedTeachers(options, asked.topk, vocab_size, local=cluster.is_local)
    resources.callback(teachers.close)
    teachers.build(asked.apart, asked.checkpoints)
    return teachers


def judge_options(plan: DevicePlan, cluster: RayCluster, generators: Sequence[Worker]) -> list[dict[str, Any]]:
    """Ray's options for every copy of the judges, role by role; `generators` are placed already."""
    found = []
    total = sum(plan.judges.values())
    for number in range(total):
        beside = plan.generator_bundle(number % plan.generators)
        if plan.judge_devices:
            devices = plan.judge_devices[number]
            found.append(cluster.options(len(plan.bundles) - total + number, float(devices)))
        elif plan.by_name and not plan.colocated:
            gpus = generators[number % plan.generators].gpus
            found.append(cluster.options(beside, named=[gpus[number // plan.generators % plan.width]]))
        else:
            found.append(cluster.options(beside, _SHARED_BY_JUDGES / total if plan.gpus else 0.0))
    return found


def place_graders(
    env: EnvConfig,
    chosen: Mapping[str, VllmModelConfig],
    plan: DevicePlan,
    cluster: RayCluster,
    generators: Sequence[Worker],
    resources: ExitStack,
    *,
    seed: int,
) -> tuple[dict[str, PlacedJudge], PlacedEnvironmentSet]:
    """The judges that are loaded here, by role, and the environments in an actor beside the driver."""
    placed: dict[str, PlacedJudge] = {}
    of_judges = iter(judge_options(plan, cluster, generators))
    for role, copies in plan.judges.items():
        placed[role] = start_judge(role, chosen[role], [*islice(of_judges, copies)], seed=seed)
        resources.callback(stop_workers, placed[role].workers)
    served = {
        role: partial(build_judge, role, judge, defer_to=None, seed=seed)
        for role, judge in chosen.items()
        if role not in placed
    }
    here = placed | {role: judge() for role, judge in served.items()}

    def start() -> Worker:
        options = [cluster.beside_driver()]
        return start_workers(EnvironmentWorker, ["environments"], options, [placed | served], device=False)[0]

    environments = PlacedEnvironmentSet(env.nemo_gym.environments, here, start, only=env.only_environment)
    resources.callback(lambda: stop_workers([environments.worker]))
    return placed, environments


def chosen_judges(gym: NemoGymConfig, roles: Collection[str]) -> dict[str, VllmModelConfig]:
    """The configured judges among `roles`."""
    return {role: judge for role in sorted(roles) if (judge := gym.judge(role)) is not None}


def place_sampling(config: ClusterConfig, wanted: SamplingWanted) -> SamplingParts:
    """Start and load a generator without a policy, and who grades what it samples."""
    gym = wanted.env.nemo_gym
    chosen = chosen_judges(gym, wanted.judges)
    plan = DevicePlan.of_sampling(config, wanted.generation, gym.num_gpu_nodes, chosen)
    settings = GeneratorSettings(
        wanted.hf_folder, wanted.generation, wanted.max_total_length, wanted.precision, asynchronous=None
    )
    with ExitStack() as resources:
        cluster = RayCluster(config, workers=plan.generators * plan.width)
        resources.callback(cluster.close)
        cluster.reserve(plan.bundles)
        generator = RayGenerator(settings, generator_options(plan, cluster, []))
        resources.callback(generator.close)
        generator.load()
        judges, environments = place_graders(
            wanted.env, chosen, plan, cluster, generator.workers, resources, seed=wanted.seed
        )
        workers = [*generator.workers, environments.worker, *(w for judge in judges.values() for w in judge.workers)]
        where = {"backend": "ray", "workers": places(workers)}
        return SamplingParts(AsyncSampler(generator, name="policy"), environments, resources.pop_all(), where)
