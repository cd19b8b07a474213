"""What is imported, and how much time it takes, before a command answers."""

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "ray", "vllm", "hydra", "omegaconf", "wandb", "transformers", "megatron"}
HEAVY |= {"pydantic", "rich", "numpy", "aiohttp"}
PROBE = """
import sys, json
from nemotron_steps.cli.main import steps
code = steps(sys.argv[1:])
sys.stderr.write("MODULES" + json.dumps([code, sorted({name.split(".")[0] for name in sys.modules})]))
"""


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def _modules(*arguments: str) -> set[str]:
    result = _run([sys.executable, "-c", PROBE, *arguments])
    code, modules = json.loads(result.stderr.rpartition("MODULES")[2])
    assert code == 0, result.stderr
    return set(modules)


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "toy/train", "--json"),
        ("run", "--help"),
        ("env", "list"),
    ],
)
def test_looking_things_up_imports_nothing_heavy(workplace, arguments):
    _modules("list")  # fills the index
    assert _modules(*arguments).isdisjoint(HEAVY)


def test_a_dry_run_imports_no_framework(workplace):
    loaded = _modules("run", "toy/train", "-c", "tiny", "--dry-run", "optimizer.lr=0.2")
    assert "hydra" in loaded and loaded.isdisjoint({"torch", "ray", "vllm", "wandb", "transformers", "megatron"})


def test_importing_the_light_layers_imports_nothing_heavy():
    code = (
        "import sys, nemotron_steps, nemotron_steps.config.compose, nemotron_steps.config.secrets,"
        "nemotron_steps.cli.main, nemotron_steps.cli.watch, nemotron_steps.manifest.index;"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    loaded = set(_run([sys.executable, "-c", code]).stdout.split())
    assert "nemotron_steps" in loaded
    assert loaded.isdisjoint(HEAVY)
