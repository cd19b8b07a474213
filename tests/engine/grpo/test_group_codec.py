"""Groups as tensors and back: everything a rollout has comes back as it was."""

from __future__ import annotations

from nemotron_steps.engine.grpo.buffer import decode_groups, encode_groups
from nemotron_steps.engine.types import RolloutGroup
from tests.engine.engine_samples import rollout


def groups() -> list[RolloutGroup]:
    """Two groups that differ from each other and from what a rollout has by default."""
    first = [
        rollout(
            "a",
            3,
            reward=0.1 + 0.2,
            truncated=True,
            environment="code",
            components={"right": 1.0, "format": 0.25},
            weight_versions=[4, 4, 5, 5],
            turns=[(2, 3), (4, 6)],
            metadata={"turn_texts": ["x", "y"], "teacher": "b", "low_effort": {"reward": 0.1, "length_reward": 2.0}},
        ),
        rollout("a", 1, response=2, reward=-1.5, failure="judge_unavailable", weight_versions=[]),
    ]
    return [RolloutGroup("a", 7, first, 4), RolloutGroup("b", 2, [rollout("b", 0, response=9, version=6)], 6)]


def test_every_field_of_every_rollout_comes_back() -> None:
    assert decode_groups(encode_groups(groups())) == groups()
    assert decode_groups(encode_groups([])) == []
