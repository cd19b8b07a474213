"""The code that a result depends on (docs/cache_keys.md), without importing any: of this package the modules that are
imported, of another package all its files, of a user's file the modules and files that are mentioned in it.

Layers that only carry data around are left out: changing how a run is reported must not make every result stale.
"""

import ast
import importlib.util
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatch
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import Distribution
from itertools import islice
from pathlib import Path
from tempfile import gettempdir

from nemotron_steps.artifacts.files import stat_of

_OWN = __name__.partition(".")[0]
_LAYERS = ("api", "runs", "manifest", "resolver", "cli", "errors", "testing")
# The last two are those that `Artifact.save` imports.
_CARRIERS = tuple(f"{_OWN}.{name}" for name in (*_LAYERS, "artifacts.store", "artifacts.export"))
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(?P<base>\.*[\w.]*)[ \t]*import(?:[ \t]*\((?P<many>[^)]*)\)|[ \t]+(?P<names>[^\n;#(]+))"
    r"|import[ \t]+(?P<plain>[^\n;#]+))",
    re.MULTILINE,
)
_NAMED = re.compile(r"""["']([A-Za-z_]\w*(?:\.\w+)+)(?::\w+)?["']""")
"""A module named in a string, `"package.module:Name"`: registries that import lazily are followed too."""
_QUOTED = re.compile(r"""(?:(?<!\w)(?<![\w\])]\[)|(?<=\W[rbfRBF]))["'/]([^"'/\n]+)(?=["'/])""")
"""A part of a path in a string; what stands in `row["name"]` is none."""
_PATHS = re.compile(r"Path|join(?:path)?|abspath|realpath|expanduser|resolve|absolute|str|[ir]?glob")
"""Calls that make a path, or paths, of one."""
_WRITERS = re.compile(
    r"write_\w+|touch|mkdir|makedirs|unlink|remove|rmtree|dump|save\w*|to_(?:csv|json|parquet|pickle)"
    r"|\w*FileHandler|basicConfig|SummaryWriter"
)
_WRITING_MODE = re.compile(r"[bt]*[wax][bt+]*")
_UPWARDS = re.compile(r"\.\.[/\"']|parents\[|\.parent\.parent|dirname\([^()]*dirname")
SYSTEM = ("/usr/", "/bin/", "/lib", "/opt/", "/etc/", "/proc/", "/sys/", "/dev/", f"{sys.prefix}/")
"""Folders that come with the machine: they count by name."""
_MOST_FILES = 20_000
"""Of a folder that a user's file names: what comes after is not looked at."""
_LARGE = 500
"""Files of a package from which not all that is in them counts: of an installed one its version."""


class Code:
    """What was reached so far: name → files, those of one name together, and distribution → version."""

    def __init__(self) -> None:
        self.modules: dict[str, Path] = {}
        self.files: dict[str, set[Path]] = {}
        self.distributions: dict[str, str] = {}
        self._packages: set[str] = set()

    def add_module(self, name: str) -> bool:
        """Take `package.module`; whether it was found."""
        top, _, rest = name.partition(".")
        if _is_stdlib(top) or _find(_places(top), rest) is None:
            return False
        if top != _OWN:
            self._add_package(name)
            return True
        for module, path in _closure(name, {_OWN}).items():
            self.modules[module] = path
            folder = module.split(".")[1:] if path.name == "__init__.py" else module.split(".")[1:-1]
            for file in (path, *path.parent.glob("*.[ch]")):
                self.files[f"code {'/'.join([*folder, file.name])}"] = {file}
        return True

    def add_dotted(self, name: str) -> None:
        """Take the module of `package.module.Name`; the version, where an installed distribution brings it."""
        if self._add_versions(name.partition(".")[0]):
            return
        while not self.add_module(name) and "." in name:
            name = name.rpartition(".")[0]

    def add_file(self, path: Path) -> None:
        """Take a Python file of the user's own, and what is mentioned in it."""
        files = sorted(_mentioned(path.absolute()))
        sources = [file for file in files if file.suffix == ".py"]
        modules = {file.stem for file in sources} | {file.parent.name for file in sources}
        for file in files:
            self.files.setdefault(f"file {file.name}", set()).add(file)
            if file.suffix == ".py":
                self._add_imports(file, modules)

    def _add_package(self, name: str) -> None:
        """All files of a module's package, and of what the same distribution brings; of a large package that is not
        installed the modules that are imported, and what is in their folders."""
        top = name.partition(".")[0]
        if self._packages & {top, name}:
            return
        self._packages.add(name)
        brought = _brought_by(top)
        for place in _places(top):
            files = {*islice(files_below(place), _LARGE + 1)} if place.is_dir() else {place}
            if len(files) <= _LARGE:
                self._packages.add(top)
            elif brought:
                self.distributions.update((dist, version) for dist, version, _ in brought)
                continue
            else:
                reached = _closure(name, {top})
                inside = [path for each, path in reached.items() if each == name or path.name != "__init__.py"]
                folders = {path.parent for path in inside}
                files = {*reached.values(), *(file for folder in folders for file in files_below(folder))}
            for file in sorted(files):
                shown = f"{top}/{file.relative_to(place).as_posix()}" if file != place else file.name
                self.files.setdefault(f"code {shown}", set()).add(file)
                if file.suffix == ".py":
                    self._add_imports(file, {top})
        for mate in sorted({each for _, _, mates in brought for each in mates}):
            self._add_package(mate)

    def _add_imports(self, file: Path, known: set[str]) -> None:
        """What a file of others imports, but for `known` packages: an installed distribution by version."""
        for name in _imports(str(file), tuple(stat_of(file)), ""):
            top = name.partition(".")[0]
            if top == _OWN:
                if name not in self.modules:
                    self.add_module(name)
            elif top not in known and not _is_stdlib(top) and not self._add_versions(top):
                self.add_module(top)

    def _add_versions(self, top: str) -> bool:
        brought = _brought_by(top)
        self.distributions.update((name, version) for name, version, _ in brought if top not in self._packages)
        return bool(brought)


def import_closure(module: str) -> dict[str, Path]:
    """Module name → source of `module` and all it imports from its own package and `nemotron_steps`."""
    found = _closure(module, {_OWN, module.partition(".")[0]})
    if module not in found:
        raise ModuleNotFoundError(f"no module named '{module}'", name=module)
    return found


def _closure(module: str, tops: set[str]) -> dict[str, Path]:
    """A module, the packages that it is in, and what these import of the packages `tops`."""
    found: dict[str, Path] = {}
    places = {top: _places(top) for top in tops}
    pending = [name for name in _with_parents(module) if name == module or not _is_carrier(name)]
    seen = set(pending)
    while pending:
        name = pending.pop()
        top, _, rest = name.partition(".")
        path = (_find_own if top == _OWN else _find)(places[top], rest)
        if path is None:
            continue
        found[name] = path
        if path.suffix == ".py":
            imported = set(_imports(str(path), tuple(stat_of(path)), name)) - seen
            seen |= imported
            pending += [each for each in imported if each.partition(".")[0] in tops]
    return found


def _mentioned(path: Path) -> set[Path]:
    """A user's Python file and all that is mentioned in it, or in what is: modules by a word, other files in quotes,
    beside the file, in the working directory, and in folders that are mentioned; a folder in quotes whole."""
    found, texts = {path}, {path: _text(path)}
    roots = dict.fromkeys([path.parent, Path.cwd()])
    looked_at = 0
    while looked_at < len(found) + len(roots):
        looked_at = len(found) + len(roots)
        text = "\n".join(each for each, _ in texts.values())
        folders = {part for _, parts in texts.values() for part in parts}
        words, quoted = {*re.findall(r"\w+", text)}, {*_QUOTED.findall(text)}
        patterns = [each for each in quoted if "*" in each and re.search(r"\w", each)]
        if _UPWARDS.search(text):
            roots |= dict.fromkeys(path.parents[1:3])
        named = map(Path, re.findall(r"""["'](/[^"'\n]+)["']""", text))
        whole = {each for each in named if each.name and os.path.exists(each)}
        if re.search(r"rglob\(|\*/", text):
            below = [file for root in {path.parent, Path.cwd()} for file in islice(files_below(root), _MOST_FILES)]
            whole |= {file for file in below if any(fnmatch(file.name, each) for each in patterns)}
        for place in [place for root in roots if os.access(root, os.R_OK | os.X_OK) for place in root.iterdir()]:
            name, stem = place.name, place.name.removesuffix(".py")
            if stem in words and place.is_dir() and (any(place.glob("*.py")) or any(place.glob("*/*.py"))):
                roots[place] = None
                whole.add(place / "__init__.py")
            mentioned = name in quoted and (name in folders or not place.is_dir())
            mentioned = mentioned or any(fnmatch(name, each) for each in patterns)
            # A module that a name put together imports may be any beside it.
            beside = place.parent == path.parent and re.search(r"""(?:import_module|__import__)\((?!\s*["'])""", text)
            imported = stem != name and (stem in words or beside)
            if mentioned or imported:
                whole.add(place)
        for place in whole:
            system = f"{place.resolve()}/".startswith(SYSTEM) and not place.is_relative_to(path.parent)
            if system or not place.exists() or place.name[0] == ".":
                continue
            around = any(each.is_relative_to(place.resolve()) for each in (path, Path.cwd(), Path(gettempdir())))
            for file in [place] if place.is_file() else () if around else islice(files_below(place), _MOST_FILES):
                found.add(file)
                if file.suffix == ".py" and file not in texts:
                    texts[file] = _text(file)
    return found


def _text(path: Path) -> tuple[str, set[str]]:
    """A source without the names of what it only writes, and of logs; and the parts of what is a path in it."""
    text, uses = path.read_text(encoding="utf-8", errors="replace"), defaultdict[str, set[str]](set)
    with suppress(SyntaxError, ValueError, RecursionError):  # nothing that runs
        tree = ast.parse(text)
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for node in parents:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and 0 < len(node.value) <= 200:
                uses[node.value].add(_use(_path_of(node, parents), parents, tree))
    for name in [each for each, used in uses.items() if used == {"written"} or each.endswith(".log")]:
        text = re.sub(rf"""["']{re.escape(name)}["']""", "''", text)
    paths = [each for each, used in uses.items() if "/" in each or used & {"path", "searched"}]
    return text, {part for each in paths for part in each.split("/")}


def _path_of(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.AST:
    """The expression of the whole path that a node is a part of."""
    while True:
        around = parents[node]
        is_path = _PATHS.fullmatch(_name_of(around))
        joins = isinstance(around, ast.BinOp) and isinstance(around.op, ast.Div)
        if not (is_path or joins or isinstance(around, ast.Attribute | ast.keyword)):
            return node
        node = around


def _use(node: ast.AST, parents: dict[ast.AST, ast.AST], tree: ast.AST, depth: int = 0) -> str:
    """How the expression of a path is used. Where that is in doubt, it is read."""
    around = parents[node]
    if isinstance(around, ast.Assign | ast.AnnAssign) and depth < 3:
        names = {each.id for each in ast.walk(around) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
        read = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in names and isinstance(n.ctx, ast.Load)]
        uses = {_use(_path_of(each, parents), parents, tree, depth + 1) for each in read}
        return "written" if uses == {"written"} else "path"
    name = _name_of(around)
    if isinstance(around, ast.Call) and name == "open":
        modes = [*around.args[node is not around.func :][:1], *(k.value for k in around.keywords if k.arg == "mode")]
        texts = [str(mode.value) for mode in modes if isinstance(mode, ast.Constant)]
        return "written" if any(map(_WRITING_MODE.fullmatch, texts)) else "read"
    if _WRITERS.fullmatch(name):
        return "written"
    if isinstance(around, ast.Call) and ast.unparse(around.func).startswith("sys.path."):
        return "searched"
    return "read" if isinstance(node, ast.Constant) and name not in ("listdir", "scandir", "walk") else "path"


def _name_of(node: ast.AST) -> str:
    """What a call calls, without the module or object it belongs to."""
    called = getattr(node, "func", None)
    return str(getattr(called, "id", getattr(called, "attr", "")))


def _is_stdlib(top: str) -> bool:
    return top in sys.stdlib_module_names or top in ("", "__main__")


def _is_carrier(name: str) -> bool:
    # The package's own __init__ has its version, which is another one with each release, and imports nothing itself.
    return name == _OWN or any(name == carrier or name.startswith(f"{carrier}.") for carrier in _CARRIERS)


def _places(top: str) -> tuple[Path, ...]:
    """The folders of a top-level package, or the file of a module; found without importing it."""
    folders, spec = getattr(sys.modules.get(top), "__path__", None), None
    if not folders:
        with suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(top)
        folders = spec.submodule_search_locations if spec else None
    if folders:
        return tuple(map(Path, folders))
    return (Path(spec.origin),) if spec and spec.has_location and spec.origin else ()


def _find(places: tuple[Path, ...], rest: str) -> Path | None:
    """The source of what stands behind the first dot of a module's name, None if there is none."""
    for place in places:
        path = os.path.join(place, *rest.split("."))
        beside = (f"{path}{suffix}" for suffix in (".py", *EXTENSION_SUFFIXES)) if rest else (str(place),)
        for file in (*beside, os.path.join(path, "__init__.py")):
            if os.path.isfile(file):
                return Path(file)
    return None


_find_own = lru_cache(maxsize=16384)(_find)  # whose modules neither come nor go while it runs


def _brought_by(top: str) -> list[tuple[str, str, tuple[str, ...]]]:
    """(name, version, top-level names) of the distributions that installed a top-level package or module."""
    folders = {place.parent for place in _places(top)}
    return [each for folder in folders for each in _distributions(top, folder, folder.stat().st_mtime_ns)]


@lru_cache(maxsize=1024)
def _distributions(top: str, folder: Path, mtime_ns: int) -> list[tuple[str, str, tuple[str, ...]]]:
    for pattern in (re.sub(r"[-_.]+", "[-_.]", top) + "-*", "*"):
        found = []
        for place in folder.glob(f"{pattern}.dist-info"):
            if (place / "RECORD").is_file() and (place / "METADATA").is_file():
                record = (place / "RECORD").read_text("utf-8", "replace")
                tops = {*re.findall(r"^(\w+)[/.]", record, re.MULTILINE)}
                if top in tops:
                    installed = Distribution.at(place)
                    found.append((installed.name, installed.version, tuple(sorted(tops - {"__pycache__"}))))
        if found:
            return sorted(found)
    return []


def files_below(folder: Path) -> Iterator[Path]:
    """The files below a folder, but for hidden ones and Python's own."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(each for each in folders if each[0] != "." and each != "__pycache__")
        yield from (Path(place, name) for name in sorted(files) if name[0] != "." and not name.endswith(".pyc"))


@lru_cache(maxsize=4096)
def _imports(path: str, stamp: tuple[int, ...], module: str) -> tuple[str, ...]:
    """Modules that a source imports or names in strings; `module`: its own name, that relative ones are below."""
    # A line that ends in a backslash goes on in the next one.
    source = Path(path).read_text(encoding="utf-8", errors="replace").replace("\\\n", " ")
    if not module:  # others write `try: import x`
        source = re.sub(r"[;:][ \t]*(?=import|from)", "\n", source)
    package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
    names = [each for match in _NAMED.finditer(source) for each in _with_parents(match[1]) if module]
    names += [f"{_OWN}.{each}" for each in re.findall(rf"""["']{_OWN}\.([\w.]+)""", source)]
    if 'import_module(f"{__name__}.' in source:
        names += [f"{package}.{beside.stem}" for beside in Path(path).parent.glob("*.py")]
    for match in _IMPORT.finditer(source):
        if match["plain"] is not None:
            for part in match["plain"].split(","):
                names += _with_parents(part.split(" as ")[0].strip())
            continue
        base = match["base"].lstrip(".")
        if dots := len(match["base"]) - len(base):
            parents = package.split(".")
            base = ".".join([*parents[: len(parents) - dots + 1], *([base] if base else [])])
        names += _with_parents(base)
        listed = re.sub(r"#[^\n]*", "", match["many"] or match["names"] or "")
        imported = [part.split(" as ")[0].strip() for part in listed.split(",")]
        names += [f"{base}.{name}" for name in imported if name.isidentifier()]
    return tuple(name for name in dict.fromkeys(names) if not _is_carrier(name))


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
