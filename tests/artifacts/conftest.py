from pathlib import Path

import pytest

from nemotron_steps.artifacts.store import ArtifactStore
from tests.s3_server import s3_endpoint, s3_url

__all__ = ["s3_endpoint", "s3_url"]


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "home")
