"""What of a training step's config decides its layout, as plain numbers, and the ranks and generators they make."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

MEGATRON, DTENSOR = "policy.megatron_cfg", "policy.dtensor_cfg"
VLLM = "policy.generation.vllm_cfg"
COLOCATED = "policy.generation.colocated"
TEACHERS = "on_policy_distillation.teachers"
APART = "on_policy_distillation.non_colocated_teachers"
JUDGES = "env.nemo_gym"
CUTS = ("tensor", "pipeline", "context", "expert")
"""Fields of a layout that say over how many ranks a model is cut."""
JUDGE_ROLES = ("genrm_model", "judge_model", "safety_model")


def at(key: str, default: Any) -> Any:
    """A field that is read from a config key, and its value where the config does not say."""
    return field(default=default, metadata={"key": key})


def keys_of(model: type) -> dict[str, str]:
    """Field of a dataclass → the config key that it is read `at`."""
    return {each.name: each.metadata["key"] for each in fields(model) if "key" in each.metadata}


@dataclass(frozen=True)
class JudgeLayout:
    """A local judge: GPUs of one copy, copies (None: as many as there is room for), and what its memory depends on."""

    role: str
    width: int = at("tensor_parallel_size", 1)
    replicas: int | None = at("replicas", None)
    backend: str = at("backend", "embedded")
    utilization: float = at("gpu_memory_utilization", 0.8)
    max_sequences: int = at("max_sequences", 256)
    length: int = at("max_total_sequence_length", 32_768)

    @property
    def section(self) -> str:
        """The dotted key of its settings."""
        return f"{JUDGES}.{self.role}.responses_api_models.vllm_model"


@dataclass(frozen=True)
class TeacherLayout:
    """A teacher that has devices of its own: a world of ranks beside the policy's. `gpus_per_node`: None for all of its
    nodes' GPUs; `section`: of the config, where its layout is from."""

    name: str
    tensor: int = at("tensor_model_parallel_size", 1)
    pipeline: int = at("pipeline_model_parallel_size", 1)
    context: int = at("context_parallel_size", 1)
    expert: int = at("expert_model_parallel_size", 1)
    nodes: int = at("num_nodes", 1)
    gpus_per_node: int | None = at("gpus_per_node", None)
    sequence_parallel: bool = at("sequence_parallel", False)
    micro_batch: int | None = at("micro_batch_size", None)
    precision: str | None = at("precision", None)
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

    def key(self, name: str) -> str:
        """The config key behind a field."""
        return f"{self.section}.{_TEACHER_KEYS[name]}"


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of a step's layout. Under the dtensor policy `tensor` is its own (`key`), and the other cuts are 1.
    `samples`: whether the step generates rollouts; `teachers`: those that have devices of their own."""

    dtensor: bool = at(f"{DTENSOR}.enabled", False)
    tensor: int = at(f"{MEGATRON}.tensor_model_parallel_size", 1)
    pipeline: int = at(f"{MEGATRON}.pipeline_model_parallel_size", 1)
    context: int = at(f"{MEGATRON}.context_parallel_size", 1)
    expert: int = at(f"{MEGATRON}.expert_model_parallel_size", 1)
    sequence_parallel: bool = at(f"{MEGATRON}.sequence_parallel", False)
    router_bias_update_rate: float = at(f"{MEGATRON}.moe_router_bias_update_rate", 0.0)
    mtp_layers: int = at(f"{MEGATRON}.mtp_num_layers", 0)
    mtp_repeated: bool = at(f"{MEGATRON}.mtp_use_repeated_layer", False)
    router_replay: bool = at("policy.router_replay.enabled", False)
    batch: int | None = at("policy.train_global_batch_size", None)
    prompts: int | None = at("grpo.num_prompts_per_step", None)
    group: int | None = at("grpo.num_generations_per_prompt", None)
    on_policy: bool = at("loss_fn.force_on_policy_ratio", False)
    nodes: int = at("cluster.num_nodes", 1)
    gpus_per_node: int = at("cluster.gpus_per_node", 0)
    workers: int | None = at("cluster.policy_workers", None)
    backend: str = at("cluster.backend", "process")
    judge_nodes: int = at(f"{JUDGES}.num_gpu_nodes", 0)
    samples: bool = False
    uses_vllm: bool = at("policy.generation.backend", False)
    colocated: bool = at(f"{COLOCATED}.enabled", True)
    generation_devices: int | None = at(f"{COLOCATED}.generation_devices", None)
    generator_width: int = at(f"{VLLM}.tensor_parallel_size", 1)
    generator_experts: int = at(f"{VLLM}.expert_parallel_size", 1)
    judges: tuple[JudgeLayout, ...] = ()
    teachers: tuple[TeacherLayout, ...] = ()
    model_type: str | None = at("policy.model_type", None)
    length: int | None = at("policy.max_total_sequence_length", None)
    length_end: int | None = at("policy.max_total_sequence_length_end", None)
    new_tokens: int | None = at("policy.generation.max_new_tokens", None)
    named: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Field → the config key that it is from, of a model that the step does not train."""

    @classmethod
    def read(cls, get: Callable[[str], Any]) -> ParallelConfig:
        """From a config: dotted key → value, None where it has no such key. A value of another type than the key's is
        taken as missing: the config's own check reports it."""
        values, backend = values_at(cls, get), get(KEYS["uses_vllm"])
        dtensor, vllm = values.get("dtensor", False), backend == "vllm"
        for name, key in KEYS.items():
            megatron = key.startswith(MEGATRON) and name != "mtp_repeated"
            if (dtensor and megatron) or (not vllm and name.startswith("generator_")):
                values.pop(name, None)
        tensor = get(_DTENSOR_TENSOR)
        if dtensor and type(tensor) is int:
            values["tensor"] = tensor
        judges = []
        for judge in map(JudgeLayout, JUDGE_ROLES):
            section = judge.section
            if get(f"{section}.model") is not None and get(f"{section}.backend") in ("vllm", "embedded"):
                judges.append(replace(judge, **values_at(JudgeLayout, get, f"{section}.")))
        values |= {"samples": isinstance(backend, str), "uses_vllm": vllm}
        return cls(**values, judges=tuple(judges), teachers=read_teachers(get))

    def key(self, name: str) -> str:
        """The config key behind a field."""
        return self.named.get(name) or (_DTENSOR_TENSOR if name == "tensor" and self.dtensor else KEYS[name])

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
        return self.separate or (self.ranks if self.gpus_per_node else self.generator_width)

    @cached_property
    def data_parallel(self) -> int | None:
        """Copies of the model; None where they do not come out even."""
        return self.ranks // self.copy_size if self.ranks > 0 and self.ranks % self.copy_size == 0 else None

    @property
    def rollouts(self) -> int | None:
        """Rollouts of a step; None for a step without any."""
        return None if self.prompts is None or self.group is None else self.prompts * self.group


_DTENSOR_TENSOR = f"{DTENSOR}.tensor_parallel_size"
KEYS, _TEACHER_KEYS = keys_of(ParallelConfig), keys_of(TeacherLayout)
"""Field → config key."""


def values_at(model: type, get: Callable[[str], Any], section: str = "") -> dict[str, Any]:
    """Field of a dataclass → its value in a config, where that is of the field's type."""
    found = {}
    for each in fields(model):
        value = get(section + each.metadata["key"]) if "key" in each.metadata else None
        kind = re.match(r"\w+", str(each.type))[0]  # type: ignore[index]
        if kind == "float" and type(value) is int:
            value = float(value)
        if kind == "tuple" and isinstance(value, list):
            value = tuple(value)
        if type(value).__name__ == kind:
            found[each.name] = value
    return found


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


def read_teachers(get: Callable[[str], Any]) -> tuple[TeacherLayout, ...]:
    """Those that have devices of their own, by a config; none where teachers share the policy's. Each has the default
    section's layout, and what its own says: of plain values null takes the default's back."""
    given = get(TEACHERS) if get(f"{APART}.enabled") is True else None
    found = []
    for name in given if isinstance(given, Mapping) else ():
        values = values_at(TeacherLayout, get, f"{APART}.default_teacher_cfg.")
        own = f"{APART}.teacher_overrides.{name}"
        overrides = get(own)
        if overrides is not None:
            said = [key for key in _TEACHER_KEYS.values() if not isinstance(overrides, Mapping) or key in overrides]
            values = {each: value for each, value in values.items() if _TEACHER_KEYS[each] not in said}
            values |= {**values_at(TeacherLayout, get, f"{own}."), "section": own}
        found.append(TeacherLayout(name, **values))
    return tuple(found)


def teachers_named(names: Sequence[str]) -> str:
    """Teachers, in words."""
    *others, last = names
    return f"teachers {', '.join(others)} and {last}" if others else f"teacher {last}"


def judge_copies(sizes: ParallelConfig, judges: tuple[JudgeLayout, ...]) -> Mapping[str, int]:
    """Copies of each judge: those asked for, else as many as fill its equal share of the nodes kept for judges."""
    copies = {judge.role: judge.replicas or 1 for judge in judges}
    if sizes.gpus_per_node and sizes.judge_nodes:
        for judge in judges:
            a_node = sizes.gpus_per_node // judge.width  # copies that it holds: none spans two
            copies[judge.role] = judge.replicas or max(1, sizes.judge_nodes * a_node // len(judges))
    return copies


def stage_layers(layers: int, stages: int) -> list[range]:
    """The layers of each stage, counted from 0: neighbours, as even as they come, the first stages with one more: the
    last has the output layer beside its own."""
    each, extra = divmod(layers, stages)
    starts = [stage * each + min(stage, extra) for stage in range(stages + 1)]
    return [range(start, end) for start, end in pairwise(starts)]
