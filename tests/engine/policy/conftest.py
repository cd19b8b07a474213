"""A tiny checkpoint, and a global batch with groups that share prompts."""

from __future__ import annotations

import pytest

from tests.engine.policy.batches import grouped_batch
from tests.models.checkpoints import write_checkpoint


@pytest.fixture(scope="session")
def qwen3_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy") / "qwen3"
    write_checkpoint("qwen3", folder, initializer_range=0.1)
    return folder


@pytest.fixture
def batch():
    return grouped_batch()
