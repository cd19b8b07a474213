"""What of a training step's config decides its layout, as plain numbers, and the ranks and generators they make."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

MEGATRON, DTENSOR = "policy.megatron_cfg", "policy.dtensor_cfg"
VLLM = "policy.generation.vllm_cfg"
COLOCATED = "policy.generation.colocated"
JUDGES = "env.nemo_gym"
JUDGE_ROLES = ("genrm_model", "judge_model", "safety_model")
KEYS = {
    "dtensor": f"{DTENSOR}.enabled",
    "tensor": f"{MEGATRON}.tensor_model_parallel_size",
    "pipeline": f"{MEGATRON}.pipeline_model_parallel_size",
    "context": f"{MEGATRON}.context_parallel_size",
    "expert": f"{MEGATRON}.expert_model_parallel_size",
    "sequence_parallel": f"{MEGATRON}.sequence_parallel",
    "router_bias_update_rate": f"{MEGATRON}.moe_router_bias_update_rate",
    "mtp_layers": f"{MEGATRON}.mtp_num_layers",
    "mtp_repeated": f"{MEGATRON}.mtp_use_repeated_layer",
    "router_replay": "policy.router_replay.enabled",
    "batch": "policy.train_global_batch_size",
    "prompts": "grpo.num_prompts_per_step",
    "group": "grpo.num_generations_per_prompt",
    "on_policy": "loss_fn.force_on_policy_ratio",
    "nodes": "cluster.num_nodes",
    "gpus_per_node": "cluster.gpus_per_node",
    "workers": "cluster.policy_workers",
    "backend": "cluster.backend",
    "judge_nodes": f"{JUDGES}.num_gpu_nodes",
    "colocated": f"{COLOCATED}.enabled",
    "generation_devices": f"{COLOCATED}.generation_devices",
    "uses_vllm": "policy.generation.backend",
    "generator_width": f"{VLLM}.tensor_parallel_size",
    "generator_experts": f"{VLLM}.expert_parallel_size",
    "model_type": "policy.model_type",
    "length": "policy.max_total_sequence_length",
    "length_end": "policy.max_total_sequence_length_end",
    "new_tokens": "policy.generation.max_new_tokens",
}
"""Field of `ParallelConfig` → config key. Under the dtensor policy `tensor` is its own (`key_of`)."""
_FLAGS = {"dtensor", "sequence_parallel", "mtp_repeated", "router_replay", "on_policy", "colocated"}
_TEXTS = {"backend", "model_type"}
_OF_MEGATRON = {"tensor", "pipeline", "context", "expert", "sequence_parallel", "router_bias_update_rate", "mtp_layers"}
_OF_VLLM = {"generator_width", "generator_experts"}


@dataclass(frozen=True)
class JudgeLayout:
    """A local judge: GPUs of one copy, and copies (None: as many as there is room for)."""

    role: str
    width: int = 1
    replicas: int | None = None

    @property
    def section(self) -> str:
        """The dotted key of its settings."""
        return f"{JUDGES}.{self.role}.responses_api_models.vllm_model"


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes under the names of `KEYS`.

    Attributes:
        samples: whether the step generates rollouts.
        uses_vllm: whether vLLM generates them.
        judges: local ones that are configured.
        teachers: those that have devices of their own.
    """

    dtensor: bool = False
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = False
    router_bias_update_rate: float = 0.0
    mtp_layers: int = 0
    mtp_repeated: bool = False
    router_replay: bool = False
    batch: int | None = None
    prompts: int | None = None
    group: int | None = None
    on_policy: bool = False
    nodes: int = 1
    gpus_per_node: int = 0
    workers: int | None = None
    backend: str = "process"
    judge_nodes: int = 0
    samples: bool = False
    uses_vllm: bool = False
    colocated: bool = True
    generation_devices: int | None = None
    generator_width: int = 1
    generator_experts: int = 1
    judges: tuple[JudgeLayout, ...] = ()
    teachers: tuple[TeacherLayout, ...] = ()
    model_type: str | None = None
    length: int | None = None
    length_end: int | None = None
    new_tokens: int | None = None

    @classmethod
    def read(cls, get: Callable[[str], Any]) -> ParallelConfig:
        """From a config.

        Args:
            get: dotted key → its value, or None where the config has no such key. A value of another type than the
                key's is taken as missing: the config's own check reports it.
        """

        said = {field: value for field, key in KEYS.items() if (value := get(key)) is not None}
        values: dict[str, Any] = {field: value for field, value in said.items() if type(value) is _kind(field)}
        rate, generation = said.get("router_bias_update_rate"), said.get("uses_vllm")
        if isinstance(rate, int | float):
            values["router_bias_update_rate"] = float(rate)
        if values.get("dtensor"):
            tensor = get(key_of("tensor", True))
            values = {field: value for field, value in values.items() if field not in _OF_MEGATRON}
            values |= {"tensor": tensor} if type(tensor) is int else {}
        if generation != "vllm":
            values = {field: value for field, value in values.items() if field not in _OF_VLLM}
        values |= {"samples": isinstance(generation, str), "uses_vllm": generation == "vllm"}
        return cls(**values, judges=_judges(get), teachers=read_teachers(get))

    @cached_property
    def copy_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor * self.pipeline * self.context

    @cached_property
    def gpus(self) -> int:
        """GPUs of the cluster but those kept for judges and teachers; 0 on CPU, negative where these get more than
        there are."""
        return self.gpus_per_node * (self.nodes - self.judge_nodes) - self.teaching

    @cached_property
    def teaching(self) -> int:
        """GPUs that teachers have for themselves; 0 on CPU."""
        return sum(teacher.ranks(self.gpus_per_node) for teacher in self.teachers) if self.gpus_per_node else 0

    @cached_property
    def separate(self) -> int:
        """Devices that only generate; 0 where generators share the policy's."""
        if not self.samples or self.colocated:
            return 0
        return self.generation_devices or self.generator_width

    @cached_property
    def ranks(self) -> int:
        """Policy ranks: GPUs that train, or processes on CPU. Below 1 where no GPU is left."""
        return self.gpus - self.separate if self.gpus_per_node else self.workers or 1

    @cached_property
    def generating(self) -> int:
        """Devices that generate."""
        if not self.samples:
            return 0
        if not self.gpus_per_node:
            return self.separate or self.generator_width
        return self.separate or self.ranks

    @cached_property
    def data_parallel(self) -> int | None:
        """Copies of the model; None where they do not come out even."""
        return self.ranks // self.copy_size if self.ranks > 0 and self.ranks % self.copy_size == 0 else None

    @property
    def rollouts(self) -> int | None:
        """Rollouts of a step; None for a step without any."""
        return None if self.prompts is None or self.group is None else self.prompts * self.group


def _kind(field: str) -> type:
    return bool if field in _FLAGS else str if field in _TEXTS else int


def key_of(field: str, dtensor: bool) -> str:
    """The config key behind a field of `ParallelConfig`."""
    return f"{DTENSOR}.tensor_parallel_size" if field == "tensor" and dtensor else KEYS[field]


def getter(config: Any) -> Callable[[str], Any]:
    """Dotted key → value of a validated config, None where it has no such key."""

    def get(key: str) -> Any:
        node = config
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else getattr(node, part, None)
        return node

    return get


def parallel_config_of(config: Any) -> ParallelConfig:
    """Of a step's validated config."""
    return ParallelConfig.read(getter(config))


def judge_copies(sizes: ParallelConfig, judges: tuple[JudgeLayout, ...]) -> Mapping[str, int]:
    """Copies of each judge: those asked for, else as many as fill its equal share of the nodes kept for judges."""
    copies = {judge.role: judge.replicas or 1 for judge in judges}
    if sizes.gpus_per_node and sizes.judge_nodes:
        for judge in judges:
            a_node = sizes.gpus_per_node // judge.width  # copies that it holds: none spans two
            copies[judge.role] = judge.replicas or max(1, sizes.judge_nodes * a_node // len(judges))
    return copies


def _judges(get: Callable[[str], Any]) -> tuple[JudgeLayout, ...]:
    """Judges that have a model to load here."""
    found = []
    for role in JUDGE_ROLES:
        section = f"{JUDGES}.{role}.responses_api_models.vllm_model"
        if get(f"{section}.model") is None or get(f"{section}.backend") not in ("vllm", "embedded"):
            continue
        width, replicas = get(f"{section}.tensor_parallel_size"), get(f"{section}.replicas")
        found.append(JudgeLayout(role, width if type(width) is int else 1, replicas if type(replicas) is int else None))
    return tuple(found)


def common_divisor(*counts: int) -> int:
    """The greatest, at least 1."""
    return max(1, math.gcd(*counts))


def stage_layers(layers: int, stages: int) -> list[range]:
    """The layers of each stage, counted from 0: neighbours, as even as they come.

    The first stages have one more where they do not come out even: the last has the output layer beside its own.
    """
    each, extra = divmod(layers, stages)
    starts = [stage * each + min(stage, extra) for stage in range(stages + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


TEACHERS = "on_policy_distillation.teachers"
APART = "on_policy_distillation.non_colocated_teachers"
_NAMES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "nodes": "num_nodes",
    "gpus_per_node": "gpus_per_node",
    "sequence_parallel": "sequence_parallel",
    "micro_batch": "micro_batch_size",
    "precision": "precision",
}

_KINDS = {"sequence_parallel": bool, "precision": str}


@dataclass(frozen=True)
class TeacherLayout:
    """One teacher's.

    Attributes:
        gpus_per_node: None for all GPUs of its nodes.
        section: of the config, where its layout is from.
    """

    name: str
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    nodes: int = 1
    gpus_per_node: int | None = None
    sequence_parallel: bool = False
    micro_batch: int | None = None
    precision: str | None = None
    section: str = f"{APART}.default_teacher_cfg"

    @property
    def copy_size(self) -> int:
        """Ranks that hold one copy."""
        return self.tensor * self.pipeline * self.context

    def ranks(self, cluster: int) -> int:
        """Its ranks, on nodes of so many GPUs; 0: as many processes as hold one copy."""
        if not cluster:
            return math.lcm(self.copy_size, self.pipeline * self.expert)
        return self.nodes * (self.gpus_per_node or cluster)

    def with_values(self, values: Mapping[str, Any]) -> TeacherLayout:
        """The same under other values of config keys."""
        changed = {name: values[self.key(name)] for name in _NAMES if self.key(name) in values}
        return replace(self, **changed)

    def key(self, field: str) -> str:
        """The config key behind a field."""
        return f"{self.section}.{_NAMES[field]}"


def teachers_named(names: Sequence[str]) -> str:
    """Teachers, in words."""
    *others, last = names
    return f"teachers {', '.join(others)} and {last}" if others else f"teacher {last}"


def read_teachers(get: Callable[[str], Any]) -> tuple[TeacherLayout, ...]:
    """Those that have devices of their own, by a config; none where teachers share the
    policy's."""
    if get(f"{APART}.enabled") is not True:
        return ()
    given = get(TEACHERS)
    return tuple(_read(name, get) for name in given) if isinstance(given, Mapping) else ()


def _read(name: str, get: Callable[[str], Any]) -> TeacherLayout:
    values: dict[str, Any] = {}
    own = f"{APART}.teacher_overrides.{name}"
    overrides = get(own)
    for section in (f"{APART}.default_teacher_cfg", own):
        for field, key in _NAMES.items():
            value = get(f"{section}.{key}")
            if type(value) is _KINDS.get(field, int):  # of another type: the config's own check reports it
                values[field] = value
            elif section == own and value is None and _names(overrides, key):
                values.pop(field, None)  # null takes the default section's back
    if overrides is not None:
        values["section"] = own
    return TeacherLayout(name, **values)


def _names(section: Any, key: str) -> bool:
    """Whether a section says something of a key: plain values may leave it out, a validated section has them all."""
    return key in section if isinstance(section, Mapping) else hasattr(section, key)
