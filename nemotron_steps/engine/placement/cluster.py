"""The Ray cluster of a run: an existing one by address, or one on this machine that ends with the run.

Devices are reserved as one placement group, a bundle a device, so that what is meant to share a GPU does.
"""

import logging
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from nemotron_steps.config.locations import variables_set
from nemotron_steps.config.schema.rl import ClusterConfig
from nemotron_steps.errors import UnsupportedError, WorkerLostError, first_line
from nemotron_steps.stopping import left_to_us
from nemotron_steps.waiting import waiting

ATTEMPTS = 3
RESERVE_SECONDS = 120.0
_PASSED_ON = ("NCCL_", "GLOO_", "VLLM_", "HF_", "TOKENIZERS_", "OMP_", "TORCH_", "PYTORCH_")
"""Variables of this process that workers on other machines get as well, unless they are secrets: Ray logs them."""
_SECRET = re.compile("TOKEN|KEY|SECRET|PASSWORD")
_LOCAL_CPU = 0.01
"""CPUs a bundle reserves on a machine of our own: the operating system shares its cores."""


class RayCluster:
    """A connection to Ray, and the devices reserved for this run."""

    def __init__(self, config: ClusterConfig, *, workers: int = 1) -> None:
        try:
            import ray
        except ImportError as error:
            raise UnsupportedError(
                "Ray is not installed",
                where="cluster.backend=ray",
                found=str(error),
                hints=["pip install 'nemotron-steps[ray]'", "cluster.backend=process"],
            ) from error
        self._group: Any = None
        self._bundles: list[int] = []
        self._owned = False
        self._address = config.ray_address or os.environ.get("RAY_ADDRESS") or None
        if ray.is_initialized():
            return
        if self._address is not None:
            _connect(self._address, "RAY_ADDRESS" if config.ray_address is None else "cluster.ray_address")
        else:
            _start(config, workers)
        self._owned = True

    @property
    def is_local(self) -> bool:
        """Whether every process is on this machine, so that servers need listen on loopback alone."""
        import ray

        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        return len([node for node in nodes if node["Alive"]]) == 1

    def reserve(self, bundles: Sequence[Mapping[str, float]]) -> None:
        """Reserve bundles of resources, each on one node; GPUs as given, CPUs added."""
        import ray

        cpus = _LOCAL_CPU if self._address is None else 1.0
        wanted = [{"CPU": cpus, **bundle} for bundle in bundles]
        self._group = ray.util.placement_group(wanted, strategy="PACK")
        try:
            with waiting("the Ray cluster to reserve its devices (`ray status`)", RESERVE_SECONDS):
                ray.get(self._group.ready(), timeout=RESERVE_SECONDS)
        except ray.exceptions.GetTimeoutError:
            free = ray.available_resources()  # type: ignore[no-untyped-call]
            self.release()
            counted = Counter(tuple(bundle.items()) for bundle in wanted)
            raise UnsupportedError(
                "the Ray cluster does not have the devices that the run asks for",
                where="cluster",
                expected=", ".join(f"{count} x {dict(bundle)}" for bundle, count in counted.items()),
                found=", ".join(f"{name}: {free[name]:g}" for name in ("CPU", "GPU") if name in free),
                hints=["ray status", "cluster.gpus_per_node=...", "cluster.num_nodes=..."],
            ) from None
        nodes = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        self._bundles = node_by_node(wanted, [nodes[index] for index in range(len(wanted))])

    def options(self, bundle: int, gpus: float = 0.0, named: Sequence[str] = ()) -> dict[str, Any]:
        """Ray's options for an actor in a bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundles[bundle])
        options = {"num_cpus": 0, "num_gpus": gpus, "scheduling_strategy": where}
        if named:
            # Older versions of Ray hide all GPUs from an actor that is assigned none.
            variables = {"CUDA_VISIBLE_DEVICES": ",".join(named), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
            options["runtime_env"] = {"env_vars": variables}
        return options

    def beside_driver(self) -> dict[str, Any]:
        """Ray's options for an actor on this process's machine, whose loopback servers it may need."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = ray.get_runtime_context().get_node_id()
        return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False)}

    def release(self) -> None:
        """Give the reserved devices back."""
        import ray

        if self._group is not None and ray.is_initialized():
            ray.util.remove_placement_group(self._group)
        self._group = None

    def close(self) -> None:
        """Give devices back, and disconnect; a cluster started here ends."""
        import ray

        self.release()
        if self._owned and ray.is_initialized():
            with left_to_us():
                ray.shutdown()


def node_by_node(bundles: Sequence[Mapping[str, float]], nodes: Sequence[str]) -> list[int]:
    """Which of Ray's bundles to use as bundle 0, 1, 2, ..., so that neighbours share a node: consecutive ranks talk the
    most. Bundles change places only with those that ask for the same. The node with the most of them comes first."""
    alike: dict[tuple[tuple[str, float], ...], list[int]] = {}
    for index, bundle in enumerate(bundles):
        alike.setdefault(tuple(sorted(bundle.items())), []).append(index)
    order = list(range(len(bundles)))
    for slots in alike.values():
        on_node: dict[str, list[int]] = {}
        for index in slots:
            on_node.setdefault(nodes[index], []).append(index)
        filled = sorted(on_node.values(), key=len, reverse=True)  # stable
        for slot, index in zip(slots, (index for node in filled for index in node), strict=True):
            order[slot] = index
    return order


def _connect(address: str, key: str) -> None:
    """Join the cluster at an address, which a config key or a variable names."""
    import ray

    without = "unset RAY_ADDRESS" if key == "RAY_ADDRESS" else f"{key}=null"
    passed = _passed_on(os.environ)
    try:
        with left_to_us(), waiting(f"the Ray cluster at {address} to answer"):
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env={"env_vars": {**passed, "PYTHONPATH": _import_path()}},
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise WorkerLostError(
            "no Ray cluster answers",
            where=f"{key}={address}",
            found=first_line(error),
            hints=["ray start --head --port=6379", f"{without}    # start one on this machine"],
        ) from error


def _passed_on(variables: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(_PASSED_ON) and not _SECRET.search(name.removeprefix("TOKENIZERS_"))
    }


def _start(config: ClusterConfig, workers: int) -> None:
    import ray
    import torch

    gpus = config.gpus_per_node
    if config.num_nodes > 1:
        raise UnsupportedError(
            "several nodes need a Ray cluster that runs on all of them",
            where="cluster.ray_address",
            expected=f"the address of a cluster of {config.num_nodes} nodes",
            found="null",
            hints=["ray start --head", "cluster.ray_address=auto", "cluster.num_nodes=1"],
        )
    there = torch.cuda.device_count()
    if gpus > there:
        raise UnsupportedError(
            "this machine has fewer GPUs than the run asks for",
            where="cluster.gpus_per_node",
            expected=f"at most {there}",
            found=str(gpus),
            hints=["-c one_gpu", f"cluster.gpus_per_node={there}"] if there else ["cluster.gpus_per_node=0"],
        )
    threads = str(max(1, (os.cpu_count() or 1) // max(1, workers)))
    # Everything is on this machine: collectives listen on loopback.
    usual = {"OMP_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    usual["RAY_USAGE_STATS_ENABLED"] = "0"
    variables = {name: os.environ.get(name, value) for name, value in usual.items()} | {"PYTHONPATH": _import_path()}
    problem: Exception | None = None
    for attempt in range(ATTEMPTS):
        try:
            # Workers are children of Ray's own processes and inherit what these are started with.
            with variables_set(variables), left_to_us(), waiting("Ray to start on this machine"):
                ray.init(
                    address="local",  # not whatever else runs on this machine
                    num_cpus=max(1, os.cpu_count() or 1),
                    num_gpus=gpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _node_ip_address="127.0.0.1",
                )
        except (ConnectionError, OSError, RuntimeError) as error:  # a port taken meanwhile, a slow machine
            problem = error
            if ray.is_initialized():
                ray.shutdown()
            time.sleep(2.0**attempt)
        else:
            return
    raise WorkerLostError(
        f"Ray could not be started in {ATTEMPTS} attempts",
        where="cluster.backend=ray",
        found=f"{type(problem).__name__}: {problem}",
        hints=["steps doctor", "cluster.backend=process"],
    )


def _import_path() -> str:
    """PYTHONPATH that lets a worker import whatever this process can."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    ours = [entry for entry in sys.path if not entry.startswith((sys.prefix, sys.base_prefix))]
    return os.pathsep.join(dict.fromkeys(entry for entry in [*given, *ours, os.getcwd()] if entry))
