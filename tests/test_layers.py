"""The folder tree is the architecture: docs/architecture.md's table says who may import whom, and it holds.

The table is read, not repeated: a row a folder, `x/*` for x and every folder in it, `errors` and `rows` for
everybody. Light layers never import torch and its like at import time.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import nemotron_steps

ROOT = Path(nemotron_steps.__file__).parent
TABLE = Path(__file__).parents[1] / "docs" / "architecture.md"
HEAVY = {"torch", "ray", "vllm", "megatron", "transformers", "wandb"}
LIGHT = {"errors", "rows", "sandbox", "environments", "artifacts", "config", "manifest", "resolver", "runs", "cli"}


ROWS: dict[str, list[str]] = {
    name: [entry.strip() for entry in allowed.split(",") if entry.strip()]
    for name, allowed in re.findall(r"^\| `([a-z_/]+)/` \|[^|]*\|([^|]*)\|$", TABLE.read_text(), re.MULTILINE)
}
"""Layer → what its row names, top to bottom."""


def named_by(entry: str) -> set[str]:
    """The layers that an entry of a row stands for."""
    return {name for name in ROWS if name == entry or (entry.endswith("/*") and f"{name}/".startswith(entry[:-1]))}


LAYERS = {name: {name, "errors", "rows"}.union(*map(named_by, entries)) for name, entries in ROWS.items()}
"""Layer → layers it may import."""


def layer_of(parts: tuple[str, ...]) -> str | None:
    """The layer of a module by its path in the package: the longest row that it lies in."""
    return next((found for n in (2, 1) if (found := "/".join(parts[:n])) in LAYERS), None)


def imports_of(file: Path) -> Iterator[tuple[str, bool]]:
    """(module, is at import time) of every import in a file."""
    tree = ast.parse(file.read_text())
    guarded = {
        id(node)
        for check in ast.walk(tree)
        if isinstance(check, ast.If) and "TYPE_CHECKING" in ast.dump(check.test)
        for node in ast.walk(check)
    }
    top = {id(node) for node in ast.walk(tree)} - {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            yield name, id(node) in top and id(node) not in guarded


def modules(layer: str) -> Iterator[Path]:
    for file in sorted((ROOT / layer).rglob("*.py")):
        if layer_of(file.relative_to(ROOT).parent.parts) == layer:
            yield file


def test_every_folder_is_in_the_table():
    folders = {file.relative_to(ROOT).parent.parts for file in ROOT.rglob("*.py")} - {()}
    assert {parts for parts in folders if layer_of(parts) is None} == set()
    assert [layer for layer in LAYERS if not (ROOT / layer).is_dir()] == []
    inner = {"/".join(parts) for parts in folders if len(parts) == 2 and parts[0] in {"engine", "environments"}}
    assert inner <= LAYERS.keys()


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_what_its_row_names(layer: str):
    wrong = []
    for file in modules(layer):
        for module, _ in imports_of(file):
            parts = module.split(".")
            target = layer_of(tuple(parts[1:])) if parts[0] == "nemotron_steps" else None
            if target is not None and target not in LAYERS[layer]:
                wrong.append(f"{file.relative_to(ROOT)} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_a_row_names_only_layers_that_its_layer_imports():
    """A permission that nobody uses is how arrows begin to point up."""
    unused = []
    for layer, entries in ROWS.items():
        imported = {module for file in modules(layer) for module, _ in imports_of(file)}
        used = {layer_of(tuple(m.split(".")[1:])) for m in imported if m.startswith("nemotron_steps.")}
        unused += [f"{layer}: {entry}" for entry in entries if not named_by(entry) & used]
    assert not unused


def test_light_layers_do_not_import_heavy_packages_at_import_time():
    wrong = [
        f"{file.relative_to(ROOT)} imports {module}"
        for layer in LIGHT
        for file in (ROOT / layer).rglob("*.py")
        for module, at_import in imports_of(file)
        if at_import and module.split(".")[0] in HEAVY
    ]
    assert not wrong, "\n".join(wrong)
