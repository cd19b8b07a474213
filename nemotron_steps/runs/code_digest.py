"""A digest of the code a step's result depends on: its module and everything that module imports, statically.

Follows import statements through the step's own top-level package and `nemotron_steps`, without importing anything.
C sources count with the modules beside which they lie.
Layers that only carry data around (api, runs, artifacts, manifests, command line, errors) are left out: changing how a
run is reported must not make every result stale.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

_OWN = __name__.partition(".")[0]
_CARRIERS = tuple(
    f"{_OWN}.{layer}" for layer in ("api", "runs", "artifacts", "manifest", "resolver", "cli", "errors", "testing")
)
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(?P<base>\.*[\w.]*)[ \t]+import[ \t]+(?:\((?P<many>[^)]*)\)|(?P<names>[^\n;#]+))"
    r"|import[ \t]+(?P<plain>[^\n;#]+))",
    re.MULTILINE,
)


_QUOTED = re.compile(r"""["']([A-Za-z_]\w*(?:\.\w+)+)(?::\w+)?["']""")
"""A module named in a string, `"package.module:Name"`: registries that import lazily are followed too."""


def code_digest(module: str) -> str:
    """sha256 over the name and source of every module in the import closure of `module`, and the C sources beside them.

    Raises ModuleNotFoundError if `module` itself cannot be found.
    """
    digest = hashlib.sha256()
    closure = import_closure(module)
    folders = {
        path.parent: name if path.name == "__init__.py" else name.rpartition(".")[0] for name, path in closure.items()
    }
    for folder, package in folders.items():
        closure.update({f"{package}/{path.name}": path for path in folder.glob("*.[ch]")})
    for name, path in sorted(closure.items()):
        digest.update(f"{name}\0".encode())
        digest.update(_file_digest(str(path), path.stat().st_mtime_ns))
    return digest.hexdigest()


def import_closure(module: str) -> dict[str, Path]:
    """Module name → source file of `module` and all it imports from its own package and `nemotron_steps`."""
    roots = {module.partition(".")[0], _OWN}
    folders = {root: _package_folders(root) for root in roots}
    start = _find(module, folders[module.partition(".")[0]])
    if start is None:
        raise ModuleNotFoundError(f"no module named '{module}'", name=module)
    # What a package does when it is imported is done before its module is.
    parents = {name: _find(name, folders[name.partition(".")[0]]) for name in _with_parents(module)}
    found = {name: path for name, path in parents.items() if path is not None}
    frontier = list(found)
    while frontier:
        name = frontier.pop()
        for imported in _imports(str(found[name]), found[name].stat().st_mtime_ns, name):
            if imported.partition(".")[0] not in roots or _is_carrier(imported) or imported in found:
                continue
            path = _find(imported, folders[imported.partition(".")[0]])
            if path is not None:
                found[imported] = path
                frontier.append(imported)
    return found


def _is_carrier(name: str) -> bool:
    return any(name == carrier or name.startswith(f"{carrier}.") for carrier in _CARRIERS)


@lru_cache(maxsize=8192)
def _find(name: str, folders: tuple[Path, ...]) -> Path | None:
    """The source file of a module, found by path so that no package is imported on the way; None if there is none."""
    top, *rest = name.split(".")
    if not rest:
        return _single_module(top)
    for folder in folders:
        path = folder.joinpath(*rest)
        if path.with_name(f"{path.name}.py").is_file():
            return path.with_name(f"{path.name}.py")
        if (path / "__init__.py").is_file():
            return path / "__init__.py"
    return None


def _package_folders(top: str) -> tuple[Path, ...]:
    loaded = sys.modules.get(top)
    if loaded is not None and getattr(loaded, "__path__", None):
        return tuple(Path(p) for p in loaded.__path__)
    spec = importlib.util.find_spec(top)
    return tuple(Path(p) for p in (spec.submodule_search_locations or ())) if spec else ()


def _single_module(top: str) -> Path | None:
    spec = importlib.util.find_spec(top)
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


@lru_cache(maxsize=4096)
def _file_digest(path: str, mtime_ns: int) -> bytes:
    return hashlib.sha256(Path(path).read_bytes()).digest()


@lru_cache(maxsize=4096)
def _imports(path: str, mtime_ns: int, module: str) -> tuple[str, ...]:
    source = Path(path).read_text(encoding="utf-8")
    is_package = path.endswith("__init__.py")
    return tuple(dict.fromkeys(_named_modules(source, module, is_package)))


def _named_modules(source: str, module: str, is_package: bool) -> Iterator[str]:
    for match in _QUOTED.finditer(source):
        yield from _with_parents(match[1])
    for match in _IMPORT.finditer(source):
        if match["plain"] is not None:
            for part in match["plain"].split(","):
                yield from _with_parents(part.split(" as ")[0].strip())
            continue
        base = _absolute(match["base"], module, is_package)
        yield from _with_parents(base)
        listed = re.sub(r"#[^\n]*", "", match["many"] or match["names"] or "")
        for part in listed.split(","):
            name = part.split(" as ")[0].strip()
            if name.isidentifier():
                yield f"{base}.{name}"


def _absolute(base: str, module: str, is_package: bool) -> str:
    dots = len(base) - len(base.lstrip("."))
    if not dots:
        return base
    parts = module.split(".")
    keep = len(parts) - dots + (1 if is_package else 0)
    return ".".join([*parts[:keep], *([base.lstrip(".")] if base.lstrip(".") else [])])


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])
