"""Tiny Hugging Face checkpoints of every family, written once per session."""

import pytest

from tests.models.checkpoints import SHAPES, write_checkpoint
from tests.models.hybrid_twins import TWINS, write_hybrid


@pytest.fixture(scope="session", params=[*sorted(SHAPES), *(f"nemotron_h_{name}" for name in TWINS)])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / request.param
    if request.param in SHAPES:
        write_checkpoint(request.param, folder)
    else:
        write_hybrid(request.param.removeprefix("nemotron_h_"), folder)
    return folder
