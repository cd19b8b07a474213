"""Experts of a conversation: each token has those it went through first."""

from __future__ import annotations

import numpy as np

from nemotron_steps.engine.rollouts.turns import Trajectory
from nemotron_steps.engine.types import Completion, FinishReason


def completion(tokens, fed, value):
    chosen = None if value is None else np.full((fed, 2, 3), value, np.int16)
    return Completion("r", 0, tokens, [-0.1] * len(tokens), FinishReason.STOP, [0] * len(tokens), chosen)


def told(turns):
    """A prompt of 4, and a tool's 2 tokens between turns of 3."""
    trajectory = Trajectory([1] * 4, [0] * 4, [0.0] * 4)
    for number, value in enumerate(turns):
        if number:
            trajectory.append_context([2, 2])
        trajectory.append_sampled(completion([3] * 3, len(trajectory.token_ids) + 2, value))
    return trajectory


def test_a_turn_tells_only_of_tokens_that_no_turn_before_told_of():
    found = told([7, 8]).routed_experts
    # Of the first turn's last token nothing is known until the second feeds it.
    assert found[:, 0, 0].tolist() == [7] * 6 + [8] * 5 and found.shape == (11, 2, 3)


def test_what_is_cut_off_has_no_experts():
    trajectory = told([7, 8])
    trajectory.cut(8)
    assert len(trajectory.routed_experts) == len(trajectory.token_ids) == 8
