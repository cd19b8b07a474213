"""The code that a result depends on, found by following imports statically: nothing is imported on the way.

What counts by content, by version and not at all is said in docs/cache_keys.md. Layers that only carry data around are
left out: changing how a run is reported must not make every result stale.
"""

import ast
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from glob import glob
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from tempfile import gettempdir

from nemotron_steps.artifacts.files import stat_of

_OWN = __name__.partition(".")[0]
_LAYERS = ("api", "runs", "manifest", "resolver", "cli", "errors", "testing")
_CARRIERS = tuple(f"{_OWN}.{name}" for name in (*_LAYERS, "artifacts.store", "artifacts.export"))
"""The last two are those that `Artifact.save` imports."""
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
_GLOBS = {"glob", "iglob", "rglob"}
_PATHS = {"Path", "join", "joinpath", "abspath", "realpath", "expanduser", "resolve", "absolute", "str", *_GLOBS}
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
"""Of a folder that code names: what comes after is not looked at."""
_HEADER = re.compile(r"^(Name|Version): *(.+?) *$", re.MULTILINE)


class Code:
    """What was reached so far."""

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
            is_own = kind == "code" and module.partition(".")[0] == _OWN
            stamp = (str(path), tuple(stat_of(path)))
            if not is_own:
                self._take_named(path, _source(*stamp), _named(*stamp), kind, folder)
            for name in _imports(*stamp, module):
                if not is_own or name.startswith(f"{_OWN}."):
                    self._reach(name, kind)

    def _take_named(self, path: Path, source: str, named: tuple[tuple[str, str], ...], kind: str, prefix: str) -> None:
        """Files and folders that a source names in strings, to read them: from its folder, the user's own also from
        the working directory; where it puts folders on sys.path, imports are looked for there too."""
        here = Path.cwd()
        bases = [path.parent, *(path.parents[1:3] if _UPWARDS.search(source) else ())]
        if kind == "file" or (path.is_relative_to(here) and "site-packages" not in path.parts):
            bases.append(here)
        folders = [text for text, use in named if use in ("path", "searched")]
        bases += [base / text for base in bases for text in folders if (base / text).is_dir()]
        if "sys.path" in source:
            self._search.update(dict.fromkeys(bases))
        for text, use in named:
            if use == "glob":
                found = {Path(each) for base in bases for each in glob(os.path.join(base, text), recursive=True)}
            else:
                found = {base / text for base in bases if (base / text).exists()}
            for each in {each.resolve() for each in found if text.strip("./") and use != "searched"} - self._seen:
                name = f"{kind} {prefix}{text.rstrip('/').rpartition('/')[2]}"
                if each.is_file():
                    self.files.setdefault(name, set()).add(each)
                    if each.suffix == ".py":
                        self._take(each.stem, each, kind)
                elif use != "read" and not _is_around(each, path) and not _is_around(each, here):
                    self.files.setdefault(f"{name}/", set()).update(_files_below(each))

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
        elif top == _OWN:
            self._take(name, _find_own(name, folders), "code")
        else:
            self._take(name, _find(name, folders, single), kind)

    def _place(self, top: str) -> tuple[tuple[Path, ...], Path | None]:
        """The folders of a top-level package, or the file of a module."""
        if top not in self._places:
            loaded, spec = getattr(sys.modules.get(top), "__path__", None), None
            if not loaded:
                with suppress(ImportError, ValueError):
                    spec = importlib.util.find_spec(top)
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
    """Module name → source of `module` and all it imports from its own package and `nemotron_steps`."""
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
    if folders:
        return _find_below(name, folders)
    return single if "." not in name else None


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


@lru_cache(maxsize=1024)
def _distributions(top: str, folder: Path, mtime_ns: int) -> tuple[tuple[str, str], ...]:
    """(name, version) of the distributions that installed a top-level package or module into a folder."""
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
def _source(path: str, stamp: tuple[int, ...]) -> str:
    # A line that ends in a backslash goes on in the next one.
    return Path(path).read_text(encoding="utf-8", errors="replace").replace("\\\n", " ")


@lru_cache(maxsize=4096)
def _named(path: str, stamp: tuple[int, ...]) -> tuple[tuple[str, str], ...]:
    """What a source has in strings that may be a path, and how it is used: "read" as a file, as a "path" of a file or
    folder, "glob". What it is certain to write alone, or to look for modules in, is left out."""
    try:
        tree = ast.parse(_source(path, stamp))
    except (SyntaxError, ValueError, RecursionError):  # nothing that runs
        return ()
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    groups: dict[ast.AST, list[ast.Constant]] = {}
    for node in parents:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) <= 200:
            groups.setdefault(_path_of(node, parents), []).append(node)
    found: dict[tuple[str, str], None] = {}
    for top, constants in groups.items():
        use = _use(top, parents, tree)
        parts = [str(each.value) for each in sorted(constants, key=lambda each: (each.lineno, each.col_offset))]
        if use == "written" or any(char in part for part in parts for char in "\n\0"):
            continue
        calls = {_name_of(each) for each in ast.walk(top)} & _GLOBS
        if calls and use == "path":
            use = "glob"
            parts[-1:] = ["**", parts[-1]] if "rglob" in calls else parts[-1:]
        elif use == "read" and (len(parts) > 1 or "/" in parts[0]):
            use = "path"
        found["/".join(parts), use] = None
        found |= dict.fromkeys((part, "read") for part in parts[1:] if use != "searched")
    return tuple(found)


def _path_of(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.AST:
    """The expression of the whole path that a node is a part of."""
    while True:
        around = parents[node]
        is_path = isinstance(around, ast.Call) and _name_of(around) in _PATHS
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
        modes = around.args[0 if node is around.func else 1 :][:1] + [
            k.value for k in around.keywords if k.arg == "mode"
        ]
        texts = [str(mode.value) for mode in modes if isinstance(mode, ast.Constant)]
        return "written" if any(map(_WRITING_MODE.fullmatch, texts)) else "read"
    if _WRITERS.fullmatch(name):
        return "written"
    if isinstance(around, ast.Call) and ast.unparse(around.func).startswith("sys.path."):
        return "searched"
    return "read" if isinstance(node, ast.Constant) and name not in ("listdir", "scandir", "walk") else "path"


def _name_of(node: ast.AST) -> str:
    """What a call calls, without the module or object it belongs to."""
    called = node.func if isinstance(node, ast.Call) else None
    return str(getattr(called, "id", getattr(called, "attr", "")))


def _is_around(folder: Path, path: Path) -> bool:
    """Whether a folder has a path in it, or is not one to read whole."""
    return path.is_relative_to(folder) or f"{folder}/".startswith(SYSTEM) or str(folder) == gettempdir()


def _files_below(folder: Path) -> Iterator[Path]:
    """The first files below a folder, but for hidden ones and Python's own."""
    number = 0
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(each for each in folders if each[0] != "." and each != "__pycache__")
        names = [name for name in sorted(files) if name[0] != "." and not name.endswith(".pyc")]
        yield from (Path(place, name) for name in names)
        number += len(names)
        if number > _MOST_FILES:
            return


@lru_cache(maxsize=4096)
def _imports(path: str, stamp: tuple[int, ...], module: str) -> tuple[str, ...]:
    names = dict.fromkeys(_named_modules(_source(path, stamp), module, Path(path)))
    return tuple(name for name in names if not _is_carrier(name))


def _named_modules(source: str, module: str, path: Path) -> Iterator[str]:
    """Modules that a source imports; those that only strings name have a `"` before them."""
    is_package, is_own = path.name == "__init__.py", module.partition(".")[0] == _OWN
    for match in _QUOTED.finditer(source):
        yield from (f'"{name}' if not name.startswith(f"{_OWN}.") else name for name in _with_parents(match[1]))
    called = "import_module(" in source or "__import__(" in source
    for match in _CALLED.finditer(source) if called else ():
        if match[1]:
            yield from _with_parents(_absolute(match[1], module, is_package))
        elif match[2] or not is_own:
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
