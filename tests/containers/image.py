"""A container image out of what this machine has: the Python that runs the tests, a shell, coreutils, git and the
libraries that they load. No registry is asked, and it takes about a second.

In it: `python3` and `python`, pytest, and a git repository with a fault at /testbed.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

REPOSITORY = "/testbed"
PACKAGES = "/usr/lib/test-packages"
CHANGES = ("ENV PATH=/usr/local/bin:/usr/bin:/bin", f"ENV PYTHONPATH={PACKAGES}")
"""Of the image's configuration, as `docker import --change` takes them."""

_SHELLS = ("sh", "bash", "env", "git", "grep", "sed", "find", "xargs", "mount", "unshare", "setsid")
_FILE_PROGRAMS = ("cat", "cp", "mv", "rm", "ln", "ls", "mkdir", "rmdir", "chmod", "chown", "touch", "stat", "mktemp")
_TEXT_PROGRAMS = ("head", "tail", "sort", "tr", "wc", "seq", "printf", "echo", "sha256sum", "base64", "readlink")
_OTHERS = ("timeout", "sleep", "true", "false", "test", "id", "dirname", "basename", "uname", "nproc", "dd", "df")
_PROGRAMS = (*_SHELLS, *_FILE_PROGRAMS, *_TEXT_PROGRAMS, *_OTHERS)
_FOLDERS = {"tmp": 0o1777, **dict.fromkeys(("root", "opt", "etc", "proc", "sys", "dev"), 0o755)}
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
}
_UNUSED = {"site-packages", "dist-packages", "test", "idlelib", "tkinter", "ensurepip", "lib2to3", "turtledemo"}
_OF_WHEELS = ("libpthread.so.0", "libdl.so.2", "librt.so.1", "libutil.so.1", "libgcc_s.so.1", "libstdc++.so.6")
"""Libraries beside libc that compiled packages load, for containers that are shown this machine's."""
_DISTRIBUTIONS = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")


def make(target: Path, repository: Path) -> None:
    """Write the image's root as a tar file.

    Args:
        repository: goes to REPOSITORY.
    """
    python, library = Path(os.path.realpath(sys.executable)), Path(os.__file__).parent
    programs = {f"usr/bin/{name}": path for name in _PROGRAMS if (path := shutil.which(name)) is not None}
    programs[_inside(python)] = str(python)
    modules = [str(path) for path in library.glob("lib-dynload/*.so") if not path.name.startswith("_tkinter")]
    with tarfile.open(target, "w") as tar:
        for name, mode in _FOLDERS.items():
            _add_entry(tar, name, tarfile.DIRTYPE, mode)
        _add_entry(tar, "bin", tarfile.SYMTYPE, 0o777, "usr/bin")
        for name in ("python", "python3"):
            _add_entry(tar, f"usr/local/bin/{name}", tarfile.SYMTYPE, 0o777, str(python))
        for name, text in _FILES.items():
            part = target.with_suffix(".part")
            part.write_text(text)
            tar.add(part, name, filter=_of_root)
            part.unlink()
        for name, source in {**programs, **_libraries([*programs.values(), *modules])}.items():
            tar.add(os.path.realpath(source), name, filter=_of_root)
        tar.add(library, _inside(library), filter=_standard_library)
        for source, name in _packages():
            tar.add(source, f"{PACKAGES.lstrip('/')}/{name}", filter=_of_root)
        tar.add(repository, REPOSITORY.lstrip("/"), filter=_of_root)


def commit(folder: Path, files: Mapping[str, str]) -> Path:
    """A git repository in `folder` with one commit of these files."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@y"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "base"]):
        subprocess.run([*git, *command], cwd=folder, check=True)
    return folder


def _libraries(files: Iterable[str]) -> dict[str, str]:
    """Place in the image → shared library, of all that these load."""
    found = subprocess.run(["ldd", *files], capture_output=True, text=True, check=False).stdout
    paths = set(re.findall(r"(/\S+) \(0x", found))
    (folder,) = {Path(path).parent for path in paths if path.endswith("/libc.so.6")}
    paths |= {str(folder / name) for name in _OF_WHEELS if (folder / name).exists()}
    return {_inside(Path(path)): path for path in sorted(paths)}


def _packages() -> Iterator[tuple[str, str]]:
    """(source, place below PACKAGES) of pytest and what it imports."""
    for name in _DISTRIBUTIONS:
        for file in importlib.metadata.files(name) or ():
            if not str(file).startswith("..") and file.suffix != ".pyc":
                yield str(file.locate()), str(file)


def _inside(path: Path) -> str:
    return str(path).lstrip("/")


def _add_entry(tar: tarfile.TarFile, name: str, kind: bytes, mode: int, link: str = "") -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.linkname = kind, mode, link
    tar.addfile(entry)


def _of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    # What the host keeps to its users, such as a Python below /root, is the image's to read.
    entry.mode |= 0o555 if entry.isdir() or entry.mode & 0o100 else 0o444
    return entry


def _standard_library(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    parts = Path(entry.name).parts
    unused = _UNUSED & set(parts) or any(part.startswith("config-") for part in parts)
    other = entry.name.endswith((".opt-1.pyc", ".opt-2.pyc", ".a")) or "_tkinter" in parts[-1]
    return None if unused or other else _of_root(entry)
