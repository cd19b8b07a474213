"""SFT and DPO of a hybrid: they learn, with its blocks of multi-token prediction, and a resumed run ends like an
unbroken one."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.engine.supervised import test_dpo, test_sft
from tests.models.hybrid_twins import write_hybrid

AHEAD = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True, "mtp_loss_scaling_factor": 0.3}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid") / "latent"
    write_hybrid("latent", folder, initializer_range=0.1)
    return folder


@pytest.fixture(scope="module")
def predicting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid") / "mtp"
    write_hybrid("mtp", folder, initializer_range=0.1)
    return folder


def assert_learned(steps: list[dict[str, Any]], most: float) -> None:
    """Both depths predict better at the end, to `most` nats."""
    for depth in (1, 2):
        first, last = (step[f"mtp_{depth}_loss"] for step in (steps[0], steps[-1]))
        assert first > 5 and last < most
        drafts = [step[f"mtp_{depth}_acceptance_rate"] for step in (steps[0], steps[-1])]
        assert drafts[1] > drafts[0] + 20


def test_blocks_learn_chats_beside_it(predicting: Path, tmp_path: Path) -> None:
    _, expected = test_sft.run(8, predicting, tmp_path / "whole", AHEAD)
    assert_learned(expected[1:], 2.5)
    test_sft.run(6, predicting, tmp_path / "broken", AHEAD)
    _, found = test_sft.run(8, predicting, tmp_path / "broken", AHEAD)
    for mine, theirs in zip(found[1:], expected[7:], strict=True):
        assert [mine[f"mtp_{depth}_loss"] for depth in (1, 2)] == [theirs[f"mtp_{depth}_loss"] for depth in (1, 2)]


def test_blocks_learn_preferred_and_other_answers_beside_it(predicting: Path, tmp_path: Path) -> None:
    """The preference is learned as without them, and half of the answers, the preferred ones, can be foreseen."""
    megatron = {"optimizer": {"lr": 3e-3}, **AHEAD}
    summary, record = test_dpo.run(test_dpo.dpo_config(10, megatron_cfg=megatron), predicting, tmp_path)
    assert record.steps[0]["preference_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert summary["validation_accuracy"]["after"] == 1.0 and summary["validation_loss"]["after"] < 0.4
    assert_learned(record.steps, 4.5)
