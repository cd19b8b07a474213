"""The dtensor policy's learning rate is torch's."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from nemotron_steps.config.schema.policy import TorchSchedulerConfig
from nemotron_steps.engine.policy.optimizer import TorchLearningRate

LINEAR = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 4}}
COSINE = {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": 4, "eta_min": 2.0}}


def entries(*given):
    return [TorchSchedulerConfig.model_validate(entry) for entry in given]


def test_without_schedulers_the_rate_is_constant():
    assert [TorchLearningRate(3.0, ()).at(step) for step in (0, 1, 100)] == [3.0] * 3


def test_schedulers_follow_each_other_at_their_milestones():
    rate = TorchLearningRate(10.0, entries(LINEAR, COSINE, {"milestones": [4]}))
    found = [rate.at(step) for step in range(9)]
    assert found[:5] == pytest.approx([1.0, 3.25, 5.5, 7.75, 10.0])
    assert found[6] == pytest.approx(6.0) and found[8] == pytest.approx(2.0)


def test_a_resumed_run_has_the_rate_of_its_step():
    rate = TorchLearningRate(10.0, entries(LINEAR))
    assert (rate.at(3), rate.at(1), rate.at(3)) == pytest.approx((7.75, 3.25, 7.75))


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {**LINEAR, "milestones": [4]},
        {"kwargs": {"factor": 1.0}, "milestones": [4]},
        {**LINEAR, "kwargs": {"T_max": 4}},
        {"name": "torch.optim.lr_scheduler.StepLR"},
    ],
)
def test_what_torch_would_not_take_is_refused(entry):
    with pytest.raises(ValidationError):
        TorchSchedulerConfig.model_validate(entry)
