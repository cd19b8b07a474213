"""One GiB allowed is about one GiB held, whatever holds it. Here it is 128 MiB; each program tries to hold three times
that and says how far it came."""

import pytest

from nemotron_steps.sandbox import Limits, Outcome
from tests.sandbox.programs import MIB, run, sections

pytestmark = pytest.mark.sandbox
ALLOWED = 128 * MIB
LIMITS = Limits(wall_s=60, memory_bytes=ALLOWED, scratch_bytes=1024 * MIB, file_bytes=1024 * MIB)

TOOLS = f"""
MIB = 2**20
GOAL = 3 * {ALLOWED}
def held(size):
    print(size, flush=True)
def touch(view, size):
    for at in range(0, size, 4096): view[at] = 1
"""

STOPPED = """
# many processes
done, say = os.pipe()
for n in range(1, 13):
    if os.fork() == 0:
        keep = bytearray(32 * MIB); touch(keep, 32 * MIB); os.write(say, b'x'); time.sleep(30); os._exit(0)
    os.read(done, 1); held(n * 32 * MIB); time.sleep(0.05)
time.sleep(10)
# files
for n in range(GOAL // MIB):
    open(f'{("/tmp", "/scratch")[n % 2]}/{n}', 'wb').write(b'x' * MIB); held((n + 1) * MIB); time.sleep(0.002)
time.sleep(10)
# files that have no name
keep = []
for n in range(GOAL // (8 * MIB)):
    keep.append(open('x', 'wb')); keep[-1].write(b'x' * 8 * MIB); keep[-1].flush(); os.unlink('x')
    held((n + 1) * 8 * MIB); time.sleep(0.02)
time.sleep(10)
# mapped files
for n in range(48):
    with open(str(n), 'w+b') as handle:
        handle.truncate(8 * MIB); touch(mmap.mmap(handle.fileno(), 8 * MIB), 8 * MIB)
    held((n + 1) * 8 * MIB); time.sleep(0.02)
time.sleep(10)
# empty files
for n in range(GOAL // 1024):
    os.close(os.open(f'{n}', os.O_CREAT))
    if n % 4096 == 0: held(n * 1024)
time.sleep(10)
# what waits in sockets
done, say = os.pipe()
for n in range(1, 21):
    if os.fork() == 0:
        keep = [socket.socketpair() for _ in range(100)]
        for s in (s for pair in keep for s in pair):
            s.setblocking(False)
            try:
                while True: s.send(b'x' * 65536)
            except BlockingIOError: pass
        os.write(say, b'x'); time.sleep(30); os._exit(0)
    os.read(done, 1); held(n * 200 * 208 * 1024); time.sleep(0.1)
time.sleep(10)
"""

REFUSED = """
# memfd
fd = call('memfd_create', text(b'm'), 0)
for n in range(GOAL // MIB): os.write(fd, b'x' * MIB); held((n + 1) * MIB)
# memfd_secret
fd = call('memfd_secret', 0); os.ftruncate(fd, GOAL); held(GOAL)
# System V memory
libc.shmat.restype = ctypes.c_void_p
for n in range(48):
    number = libc.shmget(0, 8 * MIB, 0o1600)
    at = libc.shmat(number, None, 0)
    if number < 0 or at == 2**64 - 1: raise OSError
    ctypes.memset(at, 1, 8 * MIB); libc.shmdt(ctypes.c_void_p(at)); held((n + 1) * 8 * MIB)
# POSIX memory
for n in range(GOAL // MIB): open(f'/dev/shm/{n}', 'wb').write(b'x' * MIB); held((n + 1) * MIB)
# shared mappings let go
keep = []
for n in range(48):
    keep.append(mmap.mmap(-1, 8 * MIB)); touch(keep[-1], 8 * MIB)
    keep[-1].madvise(mmap.MADV_DONTNEED); held((n + 1) * 8 * MIB)
# /dev/zero
keep = []
for n in range(48):
    keep.append(mmap.mmap(os.open('/dev/zero', os.O_RDWR), 8 * MIB)); touch(keep[-1], 8 * MIB)
    keep[-1].madvise(mmap.MADV_DONTNEED); held((n + 1) * 8 * MIB)
# huge pages
keep = mmap.mmap(-1, GOAL, flags=0x40022); touch(keep, GOAL); held(GOAL)
# one process
keep = bytearray(GOAL); touch(keep, GOAL); held(GOAL)
# larger pipes
import fcntl
keep = []
for n in range(100):
    keep.append(os.pipe()); fcntl.fcntl(keep[-1][1], 1031, MIB)
    os.write(keep[-1][1], b'x' * MIB); held((n + 1) * MIB)
"""


@pytest.mark.parametrize("holder", sections(STOPPED))
def test_who_holds_more_than_allowed_is_stopped(holder: str) -> None:
    result = run(TOOLS + holder, limits=LIMITS)
    assert result.outcome is Outcome.MEMORY_LIMIT
    assert max(int(line) for line in result.stdout.split()) <= 1.5 * ALLOWED


@pytest.mark.parametrize("holder", sections(REFUSED))
def test_what_nobody_counts_cannot_be_had(holder: str) -> None:
    result = run(TOOLS + holder, limits=LIMITS)
    assert (result.outcome, result.exit_code, result.stdout) == (Outcome.EXITED, 1, "")
    assert result.stderr.splitlines()[-1].startswith(("OSError", "PermissionError", "FileNotFoundError", "MemoryError"))


def test_memory_that_is_shared_after_a_fork_counts_once() -> None:
    code = TOOLS + (
        "keep = bytearray(60 * MIB); touch(keep, 60 * MIB)\n"
        "children = []\n"
        "for _ in range(6):\n"
        "    child = os.fork()\n"
        "    if child == 0: time.sleep(1); os._exit(0)\n"
        "    children.append(child)\n"
        "print([os.waitpid(child, 0)[1] for child in children])"
    )
    result = run(code, limits=Limits(wall_s=30, memory_bytes=ALLOWED + 64 * MIB))
    assert result.stdout == "[0, 0, 0, 0, 0, 0]\n", result
