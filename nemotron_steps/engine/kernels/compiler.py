"""Compiles this folder's C files into one library, once a machine, and loads it; its callers declare arguments."""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from nemotron_steps.config.locations import cache_folder
from nemotron_steps.errors import UnsupportedError
from nemotron_steps.waiting import waiting

INSTALL = "apt-get install gcc libc6-dev"

_SOURCES = Path(__file__).parent
_FLAGS = (
    *("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-Wall"),
    # The order in which numbers are summed must not depend on where they lie.
    "--param=vect-max-peeling-for-alignment=0",
)
_WIDE = ("-mprefer-vector-width=512",)
_SECONDS = 120
_log = logging.getLogger(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """The kernels; None where they cannot be had, which is said once, as a warning."""
    command = find_compiler()
    try:
        if command is None:
            raise UnsupportedError("no C compiler is found", hints=[INSTALL])
        return load(command, kernel_folder())
    except UnsupportedError as error:
        what = error.what if error.found is None else f"{error.what}: {error.found}"
        _log.warning("%s, so training and generation on CPU take longer; hint: %s", what, error.hints[0])
        return None


def find_compiler() -> list[str] | None:
    """The command of the C compiler: that of the variable CC, which may have arguments, else gcc or cc."""
    given = os.environ.get("CC", "")
    try:
        words = shlex.split(given)
    except ValueError:  # an open quote
        words = [given]
    if words:
        return words
    found = shutil.which("gcc") or shutil.which("cc")
    return None if found is None else [found]


def kernel_folder() -> Path:
    """Where compiled kernels are kept."""
    return cache_folder() / "kernels"


def load(command: Sequence[str], folder: Path) -> ctypes.CDLL:
    """The kernels, compiled where `folder` lacks them; what others could have written is never loaded."""
    import torch  # noqa: F401  the kernels' OpenMP is that which torch has loaded

    try:
        built = build(command, folder)
    except OSError as error:
        what, hints = "the kernels for CPU cannot be kept", ["export XDG_CACHE_HOME=DIR"]
        raise UnsupportedError(what, found=str(error), hints=hints) from error
    try:
        return ctypes.CDLL(str(built))
    except OSError as error:
        built.unlink(missing_ok=True)  # broken by a power failure, perhaps: the next start compiles it anew
        what = f"what {command[0]} compiled for CPU cannot be loaded"
        raise UnsupportedError(what, found=str(error), hints=["export CC=gcc"]) from error


def build(command: Sequence[str], folder: Path) -> Path:
    """The compiled kernels in `folder`; OSError where others may write there."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    state = folder.stat()
    if state.st_uid != os.geteuid() or folder.parent.stat().st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{folder} belongs to another user")
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others may write to {folder}")
    flags = _FLAGS + (_WIDE if platform.machine() == "x86_64" else ())
    built = folder / f"{_fingerprint(command, flags)}.so"
    if not _is_own_file(built):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            result = Path(scratch, built.name)
            _compile(command, flags, result)
            result.chmod(0o700)  # whatever the umask
            os.replace(result, built)
    return built


def _compile(command: Sequence[str], flags: Sequence[str], result: Path) -> None:
    sources = sorted(_SOURCES.glob("*.c"))
    objects = [str(result.with_name(f"{source.stem}.o")) for source in sources]
    compiling = [(*command, *flags, "-c", str(source), "-o", to) for source, to in zip(sources, objects, strict=True)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda words: _run(*words), compiling))
    # Not linked to a libgomp: the threads must be those of torch, whose libgomp the process has loaded.
    _run(*command, "-shared", "-o", str(result), *objects, "-lm")


def _is_own_file(path: Path) -> bool:
    try:
        state = path.lstat()
    except FileNotFoundError:
        return False
    writable = state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid() and not writable


def _fingerprint(command: Sequence[str], flags: Sequence[str]) -> str:
    """Of everything that the library depends on, the machine included."""
    digest = hashlib.sha256()
    for source in sorted([*_SOURCES.glob("*.c"), *_SOURCES.glob("*.h")]):
        digest.update(source.read_bytes())
    about = (*command, *flags, _run(*command, "--version"), _processor(), *platform.libc_ver())
    digest.update("\0".join(about).encode())
    return digest.hexdigest()[:20]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _run(*command: str) -> str:
    """What a command prints; UnsupportedError where it fails, hangs or is not there."""
    env = {**os.environ, "LC_ALL": "C"}
    try:
        with waiting(f"{command[0]} to compile the kernels for CPU", _SECONDS):
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, env=env)
    except subprocess.TimeoutExpired as error:
        raise _refused(command[0], f"no answer within {_SECONDS} s") from error
    except OSError as error:
        raise _refused(command[0], str(error)) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        errors = [line for line in lines if "error" in line]
        raise _refused(command[0], (errors or lines[-1:] or [f"exit status {done.returncode}"])[0])
    return done.stdout


def _refused(compiler: str, found: str) -> UnsupportedError:
    hint = "unset CC   # gcc is taken then" if os.environ.get("CC") and shutil.which("gcc") else INSTALL
    return UnsupportedError(f"{compiler} cannot compile the kernels for CPU", found=found, hints=[hint])
