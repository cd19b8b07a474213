"""SFT and DPO of a hybrid: they learn, and a resumed run ends like an unbroken one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.engine.supervised import test_dpo, test_sft
from tests.models.hybrid_twins import write_hybrid


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid") / "latent"
    write_hybrid("latent", folder, initializer_range=0.1)
    return folder


def test_a_hybrid_learns_chats(hybrid: Path, tmp_path: Path) -> None:
    whole, expected = test_sft.run(4, hybrid, tmp_path / "whole")
    assert whole["validation_loss"] < whole["validation_loss_before"]
    test_sft.run(2, hybrid, tmp_path / "broken")
    resumed, found = test_sft.run(4, hybrid, tmp_path / "broken")
    assert [m["loss"] for m in found] == [m["loss"] for m in expected[2:]]
    assert resumed == whole


def test_a_hybrid_learns_preferences(hybrid: Path, tmp_path: Path) -> None:
    summary, record = test_dpo.run(test_dpo.dpo_config(10), hybrid, tmp_path)
    assert record.steps[0]["preference_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert summary["validation_accuracy"] == 1.0 and summary["validation_loss"] < 0.4
