"""Teachers of on-policy distillation that have devices of their own, as plain numbers.

A teacher is a world of ranks beside the policy's, with a layout of its own; its GPUs are taken off the cluster's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
class TeacherSizes:
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

    def with_values(self, values: Mapping[str, Any]) -> TeacherSizes:
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


def read_teachers(get: Callable[[str], Any]) -> tuple[TeacherSizes, ...]:
    """Those that have devices of their own, by a config (`get` as `LayoutSizes.read`'s); none where teachers share the
    policy's."""
    if get(f"{APART}.enabled") is not True:
        return ()
    given = get(TEACHERS)
    return tuple(_read(name, get) for name in given) if isinstance(given, Mapping) else ()


def _read(name: str, get: Callable[[str], Any]) -> TeacherSizes:
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
    return TeacherSizes(name, **values)


def _names(section: Any, key: str) -> bool:
    """Whether a section says something of a key: plain values may leave it out, a validated section has them all."""
    return key in section if isinstance(section, Mapping) else hasattr(section, key)
