"""No key of a config is there for nothing: each is read by something other than the schema that declares it."""

import ast
from pathlib import Path

import pytest

import nemotron_steps
from nemotron_steps.config.validation import known_keys, load_schema
from nemotron_steps.manifest.packs import PackSearch, builtin_pack_root, open_pack
from nemotron_steps.manifest.registry import load_registry

ROOT = Path(nemotron_steps.__file__).parent
REGISTRY = load_registry(PackSearch((open_pack(builtin_pack_root(), "nemotron_steps", "built-in"),)))


def names_read() -> set[str]:
    """Attributes read, and words in texts, of the code beside the rules about them."""
    found: set[str] = set()
    for file in ROOT.rglob("*.py"):
        if file.parent == ROOT / "config" / "schema" and file.stem.endswith("_rules"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
                found.update(node.value.split("."))
    return found


@pytest.fixture(scope="module")
def read() -> set[str]:
    return names_read()


@pytest.mark.parametrize(
    "step", [step for step in REGISTRY.steps.values() if step.step.config_schema], ids=lambda s: s.id
)
def test_every_key_is_read_somewhere(step, read):
    bound = {key for port in step.consumes for key in port.bindings}
    keys = set(known_keys(load_schema(step.step.config_schema))) - bound
    leaves = {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}
    assert [key for key in sorted(leaves) if key.rpartition(".")[2] not in read] == []
