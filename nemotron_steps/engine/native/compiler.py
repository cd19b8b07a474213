"""Compiles this folder's C files into one library, once a machine, and loads it.

Not for: knowing what the kernels do; their callers declare arguments.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

_SOURCES = Path(__file__).parent
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-Wall")
_WIDE = ("-mprefer-vector-width=512",)
_log = logging.getLogger(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """The kernels; None, said once in the log, where they cannot be compiled."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        _log.info("no C compiler: training and generation on CPU use torch's operators alone; hint: apt install gcc")
        return None
    try:
        return load(compiler, _cache_folder())
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        _log.warning("the CPU kernels could not be compiled by %s: %s", compiler, said.strip().splitlines()[-1])
        return None


def load(compiler: str, folder: Path) -> ctypes.CDLL:
    """Compile with `compiler` unless `folder` has the result, and load it.

    Raises:
        OSError: the compiler cannot be run, the folder not be written, or the library not be loaded.
        subprocess.CalledProcessError: the compiler refuses.
    """
    sources = sorted(_SOURCES.glob("*.c"))
    flags = _FLAGS + (_WIDE if platform.machine() == "x86_64" else ())
    built = folder / f"kernels-{_fingerprint(compiler, flags)}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            objects = []
            for source in sources:
                objects.append(str(Path(scratch, source.stem + ".o")))
                _run(compiler, *flags, "-c", str(source), "-o", objects[-1])
            # Not linked to a libgomp: the threads must be those of torch, whose libgomp the process has loaded.
            result = Path(scratch, "kernels.so")
            _run(compiler, "-shared", "-o", str(result), *objects, "-lm")
            os.replace(result, built)
    return ctypes.CDLL(str(built))


def threads() -> int:
    """How many threads a kernel may use: as many as torch's operators."""
    return torch.get_num_threads()


def _fingerprint(compiler: str, flags: tuple[str, ...]) -> str:
    """Of everything that the library depends on; folders of users may be shared by machines of different kinds."""
    digest = hashlib.sha256()
    for source in sorted([*_SOURCES.glob("*.c"), *_SOURCES.glob("*.h")]):
        digest.update(source.read_bytes())
    digest.update(" ".join((*flags, _run(compiler, "--version"), _processor())).encode())
    return digest.hexdigest()[:20]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "nemotron_steps"
