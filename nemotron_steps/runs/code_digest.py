"""The code that a result depends on, found by following imports statically: nothing is imported on the way.

By content: the package of what is named (a step, an environment, a function), `nemotron_steps`, and what third parties'
code imports that no installed distribution brings. Other distributions by version, and the standard library not at
all. What `nemotron_steps` itself needs does not count (docs/decisions/what-a-cache-key-leaves-out.md).
C sources count with the modules beside which they lie, and files that third parties' code names in a string with it.
Layers that only carry data around (api, runs, manifests, command line, errors) are left out: changing how a run is
reported must not make every result stale.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path

_OWN = __name__.partition(".")[0]
_CARRIERS = tuple(f"{_OWN}.{layer}" for layer in ("api", "runs", "manifest", "resolver", "cli", "errors", "testing"))
_STATEMENT = (
    r"[ \t]*(?:from[ \t]+(?P<base>\.*[\w.]*)[ \t]*import(?:[ \t]*\((?P<many>[^)]*)\)|[ \t]+(?P<names>[^\n;#(]+))"
    r"|import[ \t]+(?P<plain>[^\n;#]+))"
)
_IMPORT = re.compile(f"^{_STATEMENT}", re.MULTILINE)
_IMPORT_ANYWHERE = re.compile(f"(?:^|[;:]){_STATEMENT}", re.MULTILINE)
"""As others write it: `try: import x`. It takes longer."""
_CALLED = re.compile(r"\b(?:import_module|__import__)\(\s*(?:[\"']([\w.]+)[\"']|(f[\"']\{__name__\}\.)?)")
"""An import by a call. One that puts the name together may mean every module beside it."""
_QUOTED = re.compile(r"""["']([A-Za-z_]\w*(?:\.\w+)+)(?::\w+)?["']""")
"""A module named in a string, `"package.module:Name"`: registries that import lazily are followed too."""
_TEXT = re.compile(r"""["']([^"'\n\0]{1,200})["']""")
_WRITES = re.compile(r"""["'][wax]b?\+?["']|write|touch|dump|save|log|append\(""", re.IGNORECASE)
"""What a line has that writes to the file that it names."""
_HEADER = re.compile(r"^(Name|Version): *(.+?) *$", re.MULTILINE)


class Code:
    """What was reached so far.

    Attributes:
        modules: module name → its source.
        files: "code NAME", or "file NAME" for the user's own, → every file of that name.
        distributions: name → version, of what third parties' code imports.
    """

    def __init__(self) -> None:
        self.modules: dict[str, Path] = {}
        self.files: dict[str, set[Path]] = {}
        self.distributions: dict[str, str] = {}
        self._seen: set[Path] = set()
        self._c_seen: set[Path] = set()
        self._places: dict[str, tuple[tuple[Path, ...], Path | None]] = {}
        self._by_content: set[str] = {_OWN}
        self._mates: set[tuple[str, str]] = set()
        """The distributions of packages that are followed by content: all that they bring is."""
        self._search: dict[Path, None] = {}
        """Where imports are looked for that sys.path does not have: folders of the user's files."""
        self._pending: list[tuple[str, Path, str, str]] = []

    def add_module(self, name: str) -> bool:
        """Follow `package.module`, its package by content; whether it was found."""
        top = name.partition(".")[0]
        folders, single = self._place(top)
        if _is_stdlib(top) or _find(name, folders, single) is None:
            return False
        self._by_content.add(top)
        if top != _OWN:
            self._mates.update(self._brought_by(top))
        # What a package does when it is imported is done before its module is.
        for parent in _with_parents(name):
            if not _is_carrier(parent) or parent == name:
                self._take(parent, _find(parent, folders, single), "code")
        self._follow()
        return True

    def add_dotted(self, name: str) -> None:
        """Follow the module of `package.module.Name`; the version, where an installed distribution brings it."""
        if brought := self._brought_by(name.partition(".")[0]):
            self.distributions.update(brought)
        while not brought and not self.add_module(name) and "." in name:
            name = name.rpartition(".")[0]

    def add_file(self, path: Path) -> None:
        """Follow a Python file of the user's own."""
        path = path.absolute()
        self._search[path.parent] = None
        self._take(path.stem, path, "file")
        self._follow()

    def _take(self, module: str, path: Path | None, kind: str) -> None:
        if path is None or path in self._seen:
            return
        self._seen.add(path)
        self.modules.setdefault(module, path)
        *parents, last = module.removeprefix(f"{_OWN}.").split(".")
        folder = "/".join([*parents, last, ""] if path.name == "__init__.py" else [*parents, ""]).lstrip("/")
        self.files.setdefault(f"{kind} {folder}{path.name}", set()).add(path)
        for source in () if path.parent in self._c_seen else path.parent.glob("*.[ch]"):
            self.files.setdefault(f"{kind} {folder}{source.name}", set()).add(source)
        self._c_seen.add(path.parent)
        if path.suffix == ".py":
            self._pending.append((module, path, kind, folder))

    def _follow(self) -> None:
        while self._pending:
            module, path, kind, folder = self._pending.pop()
            top = module.partition(".")[0]
            stamp = (str(path), path.stat().st_mtime_ns, path.stat().st_size)
            if top == _OWN and kind == "code":
                for name, found in _own_imports(*stamp, module, self._place(top)[0]):
                    self._take(name, found, kind)
                continue
            self._take_named(path, _source(*stamp), f"{kind} {folder}")
            for name in _imports(*stamp, module):
                if not _is_carrier(name):
                    self._reach(name, kind)

    def _take_named(self, path: Path, source: str, prefix: str) -> None:
        """Files that a source names in strings, from its folder, to read them; where it puts folders on sys.path,
        imports are looked for there too."""
        texts = {text for text in _TEXT.findall(source) if text.strip("./")}
        folders = [path.parent, *(path.parent / text for text in texts if (path.parent / text).is_dir())]
        if "sys.path" in source:
            self._search.update(dict.fromkeys(folders))
        read = {text for line in source.splitlines() if not _WRITES.search(line) for text in _TEXT.findall(line)}
        for text in read & texts:
            if re.search(r"\w\.\w+$", text):
                files = {(folder / text).resolve() for folder in folders if (folder / text).is_file()} - self._seen
                if files:
                    self.files.setdefault(f"{prefix}{text.rpartition('/')[2]}", set()).update(files)

    def _reach(self, name: str, kind: str) -> None:
        quoted, name = name.startswith('"'), name.lstrip('"')
        top = name.partition(".")[0]
        if _is_stdlib(top) or (quoted and top not in self._by_content):
            return
        folders, single = self._place(top)
        if not folders and single is None:
            for folder in self._search:
                self._take(name, _find(f".{name}", (folder,), None), kind)
            return
        brought = set() if top in self._by_content else self._brought_by(top)
        if brought and not brought & self._mates:
            self.distributions.update(brought)
        else:
            self._take(name, _find(name, folders, single), "code" if top == _OWN else kind)

    def _place(self, top: str) -> tuple[tuple[Path, ...], Path | None]:
        """The folders of a top-level package, or the file of a module."""
        if top not in self._places:
            loaded = getattr(sys.modules.get(top), "__path__", None)
            spec = _spec(top) if not loaded else None
            folders = loaded or (spec.submodule_search_locations if spec else None) or ()
            single = Path(spec.origin) if spec and spec.has_location and spec.origin and not folders else None
            self._places[top] = tuple(Path(folder) for folder in folders), single
        return self._places[top]

    def _brought_by(self, top: str) -> set[tuple[str, str]]:
        if _is_stdlib(top):
            return set()
        folders, single = self._place(top)
        places = {path.parent for path in folders or (single,) if path is not None}
        return {each for place in places for each in _distributions(top, place, place.stat().st_mtime_ns)}


def import_closure(module: str) -> dict[str, Path]:
    """Module name → source of `module` and all it imports from its own package and `nemotron_steps`.

    Raises ModuleNotFoundError if `module` itself cannot be found.
    """
    code = Code()
    if not code.add_module(module):
        raise ModuleNotFoundError(f"no module named '{module}'", name=module)
    return {name: path for name, path in code.modules.items() if path.suffix == ".py"}


def _is_stdlib(top: str) -> bool:
    return top in sys.stdlib_module_names or top in ("", "__main__")


def _is_carrier(name: str) -> bool:
    # The package's own __init__ has its version, which is another one with each release, and imports nothing itself.
    return name == _OWN or any(name == carrier or name.startswith(f"{carrier}.") for carrier in _CARRIERS)


def _find(name: str, folders: tuple[Path, ...], single: Path | None) -> Path | None:
    """The source of a module, found by path so that no package is imported on the way; None if there is none."""
    if not folders:
        return single if "." not in name else None
    return _find_below(name, folders)


def _find_below(name: str, folders: tuple[Path, ...]) -> Path | None:
    rest = name.split(".")[1:]
    for folder in folders:
        path = os.path.join(folder, *rest)
        beside = (f"{path}{suffix}" for suffix in (".py", *EXTENSION_SUFFIXES)) if rest else ()
        for file in (*beside, os.path.join(path, "__init__.py")):
            if os.path.isfile(file):
                return Path(file)
    return None


_find_own = lru_cache(maxsize=16384)(_find_below)
"""Of this package, whose modules neither come nor go while it runs."""


def _spec(top: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None


@lru_cache(maxsize=1024)
def _distributions(top: str, folder: Path, mtime_ns: int) -> tuple[tuple[str, str], ...]:
    """(name, version) of the distributions that installed a top-level package or module into a folder.

    One that is installed in place (`pip install -e`) did not: its files are the user's own to edit.
    """
    for pattern in (re.sub(r"[-_.]+", "[-_.]", top) + "-*", "*"):
        found = []
        for place in folder.glob(f"{pattern}.dist-info"):
            if (place / "RECORD").is_file() and (place / "METADATA").is_file():
                record = (place / "RECORD").read_text("utf-8", "replace")
                if re.search(rf"^{re.escape(top)}[/.]", record, re.MULTILINE):
                    header = dict(_HEADER.findall((place / "METADATA").read_text("utf-8", "replace").split("\n\n")[0]))
                    found.append((header.get("Name", place.stem), header.get("Version", "")))
        if found:
            break
    return tuple(sorted(found))


@lru_cache(maxsize=4096)
def _source(path: str, mtime_ns: int, size: int) -> str:
    # A line that ends in a backslash goes on in the next one.
    return Path(path).read_text(encoding="utf-8", errors="replace").replace("\\\n", " ")


@lru_cache(maxsize=4096)
def _imports(path: str, mtime_ns: int, size: int, module: str) -> tuple[str, ...]:
    source = _source(path, mtime_ns, size)
    return tuple(dict.fromkeys(_named_modules(source, module, Path(path))))


@lru_cache(maxsize=4096)
def _own_imports(
    path: str, mtime_ns: int, size: int, module: str, folders: tuple[Path, ...]
) -> tuple[tuple[str, Path], ...]:
    """What a module of this package imports from it, and where that is."""
    names = [name for name in _imports(path, mtime_ns, size, module) if name.startswith(f"{_OWN}.")]
    found = ((name, _find_own(name, folders)) for name in names if not _is_carrier(name))
    return tuple((name, place) for name, place in found if place is not None)


def _named_modules(source: str, module: str, path: Path) -> Iterator[str]:
    """Modules that a source imports; those that only strings name have a `"` before them."""
    is_package, is_own = path.name == "__init__.py", module.partition(".")[0] == _OWN
    for match in _QUOTED.finditer(source):
        yield from (f'"{name}' if not name.startswith(f"{_OWN}.") else name for name in _with_parents(match[1]))
    called = "import_module(" in source or "__import__(" in source
    for match in _CALLED.finditer(source) if called else ():
        if match[1]:
            yield from _with_parents(_absolute(match[1], module, is_package))
        elif (match[2] or not is_own) and (is_package or "." in module):
            yield from (_absolute(f".{beside.stem}", module, is_package) for beside in path.parent.glob("*.py"))
    for match in (_IMPORT if is_own else _IMPORT_ANYWHERE).finditer(source):
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
                yield f"{base}.{name}" if base else name


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
