"""What programs need of the system and have in the sandbox."""

import asyncio
from pathlib import Path

import pytest

from nemotron_steps.sandbox import Limits
from nemotron_steps.sandbox.bubblewrap import BubblewrapSandbox
from tests.sandbox.programs import PRELUDE, run, sections, started

pytestmark = pytest.mark.sandbox

PROGRAMS = """
# threads
import threading
thread = threading.Thread(target=lambda: print('ok')); thread.start(); thread.join()
# processes
import subprocess
print(subprocess.run(['echo', 'ok'], capture_output=True, text=True).stdout)
# shell
print(os.popen('echo ok | cat | tr a-z a-z').read())
# asyncio
import asyncio
async def main():
    process = await asyncio.create_subprocess_exec('echo', 'ok', stdout=-1)
    print((await process.communicate())[0].decode())
asyncio.run(main())
# executors
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as executor: print(*set(executor.map(str, ['ok'] * 9)))
# timers
def over(*_): raise TimeoutError
signal.signal(signal.SIGALRM, over); signal.setitimer(signal.ITIMER_REAL, 0.05)
try: time.sleep(5)
except TimeoutError: print('ok')
# copies of files and folders
import pathlib, shutil, tempfile
with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, 'a').write_text('ok'); shutil.copy2(folder + '/a', folder + '/b')
    shutil.copytree(folder, 'tree')
print(open('tree/b').read()); shutil.rmtree('tree')
# laid files are the program's own
open('laid/file', 'a').write('ok'); os.rename('laid/file', 'laid/other'); print(open('laid/other').read())
# a mapped file
with open('m', 'w+b') as handle:
    handle.write(b'ok'); handle.flush(); print(mmap.mmap(handle.fileno(), 0)[:].decode())
# sqlite
import sqlite3
base = sqlite3.connect('d'); base.execute('pragma journal_mode=wal'); base.execute('create table t(x)')
base.execute("insert into t values ('ok')"); base.commit(); print(*base.execute('select x from t').fetchone())
# random numbers
import random, secrets, uuid
random.random(); uuid.uuid4(); secrets.token_hex(); print('ok')
# user names
import pwd
try: pwd.getpwuid(os.getuid())
except KeyError: print('ok')
# lower limits
resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**30)); resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); print('ok')
# modules with code in C
import bz2, ctypes, decimal, hashlib, lzma, multiprocessing, ssl, unicodedata, zlib; print('ok')
"""


@pytest.mark.parametrize("code", sections(PROGRAMS))
def test_ordinary_programs_run(code: str) -> None:
    result = asyncio.run(started().run(code=PRELUDE + code, files={"laid/file": ""}))
    assert result.ok and result.stdout.split() == ["ok"], result


def test_numeric_libraries_run() -> None:
    numpy = pytest.importorskip("numpy")
    packages = str(Path(numpy.__file__).parent.parent)
    code = (
        f"sys.path.insert(0, {packages!r})\n"
        "import numpy, sympy\n"
        "x = sympy.Symbol('x')\n"
        "print(round(numpy.linalg.det(numpy.eye(50))), sympy.integrate(x, (x, 0, 2)))"
    )
    result = run(code, sandbox=BubblewrapSandbox(read_only=(packages,)), limits=Limits(wall_s=60))
    assert result.stdout == "1 2\n", result


@pytest.mark.compiler
def test_a_compiler_and_what_it_makes_run() -> None:
    source = (
        "#include <pthread.h>\n#include <stdio.h>\n"
        'void *say(void *x) { puts("ok"); return x; }\n'
        "int main(void) { pthread_t t; pthread_create(&t, 0, say, 0); return pthread_join(t, 0); }\n"
    )
    argv = ["/bin/sh", "-c", "gcc -O2 -pthread main.c -o main && ./main"]
    result = asyncio.run(started().run(argv, files={"main.c": source}, limits=Limits(wall_s=60)))
    assert result.stdout == "ok\n", result
