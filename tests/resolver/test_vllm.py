"""Generators without a policy, on the devices that they are given."""

from __future__ import annotations

from typing import Any

import pytest

from nemotron_steps.manifest.models import StepManifest, StepTable
from nemotron_steps.resolver.checks import CheckSubject
from nemotron_steps.resolver.layout import generators_have_gpus
from nemotron_steps.resolver.request import StepConfig

TENSOR = "generation.vllm_cfg.tensor_parallel_size"


@pytest.mark.parametrize(
    ("width", "experts", "gpus", "hints"),
    [
        (16, 1, 8, (f"{TENSOR}=8", "cluster.gpus_per_node=16")),
        (12, 12, 8, (f"{TENSOR}=4 generation.vllm_cfg.expert_parallel_size=4", "cluster.gpus_per_node=12")),
        (8, 1, 8, None),
        (16, 1, 0, None),  # processes on CPU
    ],
)
def test_a_generator_has_its_gpus_on_one_node(
    width: int, experts: int, gpus: int, hints: tuple[str, ...] | None
) -> None:
    sizes = {"tensor_parallel_size": width, "expert_parallel_size": experts}
    values: dict[str, Any] = {"generation": {"backend": "vllm", "vllm_cfg": sizes}}
    values["cluster"] = {"backend": "ray", "gpus_per_node": gpus}
    manifest = StepManifest(step=StepTable(id="s"))
    told = list(generators_have_gpus(CheckSubject("s", manifest, StepConfig(values), {})))
    assert [problem.hints for problem in told] == ([] if hints is None else [hints])
