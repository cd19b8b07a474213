"""Importing megatron-core leaves the process as it was."""

import os
import subprocess
import sys

import pytest
import torch

from nemotron_steps.models import megatron_core


def test_the_import_leaves_torch_compile_and_other_packages_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    megatron_core.load_megatron_core()
    monkeypatch.setattr(megatron_core, "_loaded", False)
    monkeypatch.setitem(sys.modules, "wandb", sys)
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    compile_function = torch.compile
    megatron_core.load_megatron_core()
    assert torch.compile is compile_function
    assert sys.modules["wandb"] is sys and "transformer_engine" not in sys.modules


def test_a_process_leaves_the_group_it_began_as_it_ends_whatever_launcher_it_is_in() -> None:
    program = """
import atexit
import torch.distributed as dist
atexit.register(lambda: print(dist.is_initialized()))
from nemotron_steps.models.megatron_core import ensure_process_group
ensure_process_group()
print(dist.is_initialized())
"""
    launcher = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}
    environment = {**os.environ, **launcher}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=90, env=environment)
    assert done.stdout.split() == ["True", "False"]
