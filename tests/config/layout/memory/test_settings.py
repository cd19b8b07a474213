"""What memory depends on, read from a config: whatever it leaves out is as its schema says."""

from dataclasses import fields, replace
from typing import Any

import pytest

from nemotron_steps.config.layout.memory.settings import MemorySettings
from nemotron_steps.config.layout.parallel_config import ParallelConfig, getter
from nemotron_steps.config.schema.base import Section
from nemotron_steps.config.schema.dpo import DpoConfig
from nemotron_steps.config.schema.opd import OpdConfig
from nemotron_steps.config.schema.rl import RlConfig
from nemotron_steps.config.schema.sft import SftConfig


@pytest.mark.parametrize(
    ("schema", "own"), [(RlConfig, {}), (OpdConfig, {"topk": 64}), (DpoConfig, {"dpo": 0.05}), (SftConfig, {})]
)
def test_what_a_config_leaves_out_counts_as_its_schema_says(schema: type[Section], own: dict[str, Any]) -> None:
    nothing, filled = MemorySettings.read({}.get), MemorySettings.read(getter(schema()))
    assert nothing == MemorySettings(ParallelConfig()) and nothing.sizes == ParallelConfig.read({}.get)
    assert replace(filled, sizes=nothing.sizes) == replace(nothing, **own)
    stated = {each.name: getattr(nothing.sizes, each.name) for each in fields(ParallelConfig)}
    known = {name: value for name, value in stated.items() if value is not None and name != "samples"}
    assert {name: getattr(filled.sizes, name) for name in known} == known
    assert filled.sizes.samples is issubclass(schema, RlConfig)


@pytest.mark.parametrize(
    ("values", "budget", "logprob_budget"),
    [
        ({}, None, None),
        ({"packed_tokens": 9, "balanced_tokens": 9}, None, None),
        ({"packs": True}, 4 * 4096, 3 * 4096),
        ({"packs": True, "packed_tokens": 5, "packed_logprob_tokens": 6, "balanced_tokens": 7}, 5, 6),
        ({"balances": True, "balanced_tokens": 5, "balanced_logprob_tokens": 6, "packed_tokens": 7}, 5, 6),
        ({"balances": True, "packed_tokens": 7}, 4 * 4096, 3 * 4096),
        ({"packs": True, "dpo": 0.1}, 8 * 4096, 6 * 4096),
    ],
)
def test_a_budget_is_that_of_the_batching_that_is_on(
    values: dict[str, Any], budget: int | None, logprob_budget: int | None
) -> None:
    settings = MemorySettings(ParallelConfig(), logprob_batch=3, **values)
    assert (settings.budget(), settings.budget(logprobs=True)) == (budget, logprob_budget)
