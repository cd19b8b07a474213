"""Compiling the kernels in C: by which compiler, once a machine, and loading nothing that others could have written."""

import ctypes
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemotron_steps.engine.kernels import compiler
from nemotron_steps.errors import UnsupportedError

SOURCES = {
    "answer.c": '#include "answer.h"\nint answer(void) { return ANSWER; }\n',
    "answer.h": "#define ANSWER 42\n",
    "half.c": '#include "answer.h"\nint half(void) { return ANSWER / 2; }\n',
}
GCC = shutil.which("gcc") or ""
KERNELS = Path(compiler.__file__).parent

pytestmark = pytest.mark.compiler


@pytest.fixture(autouse=True)
def sources(tmp_path, monkeypatch) -> Iterator[Path]:
    """Two small C files and a header in place of the kernels, and a process that has loaded nothing."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name, text in SOURCES.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(compiler, "_SOURCES", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.delenv("CC", raising=False)
    compiler.library.cache_clear()
    yield folder
    compiler.library.cache_clear()


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "caches" / "nemotron_steps" / "kernels"


def script(path, text) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def counted(tmp_path) -> tuple[str, Path]:
    """A program that runs its arguments, as ccache does, and the file in which it notes them."""
    noted = tmp_path / "noted"
    return script(tmp_path / "counting", f'echo "$@" >> {noted}; exec "$@"'), noted


def compilations(noted):
    return sum(" -c " in line for line in noted.read_text().splitlines())


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def answer(kernels: ctypes.CDLL | None) -> int:
    assert kernels is not None
    return int(kernels.answer())


def test_all_files_are_one_library_kept_where_caches_are(folder, caplog):
    kernels = compiler.library()
    assert answer(kernels) == 42
    assert kernels is not None
    assert kernels.half() == 21
    assert [path.suffix for path in folder.iterdir()] == [".so"]
    assert not warnings(caplog)


@pytest.mark.parametrize("source", sorted(KERNELS.glob("*.c")), ids=lambda path: path.name)
@pytest.mark.parametrize("machine", ["native", "x86-64", "haswell", "skylake-avx512"])
def test_the_kernels_compile_without_a_warning(source, machine):
    if machine != "native" and platform.machine() != "x86_64":
        pytest.skip("this host is of another kind")
    flags = [flag for flag in compiler._FLAGS if not flag.startswith(("-march", "-O"))]
    checks = [f"-march={machine}", "-O1", "-Werror", "-c", "-o", "/dev/null"]
    subprocess.run([GCC, *flags, *checks, str(source)], check=True)


def test_without_a_compiler_there_are_no_kernels_and_it_is_said_once(
    tmp_path, monkeypatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler.library() is None
    assert compiler.library() is None
    (said,) = warnings(caplog)
    assert "no C compiler" in said
    assert said.endswith("hint: apt-get install gcc libc6-dev")


def test_the_compiler_is_the_one_that_CC_names_with_its_arguments(counted, monkeypatch: pytest.MonkeyPatch):
    program, noted = counted
    monkeypatch.setenv("CC", f"{program} gcc -DUNUSED='a b'")
    assert answer(compiler.library()) == 42
    assert compilations(noted) == 2
    assert all(line.startswith("gcc -DUNUSED=a b ") for line in noted.read_text().splitlines())


def test_a_compiler_of_another_name_is_taken_where_gcc_is_absent(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CC", "  ")  # names none
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler.find_compiler() is None
    other = script(tmp_path / "cc", "exit 1")
    assert compiler.find_compiler() == [other]
    first = script(tmp_path / "gcc", "exit 1")
    assert compiler.find_compiler() == [first]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("echo 'kernel.c:1:10: fatal error: math.h: No such file' >&2; echo 'terminated.' >&2; exit 1", "math.h"),
        ("echo 'In file kernel.c:' >&2; echo 'cannot find -lm' >&2; exit 1", "cannot find -lm"),
        ("exit 3", "exit status 3"),
        ("echo >&2; exit 3", "exit status 3"),
        ("case $1 in --version) ;; *) exec sleep 60;; esac", "no answer within 1 s"),
    ],
)
def test_a_compiler_that_fails_is_named_once_with_what_it_said(
    text, found, tmp_path, monkeypatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("CC", script(tmp_path / "failing-cc", text))
    if "no answer" in found:
        monkeypatch.setattr(compiler, "_SECONDS", 1)
    assert compiler.library() is None
    assert compiler.library() is None
    (said,) = warnings(caplog)
    assert "failing-cc" in said
    assert found in said
    assert "hint: " in said


@pytest.mark.parametrize("given", ["/nowhere/cc", "cc 'open"])
def test_a_compiler_that_is_not_there_is_no_crash(given, monkeypatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setenv("CC", given)
    assert compiler.library() is None
    (said,) = warnings(caplog)
    assert said.endswith("hint: unset CC   # gcc is taken then" if shutil.which("gcc") else f"hint: {compiler.INSTALL}")


def test_a_second_process_compiles_nothing_and_another_version_of_the_compiler_anew(counted, tmp_path, folder):
    program, noted = counted
    version = tmp_path / "version"
    versioned = script(tmp_path / "versioned", f'case $1 in --version) cat {version};; *) {program} {GCC} "$@";; esac')
    built = []
    for told, compiled in (("13.1", 2), ("13.1", 2), ("13.2", 4), ("13.1", 4)):
        version.write_text(told)
        built.append(compiler.build([versioned], folder))
        assert compilations(noted) == compiled
    assert built[0] == built[1] == built[3] != built[2]


@pytest.mark.parametrize("name", ["answer.c", "answer.h"])
def test_a_changed_source_compiles_anew(name, sources, folder):
    before = compiler.build([GCC], folder)
    changed = sources / name
    changed.write_text(changed.read_text().replace("return ANSWER", "return 1 + ANSWER").replace("42", "43"))
    after = compiler.build([GCC], folder)
    assert after != before
    assert answer(compiler.load([GCC], folder)) == 43


@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [
        (compiler, "_processor", lambda: "flags: avx9"),
        (compiler, "_FLAGS", (*compiler._FLAGS, "-DUNUSED")),
        (platform, "libc_ver", lambda: ("glibc", "1.0")),
    ],
    ids=["processor", "flags", "C library"],
)
def test_a_folder_shared_by_unlike_machines_has_a_library_of_each(
    owner, name, other, folder, monkeypatch: pytest.MonkeyPatch
):
    first = compiler.build([GCC], folder)
    monkeypatch.setattr(owner, name, other)
    assert compiler.build([GCC], folder) != first
    assert len(list(folder.iterdir())) == 2


def test_processes_that_compile_at_once_do_not_meet(sources, folder):
    program = (
        "import sys; from pathlib import Path; from nemotron_steps.engine.kernels import compiler; "
        "compiler._SOURCES = Path(sys.argv[1]); "
        "print(compiler.load(['gcc'], Path(sys.argv[2])).answer())"
    )
    command = [sys.executable, "-c", program, str(sources), str(folder)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=120)[0] for process in processes] == ["42\n"] * 3
    assert len(list(folder.iterdir())) == 1


def test_what_is_kept_is_the_users_alone_whatever_the_umask(folder):
    before = os.umask(0)
    try:
        built = compiler.build([GCC], folder)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert built.stat().st_mode & 0o777 == 0o700


def test_a_cache_that_cannot_be_written_is_said_once(tmp_path, monkeypatch, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compiler.library() is None
    (said,) = warnings(caplog)
    assert "hint: export XDG_CACHE_HOME=DIR" in said


@pytest.fixture
def planted(sources, folder) -> Path:
    """Another library in the place of the kernels."""
    built = compiler.build([GCC], folder)
    source = sources.parent / "planted.c"
    source.write_text("int answer(void) { return 13; }\n")
    subprocess.run([GCC, "-shared", "-fPIC", str(source), "-o", str(built)], check=True)
    return built


def test_the_kept_library_is_what_is_loaded(planted, folder):
    """Without which the tests below would show nothing."""
    assert answer(compiler.load([GCC], folder)) == 13


ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
NOBODY = 65534
SHARED = {
    "group": (lambda folder: folder.chmod(0o770), "others may write to"),
    "others": (lambda folder: folder.chmod(0o707), "others may write to"),
    "sticky": (lambda folder: folder.chmod(0o1777), "others may write to"),
    "given away": (lambda folder: os.chown(folder, NOBODY, NOBODY), "belongs to another user"),
    "in one given away": (lambda folder: os.chown(folder.parent, NOBODY, NOBODY), "belongs to another user"),
}


@pytest.mark.parametrize("how", [pytest.param(how, marks=ROOT if "given" in how else ()) for how in SHARED])
def test_a_folder_that_others_could_have_written_is_not_read(how, planted, folder):
    share, why = SHARED[how]
    share(folder)
    with pytest.raises(UnsupportedError) as caught:
        compiler.load([GCC], folder)
    assert why in str(caught.value.found)


REPLACED = {
    "of another user": lambda planted: os.chown(planted, NOBODY, NOBODY),
    "that others may write": lambda planted: planted.chmod(0o722),
    "a link": lambda planted: planted.symlink_to(planted.rename(planted.parents[3] / "elsewhere.so")),
}


@pytest.mark.parametrize("how", [pytest.param(how, marks=ROOT if "user" in how else ()) for how in REPLACED])
def test_a_library_that_others_could_have_written_is_replaced(how, planted, folder):
    REPLACED[how](planted)
    assert answer(compiler.load([GCC], folder)) == 42
    state = planted.lstat()
    assert (stat.S_IMODE(state.st_mode), state.st_uid, stat.S_ISLNK(state.st_mode)) == (0o700, os.geteuid(), False)


@ROOT
def test_a_users_own_folder_may_lie_in_one_of_roots(folder, monkeypatch):
    compiler.build([GCC], folder)
    os.chown(folder, 65534, 65534)
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert folder.parent.stat().st_uid == 0
    assert compiler.build([GCC], folder).is_file()
    os.chown(folder.parent, 65533, 65533)
    with pytest.raises(PermissionError, match="belongs to another user"):
        compiler.build([GCC], folder)


def test_a_broken_library_is_compiled_anew(folder):
    built = compiler.build([GCC], folder)
    whole = built.read_bytes()
    built.write_bytes(whole[:100])
    with pytest.raises(UnsupportedError):
        compiler.load([GCC], folder)
    assert answer(compiler.load([GCC], folder)) == 42
    assert built.stat().st_size == len(whole)


def test_a_library_that_needs_another_openmp_is_refused_with_a_hint(sources, folder):
    """As clang's does, whose threads torch does not have."""
    (sources / "fork.c").write_text("void __kmpc_of_nowhere(void);\nvoid work(void) { __kmpc_of_nowhere(); }\n")
    with pytest.raises(UnsupportedError, match="cannot be loaded") as caught:
        compiler.load([GCC], folder)
    assert "__kmpc_of_nowhere" in (caught.value.found or "")
    assert caught.value.hints == ("export CC=gcc",)
