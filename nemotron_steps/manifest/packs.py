"""Where manifests are: the built-in pack, installed distributions, STEPS_PATH, the working directory.

Standard library only, and no plugin is ever imported. Two layouts are packs:

    ROOT/manifests/**/*.toml, ROOT/configs/<step id>/<config>.yaml       this project's own
    ROOT/types.toml, ROOT/**/step.toml with config/<config>.yaml beside  the public Nemotron layout
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemotron_steps.errors import ManifestError
from nemotron_steps.errors.plugins import entry_points, unusable

ENTRY_POINT_GROUP = "nemotron_steps.packs"
PATH_VARIABLE = "STEPS_PATH"

TYPES_FILE = "types.toml"
BUILT_IN = "nemotron_steps"
"""The pack that ships with the package: its files are right, and are not looked at again with every command."""

_CODE = {
    "entry": (1, "a function of (context)"),
    "preflight": (2, "a function of (config, inputs)"),
    "config_schema": (None, "a pydantic model"),
}
"""Key of `[step]` → how many arguments what it names is called with, and what it is."""
_SKIPPED_FOLDERS = frozenset({"__pycache__", "config", "configs", "node_modules", "site-packages"})


@dataclass(frozen=True)
class Pack:
    """One folder of manifests."""

    name: str
    """In listings and in `PACK:ID`; no other pack of a search has it."""
    origin: str
    """Built-in, installed, STEPS_PATH or working directory."""
    base: Path
    configs: Path | None = None
    """Folder of `<step id>/<config>.yaml`; None in the public layout."""
    strict: bool = True
    """Every `*.toml` below base must be a manifest (this project's layout)."""

    def files(self) -> Iterator[Path]:
        """Every `*.toml` below base, sorted; hidden folders and configs are not entered."""
        for folder, subfolders, names in os.walk(self.base):
            subfolders[:] = sorted(n for n in subfolders if n not in _SKIPPED_FOLDERS and not n.startswith("."))
            for name in sorted(names):
                if name.endswith(".toml") and name != "pyproject.toml":
                    yield Path(folder, name)

    def config_dir(self, file: Path, step_id: str) -> Path | None:
        """Folder of the configs of the step defined in `file`; None if there is none."""
        folder = file.parent / "config" if self.configs is None else self.configs / step_id
        return folder if folder.is_dir() else None


@dataclass(frozen=True)
class PackSearch:
    """What a search for packs found, and what it could not use."""

    packs: tuple[Pack, ...]
    problems: tuple[ManifestError, ...] = ()


def builtin_pack_root() -> Path:
    """Root of the pack that ships with the package: inside an installed wheel, or the checkout."""
    package = Path(__file__).resolve().parent.parent
    shipped = package / "_pack"
    return shipped if shipped.is_dir() else package.parent


def open_pack(root: Path, name: str, origin: str) -> Pack:
    """The pack in `root`, whichever layout it has. Does not check that it holds anything."""
    if (root / "manifests").is_dir():
        return Pack(name, origin, root / "manifests", root / "configs")
    if root.name == "manifests":
        return Pack(name, origin, root, root.parent / "configs")
    return Pack(name, origin, root, None, strict=False)


def find_packs(
    *, environ: Mapping[str, str] | None = None, cwd: Path | None = None, installed: bool = True
) -> PackSearch:
    """Every pack, in the order built-in, installed, STEPS_PATH, working directory (whose `manifests` folder is one).

    A folder reachable in two ways is one pack. A folder that is not there is a problem, not an error."""
    environ = os.environ if environ is None else environ
    cwd = Path.cwd() if cwd is None else cwd
    packs: list[Pack] = []
    problems: list[ManifestError] = []
    names: dict[tuple[int, int], str] = {}

    def add(root: Path, name: str, origin: str, where: str) -> None:
        if not root.is_dir():
            what, expected = f"pack folder '{root}' does not exist", "a folder of manifests"
            problems.append(ManifestError(what, where=where, expected=expected))
            return
        # `PACK:ID` names one step, so no two packs go by one name.
        free, number = name, 2
        while free in names.values():
            free, number = f"{name}-{number}", number + 1
        pack = open_pack(root, free, origin)
        # The folder's own number, and not its real path, which asks about every folder above it.
        status = pack.base.stat()
        if (status.st_dev, status.st_ino) not in names:
            names[status.st_dev, status.st_ino] = free
            packs.append(pack)

    add(builtin_pack_root(), BUILT_IN, "built-in", "the installed package")
    points = entry_points(ENTRY_POINT_GROUP) if installed else ()
    named = [(point.dist.name if point.dist is not None else "?", point.name, point.value) for point in points]
    for distribution, name, value in sorted(named):
        where = f"entry point '{name}' of distribution '{distribution}'"
        folder, problem = _locate(value)
        if folder is None:
            problems.append(ManifestError(f"pack '{name}' cannot be located: {problem}", where=where))
        else:
            add(Path(folder), name, "installed", where)
    for entry in environ.get(PATH_VARIABLE, "").split(os.pathsep):
        if entry:
            root = Path(entry).expanduser()
            add(cwd / root, root.name, PATH_VARIABLE, f"{PATH_VARIABLE}={entry}")
    if (cwd / "manifests").is_dir():
        add(cwd / "manifests", "manifests", "working directory", str(cwd))
    return PackSearch(tuple(packs), tuple(problems))


def unusable_code(step_id: str, named: Mapping[str, Any], where: Callable[..., str]) -> Iterator[ManifestError]:
    """What a `[step]` table names as code and its source says that it cannot be; nothing is imported."""
    for key, (arguments, expected) in _CODE.items():
        reference = named.get(key)
        why = unusable(reference, arguments) if isinstance(reference, str) else None
        if why is not None:
            there = why[1] != str(reference).partition(":")[0]
            install = "pip install -e PACK   # its package, or put the folder that holds it on PYTHONPATH"
            yield ManifestError(
                f"{key} of step '{step_id}' cannot be used: {why[0]}",
                where=where("step", key),
                expected=expected,
                found=f"{reference} ({why[1]})" if there else reference,
                hints=() if there else (install,),
            )


def _locate(value: str) -> tuple[str | None, str | None]:
    """(folder, None) of an entry-point value, or (None, why not): `package`, `package.sub.folder` or `package:folder`,
    a folder inside the package, which need not be importable itself. The package is found, not imported."""
    from importlib.util import find_spec

    module, _, folder = value.partition(":")
    package, *inner = module.strip().split(".")
    inner += [part for part in folder.strip().replace("/", ".").split(".") if part]
    try:
        spec = find_spec(package)
    except (ImportError, ValueError) as error:
        return None, f"package '{package}' cannot be found: {error}"
    if spec is None or not spec.submodule_search_locations:
        return None, f"there is no package '{package}'"
    for location in spec.submodule_search_locations:
        candidate = Path(location, *inner)
        if candidate.is_dir():
            return str(candidate), None
    return None, f"package '{package}' has no folder '{'/'.join(inner) or '.'}'"
