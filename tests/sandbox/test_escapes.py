"""Ways out of a sandbox, each tried in earnest with the arguments that an attacker would use. `test_probe.py` shows
that the start-up probe notices where one is open."""

import asyncio
import ctypes
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemotron_steps.sandbox.bubblewrap import BubblewrapSandbox
from tests.sandbox.programs import NUMBERS, PRELUDE, run, sections, started, with_argument

pytestmark = pytest.mark.sandbox
SESSION_KEYRING, UNLINK = -3, 9

ATTEMPTS = """
# user namespace
refused(call('unshare', 0x10000000))
# every namespace
refused(call('unshare', 0x7E020000))
# tmpfs in a user namespace
refused(call('unshare', 0x10020000))
refused(call('mount', text(b't'), text(b'/tmp'), text(b'tmpfs'), 0, 0))
# user namespace by clone
refused(call('clone', 0x10000000 | 17, 0, 0, 0, 0))
# user namespace by clone3
refused(call('clone3', text(struct.pack('8Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0)), 64))
# the namespaces of the first process
for name in ('mnt', 'net', 'pid', 'user'):
    try: refused(call('setns', os.open('/proc/1/ns/' + name, os.O_RDONLY), 0))
    except PermissionError: pass
refused(call('setns', os.pidfd_open(1), 0x20000))
# a writable system
refused(call('mount', 0, text(b'/usr'), 0, 0x1000 | 0x20, 0))
refused(call('mount_setattr', -100, text(b'/usr'), 0, text(struct.pack('4Q', 0, 1, 0, 0)), 32))
# a new mount
refused(call('fsopen', text(b'tmpfs'), 0))
# a copy of a mount
refused(call('open_tree', -100, text(b'/'), 1))
# what is below a mount
refused(call('umount2', text(b'/usr'), 2))
# another root
refused(call('chroot', text(b'/scratch')))
refused(call('pivot_root', text(b'/scratch'), text(b'/scratch')))
# io_uring
refused(call('io_uring_setup', 4, text(bytes(120))))
# userfaultfd
refused(call('userfaultfd', 1))
# bpf
refused(call('bpf', 0, text(struct.pack('5I', 1, 4, 4, 1, 0) + bytes(100)), 120))
# perf events
refused(call('perf_event_open', text(struct.pack('2I4Q', 1, 128, 0, 0, 0, 2) + bytes(88)), 0, -1, -1, 0))
# a filter that asks user space
refused(call('seccomp', 1, 8, 0))
refused(call('prctl', 22, 2, 0) if call('prctl', 22, 2, 0) != -errno.EINVAL else -errno.EPERM)
# kexec
refused(call('kexec_load', 0, 0, 0, 0))
refused(call('kexec_file_load', 0, 0, 0, 0, 4))
# a kernel module
refused(call('finit_module', 0, text(b''), 0))
refused(call('init_module', text(b''), 0, text(b'')))
# the kernel's log
refused(call('syslog', 10, 0, 0))
# the clock
refused(call('clock_settime', 0, text(bytes(16))))
# the host's name
refused(call('sethostname', text(b'x'), 1))
# a file by its handle
refused(call('open_by_handle_at', 0, text(struct.pack('2I', 8, 1) + bytes(8)), 0))
# all the machine's files
refused(call('fanotify_init', 0, 0))
# another personality
refused(call('personality', 0x0400000))
# swap
refused(call('swapoff', text(b'/swap')))
# a message queue
refused(call('mq_open', text(b'q'), 0o102, 0o600, 0))
# a program without a name
refused(call('execveat', 0, text(b''), 0, 0, 0x1000))
# the terminal's input
import fcntl
for name in ('/dev/tty', '/dev/ptmx', '/dev/console'):
    try: os.open(name, os.O_RDWR); print('ESCAPED', name)
    except OSError: pass
try: fcntl.ioctl(0, 0x5412, b'x'); print('ESCAPED')
except OSError as error: assert error.errno == errno.ENOTTY
# devices
for kind, numbers in ((0o020600, (1, 1)), (0o060600, (8, 0)), (0o060600, (259, 0))):
    try: os.mknod('device', kind, os.makedev(*numbers)); print('ESCAPED')
    except PermissionError: pass
# a link to a file of the host
try: os.link('/usr/bin/env', 'env'); print('ESCAPED')
except OSError: pass
# other user ids
for change in (os.setuid, os.setgid, lambda n: os.setgroups([n])):
    try: change(0); print('ESCAPED')
    except OSError: pass
# higher limits
for which in (resource.RLIMIT_NPROC, resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE):
    try: resource.setrlimit(which, (resource.RLIM_INFINITY,) * 2); print('ESCAPED', which)
    except (OSError, ValueError): pass
# a core dump
for limit in ((0, 0), (1, 1)):
    try: resource.setrlimit(resource.RLIMIT_CORE, limit)
    except (OSError, ValueError): pass
if os.fork() == 0: os.abort()
_, status = os.wait()
if os.WCOREDUMP(status) or resource.getrlimit(resource.RLIMIT_CORE) != (1, 1): print('ESCAPED')
# files of the kernel
for name in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/proc/sys/vm/drop_caches'):
    try: open(name, 'w').write('1'); print('ESCAPED', name)
    except OSError: pass
for name in ('kcore', 'keys', 'key-users', 'kmsg', 'kallsyms', 'timer_list', 'sched_debug'):
    try:
        if open('/proc/' + name, 'rb').read(1): print('ESCAPED', name)
    except OSError: pass
# what the host is called
if os.uname().nodename != 'sandbox': print('ESCAPED')
# the sandbox's first process
for name, mode in (('mem', 'r+b'), ('environ', 'rb'), ('root/etc/shadow', 'rb'), ('cwd/../etc/shadow', 'rb')):
    try:
        with open('/proc/1/' + name, mode, buffering=0) as handle:
            if name != 'mem': print('ESCAPED' if handle.read(1) else '')
    except OSError: pass
"""


@pytest.mark.parametrize("attempt", sections(ATTEMPTS))
def test_no_way_out(attempt: str) -> None:
    result = run(attempt + "\nprint('tried')")
    assert "ESCAPED" not in result.stdout
    assert result.stdout.endswith("tried\n"), result.stderr


@pytest.mark.parametrize(("make", "made"), [("socket.socket", "[]"), ("socket.socketpair", "[1]")])
def test_no_socket_of_any_family_but_a_pair_of_unix_sockets(make: str, made: str) -> None:
    code = f"""
made = set()
for family in range(64):
    for kind in range(1, 8):
        try: {make}(family, kind); made.add(family)
        except OSError as error: assert error.errno == errno.EAFNOSUPPORT or family == 1
print(sorted(made))
"""
    assert run(code).stdout == f"{made}\n"


def test_a_unix_socket_in_a_folder_that_is_shown_cannot_be_reached(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    path = str(tmp_path / "daemon")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        (tmp_path / "daemon").chmod(0o777)
        listener.listen()
        listener.settimeout(0.2)
        code = f"""
print(os.path.exists({path!r}))
try: socket.socket(socket.AF_UNIX).connect({path!r}); print('ESCAPED')
except OSError: pass
a, _ = socket.socketpair()
refused(call('connect', a.fileno(), text(b'\\x01\\x00' + {path.encode()!r}), 100))
"""
        result = run(code, sandbox=BubblewrapSandbox(read_only=(str(tmp_path),)))
        assert result.stdout == "True\n", result.stderr
        with pytest.raises(TimeoutError):
            listener.accept()


@pytest.fixture
def key() -> Iterator[str]:
    """A key in this process's session keyring, which children inherit: its description and its secret."""
    libc, description, secret = ctypes.CDLL(None, use_errno=True), secrets.token_hex(8), secrets.token_hex(16)
    size, keyring = ctypes.c_long(len(secret)), ctypes.c_long(SESSION_KEYRING)
    add, control = ctypes.c_long(NUMBERS["add_key"]), ctypes.c_long(NUMBERS["keyctl"])
    number = libc.syscall(add, b"user", description.encode(), secret.encode(), size, keyring)
    if number < 0:
        pytest.skip("this host lets nobody have keys")
    yield f"{description} {secret}"
    libc.syscall(control, ctypes.c_long(UNLINK), ctypes.c_long(number), keyring)


SEARCH = """
for keyring in (-1, -2, -3, -4, -5):
    number = call('keyctl', 10, keyring, text(b'user'), text(b'DESCRIPTION'), 0)
    if number > 0:
        held = text(bytes(64))
        call('keyctl', 11, number, held, 64)
        print('ESCAPED', held.value)
try: print('DESCRIPTION' in open('/proc/keys').read())
except OSError: print(False)
print(call('add_key', text(b'user'), text(b'another'), text(b'x'), 1, -2) > 0)
"""


def test_the_hosts_keys_can_be_neither_found_nor_read(key: str) -> None:
    description, secret = key.split()
    attempt = PRELUDE + SEARCH.replace("DESCRIPTION", description)
    control = subprocess.run([sys.executable, "-c", attempt], capture_output=True, text=True, check=True)
    assert secret in control.stdout, "outside, the same program reads the key"
    result = asyncio.run(started().run(code=attempt))
    assert result.stdout == "False\nFalse\n", result.stderr


def test_processes_of_the_host_cannot_be_seen_or_signalled() -> None:
    secret = f"secret-{secrets.token_hex(8)}"
    victim = subprocess.Popen(["sleep", "60"], env={"SECRET": secret})
    try:
        code = f"""
for pid in {{{victim.pid}, {os.getpid()}, *range(2, 40)}} - {{os.getpid()}}:
    try: os.kill(pid, 9); print('ESCAPED', pid)
    except (ProcessLookupError, PermissionError): pass
    try: print('ESCAPED', os.pidfd_open(pid))
    except OSError: pass
for folder in os.listdir('/proc'):
    for name in ('environ', 'cmdline', 'root/etc/shadow', 'cwd/pyproject.toml'):
        try:
            content = open(f'/proc/{{folder}}/{{name}}', 'rb').read(10_000)
            if {secret!r}.encode() in content or name.endswith(('shadow', 'toml')): print('ESCAPED', folder, name)
        except OSError: pass
"""
        result = run(code)
        assert result.ok and "ESCAPED" not in result.stdout, result
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


HARNESS = """
secret = bytearray(os.urandom(16))
here = ctypes.addressof((ctypes.c_char * 16).from_buffer(secret))
keep = os.open('/scratch', os.O_RDONLY)
libc.prctl(4, 0, 0, 0, 0)
child = os.fork()
if child == 0:
    program = open('attack.py').read()
    os.execv(sys.executable, [sys.executable, '-c', program, str(os.getppid()), str(here), str(keep)])
print('ended with', os.waitpid(child, 0)[1])
"""
ATTACK = """
parent, here, keep = map(int, sys.argv[1:])
local = text(bytes(16))
def vector(at): return text(struct.pack('2Q', at, 16))
refused(call('ptrace', 16, parent, 0, 0))
refused(call('ptrace', 0x4206, parent, 0, 0))
refused(call('process_vm_readv', parent, vector(ctypes.addressof(local)), 1, vector(here), 1, 0))
refused(call('process_vm_writev', parent, vector(ctypes.addressof(local)), 1, vector(here), 1, 0))
refused(call('pidfd_getfd', os.pidfd_open(parent), keep, 0))
refused(call('kcmp', parent, os.getpid(), 0, 0, 0))
refused(call('process_madvise', os.pidfd_open(parent), vector(here), 1, 20, 0))
for name, mode in (('mem', 'r+b'), ('mem', 'rb'), ('environ', 'rb'), ('maps', 'rb'), ('fd/0', 'rb'), ('fd/1', 'wb')):
    try: open(f'/proc/{parent}/{name}', mode, buffering=0); print('ESCAPED', name)
    except OSError: pass
print('tried', flush=True)
"""


def test_a_harness_is_not_traced_read_or_written_by_the_program_that_it_runs() -> None:
    """Both have one user id. The filter refuses the calls; a harness that is not dumpable hides its files in /proc."""
    result = asyncio.run(started().run(code=PRELUDE + HARNESS, files={"attack.py": PRELUDE + ATTACK}))
    assert result.stdout == "tried\nended with 0\n", result.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a set-user-id program of root")
def test_a_set_user_id_program_gives_no_rights() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        program = shutil.copy("/usr/bin/id", folder)
        os.chmod(program, 0o4755)
        outside = subprocess.run([program, "-u"], user=12345, capture_output=True, text=True, check=True)
        assert outside.stdout == "0\n", "outside it gives them"
        result = asyncio.run(BubblewrapSandbox(read_only=(folder,)).run([program, "-u"]))
    assert result.ok and int(result.stdout) != 0


def test_what_detaches_itself_is_gone_afterwards() -> None:
    marker = f"sandbox-daemon-{secrets.token_hex(8)}"
    code = f"""
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0: os.execv('/bin/sh', ['sh', '-c', 'sleep 600; : {marker}'])
        os._exit(0)
time.sleep(0.2)
os._exit(0)
"""
    assert run(code).ok
    assert with_argument(marker) == []
