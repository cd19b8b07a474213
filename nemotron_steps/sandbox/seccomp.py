"""The system calls that a sandboxed program may make, as a seccomp filter: an allow list. Everything else fails with
ENOSYS, as if the kernel had never had it, so that a libc that tries it goes on (to clone from clone3, whose flags no
filter can see).

Calls are in groups, each `name x86-64 aarch64`, `-` where an architecture has no such call. Source: Linux's uapi
headers (arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h), which the tests read.
"""

import errno
import platform
import struct
from collections.abc import Sequence
from typing import Any

from nemotron_steps.errors import UnsupportedError

ARCHITECTURES = ("x86_64", "aarch64")

HARMLESS = "harmless"
"""What Python programs, compilers and Lean live on; allowed whatever the arguments."""
BY_ARGUMENT = "by argument"
"""Allowed with some arguments and not with others; `_rules` says which."""
NETWORK = "network"
"""Sockets. A program that nobody else talks to needs none but `socketpair`."""
ATTRIBUTES = "attributes"
"""Writing extended attributes: libraries ask for it and live with a refusal."""
SHARING = "sharing"
"""Memory and messages between processes that no process's resident set shows. Under a cgroup they are counted."""
DANGEROUS = "dangerous"
"""Refused like every other call that is not listed here. Listed so that the probe can name what got through."""

_TABLES = {
    HARMLESS: """
# reading and writing
read 0 63; write 1 64; readv 19 65; writev 20 66; pread64 17 67; pwrite64 18 68; preadv 295 69; pwritev 296 70;
preadv2 327 286; pwritev2 328 287; lseek 8 62; sendfile 40 71; copy_file_range 326 285;
# files by name and by descriptor
open 2 -; openat 257 56; creat 85 -; close 3 57; close_range 436 436; stat 4 -; lstat 6 -; fstat 5 80;
newfstatat 262 79; statx 332 291; statfs 137 43; fstatfs 138 44; access 21 -; faccessat 269 48; faccessat2 439 439;
readlink 89 -; readlinkat 267 78; getdents 78 -; getdents64 217 61; getcwd 79 17; chdir 80 49; fchdir 81 50;
mkdir 83 -; mkdirat 258 34; rmdir 84 -; unlink 87 -; unlinkat 263 35; rename 82 -; renameat 264 38;
renameat2 316 276; link 86 -; linkat 265 37; symlink 88 -; symlinkat 266 36; mknod 133 -; mknodat 259 33; chmod 90 -;
fchmod 91 52; fchmodat 268 53; fchmodat2 452 452; chown 92 -; fchown 93 55; lchown 94 -; fchownat 260 54;
umask 95 166; utime 132 -; utimes 235 -; utimensat 280 88; futimesat 261 -; truncate 76 45; ftruncate 77 46;
fallocate 285 47; fadvise64 221 223; readahead 187 213; fsync 74 82; fdatasync 75 83; msync 26 227; flock 73 32;
dup 32 23; dup2 33 -; dup3 292 24; getxattr 191 8; lgetxattr 192 9; fgetxattr 193 10; listxattr 194 11;
llistxattr 195 12; flistxattr 196 13;
# waiting and telling
pipe 22 -; pipe2 293 59; poll 7 -; ppoll 271 73; select 23 -; pselect6 270 72; epoll_create 213 -;
epoll_create1 291 20; epoll_ctl 233 21; epoll_wait 232 -; epoll_pwait 281 22; epoll_pwait2 441 441; eventfd 284 -;
eventfd2 290 19; timerfd_create 283 85; timerfd_settime 286 86; timerfd_gettime 287 87; sendto 44 206;
recvfrom 45 207; shutdown 48 210; getsockname 51 204; getpeername 52 205; getsockopt 55 209;
# memory
brk 12 214; munmap 11 215; mremap 25 216; mprotect 10 226; madvise 28 233; mincore 27 232; mlock 149 228;
mlock2 325 284; munlock 150 229; membarrier 324 283; mseal 462 462;
# processes and threads
fork 57 -; vfork 58 -; execve 59 221; exit 60 93; exit_group 231 94; wait4 61 260; waitid 247 95; kill 62 129;
tkill 200 130; tgkill 234 131; pidfd_open 434 434; pidfd_send_signal 424 424; getpid 39 172; gettid 186 178;
getppid 110 173; getpgrp 111 -; getpgid 121 155; setpgid 109 154; getsid 124 156; setsid 112 157;
set_tid_address 218 96; set_robust_list 273 99; rseq 334 293; arch_prctl 158 -; futex 202 98; sched_yield 24 124;
sched_getaffinity 204 123; sched_setaffinity 203 122; sched_getparam 143 121; sched_getscheduler 145 120;
sched_get_priority_max 146 125; sched_get_priority_min 147 126; sched_rr_get_interval 148 127; sched_getattr 315 275;
getcpu 309 168; getpriority 140 141; setpriority 141 140; getrlimit 97 163; getrusage 98 165; times 100 153;
restart_syscall 219 128;
# signals and timers
rt_sigaction 13 134; rt_sigprocmask 14 135; rt_sigreturn 15 139; rt_sigpending 127 136; rt_sigsuspend 130 133;
rt_sigtimedwait 128 137; rt_sigqueueinfo 129 138; rt_tgsigqueueinfo 297 240; sigaltstack 131 132; pause 34 -;
alarm 37 -; getitimer 36 102; setitimer 38 103; nanosleep 35 101; clock_nanosleep 230 115; clock_gettime 228 113;
clock_getres 229 114; gettimeofday 96 169; time 201 -; timer_create 222 107; timer_settime 223 110;
timer_gettime 224 108; timer_getoverrun 225 109; timer_delete 226 111;
# who and where
uname 63 160; sysinfo 99 179; getrandom 318 278; getuid 102 174; geteuid 107 175; getgid 104 176; getegid 108 177;
getgroups 115 158; getresuid 118 148; getresgid 120 150; setuid 105 146; setgid 106 144; setgroups 116 159;
setresuid 117 147; setresgid 119 149; capget 125 90; capset 126 91;
""",
    BY_ARGUMENT: """
mmap 9 222; clone 56 220; socketpair 53 199; fcntl 72 25; ioctl 16 29; prctl 157 167; prlimit64 302 261;
setrlimit 160 164;
""",
    NETWORK: """
socket 41 198; bind 49 200; listen 50 201; accept 43 202; accept4 288 242; connect 42 203; sendmsg 46 211;
recvmsg 47 212; sendmmsg 307 269; recvmmsg 299 243; setsockopt 54 208;
""",
    ATTRIBUTES: """
setxattr 188 5; lsetxattr 189 6; fsetxattr 190 7; removexattr 197 14; lremovexattr 198 15; fremovexattr 199 16;
""",
    SHARING: """
memfd_create 319 279; shmget 29 194; shmat 30 196; shmctl 31 195; shmdt 67 197; semget 64 190; semop 65 193;
semctl 66 191; semtimedop 220 192; msgget 68 186; msgsnd 69 189; msgrcv 70 188; msgctl 71 187; mq_open 240 180;
mq_unlink 241 181; mq_timedsend 242 182; mq_timedreceive 243 183; mq_notify 244 184; mq_getsetattr 245 185;
inotify_init 253 -; inotify_init1 294 26; splice 275 76; tee 276 77; inotify_add_watch 254 27;
inotify_rm_watch 255 28;
""",
    DANGEROUS: """
add_key 248 217; request_key 249 218; keyctl 250 219; memfd_secret 447 447; unshare 272 97; setns 308 268;
clone3 435 435; io_uring_setup 425 425; io_uring_enter 426 426; io_uring_register 427 427; userfaultfd 323 282;
ptrace 101 117; process_vm_readv 310 270; process_vm_writev 311 271; process_madvise 440 440;
process_mrelease 448 448; pidfd_getfd 438 438; kcmp 312 272; bpf 321 280; perf_event_open 298 241; mount 165 40;
umount2 166 39; pivot_root 155 41; chroot 161 51; move_mount 429 429; open_tree 428 428; fsopen 430 430;
fsconfig 431 431; fsmount 432 432; fspick 433 433; mount_setattr 442 442; kexec_load 246 104;
kexec_file_load 320 294; init_module 175 105; finit_module 313 273; delete_module 176 106; reboot 169 142;
swapon 167 224; swapoff 168 225; acct 163 89; quotactl 179 60; quotactl_fd 443 443; syslog 103 116;
settimeofday 164 170; clock_settime 227 112; clock_adjtime 305 266; adjtimex 159 171; sethostname 170 161;
setdomainname 171 162; iopl 172 -; ioperm 173 -; modify_ldt 154 -; lookup_dcookie 212 18; name_to_handle_at 303 264;
open_by_handle_at 304 265; fanotify_init 300 262; fanotify_mark 301 263; io_setup 206 0; io_submit 209 2;
mbind 237 235; set_mempolicy 238 237; get_mempolicy 239 236; migrate_pages 256 238; move_pages 279 239;
remap_file_pages 216 234; personality 135 92; seccomp 317 277; landlock_create_ruleset 444 444; vmsplice 278 75;
sync 162 81; syncfs 306 267; execveat 322 281; openat2 437 437; uselib 134 -; ustat 136 -; sysfs 139 -;
_sysctl 156 -; vhangup 153 58; nfsservctl 180 42;
""",
}
GROUPS = tuple(_TABLES)

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x4000_0000

CLONE_NAMESPACES = 0x7E02_0080
"""CLONE_NEW{TIME,NS,CGROUP,UTS,IPC,USER,PID,NET}."""
MAP_SHARED_ANONYMOUS = 0x21
MAP_HUGETLB = 0x4_0000
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
RLIMIT_CORE = 4
F_SETPIPE_SZ = 1031
PRCTL_OPTIONS = (1, 2, 3, 4, 7, 8, 15, 16, 21, 23, 24, 27, 28, 38, 39, 41, 42, 47, 0x53564D41)
"""Death signal, dumpable, keep-caps, name, seccomp's state, the bounding set and secure bits (setpriv reads and drops
them), no-new-privileges, huge pages, ambient capabilities, names of memory."""
IOCTL_REQUESTS = (0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A)
"""TCGETS, TIOCGPGRP, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, TCGETS2."""

Instruction = tuple[int, int, int, int]
"""struct sock_filter: operation, instructions to skip if true and if false, operand."""

_LOAD, _AND, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x45, 0x35, 0x06
# struct seccomp_data: int nr; u32 arch; u64 instruction_pointer; u64 args[6]. Little-endian on both architectures.
_NR, _ARCH, _ARGS = 0, 4, 16
_ALLOW: Instruction = (_RETURN, 0, 0, 0x7FFF_0000)


def architecture() -> str:
    """This machine's; UnsupportedError where there is no filter for it."""
    machine = platform.machine()
    if machine not in AUDIT_ARCH:
        raise UnsupportedError(
            "the sandbox's system call filter is not written for this processor architecture",
            expected=" or ".join(AUDIT_ARCH),
            found=machine,
            hints=("run environments with model-written code on x86_64 or aarch64",),
        )
    return machine


def calls(machine: str, *groups: str) -> dict[str, int]:
    """Name → number of the calls of some groups that an architecture has."""
    column = 1 + ARCHITECTURES.index(machine)
    lines = [line for group in groups for line in _TABLES[group].splitlines() if not line.startswith("#")]
    entries = [entry.split() for entry in "".join(lines).split(";") if entry.strip()]
    return {entry[0]: int(entry[column]) for entry in entries if entry[column] != "-"}


def allowed(machine: str) -> dict[str, int]:
    """Name → number of the calls that may be made, whatever the arguments or with some."""
    return calls(machine, HARMLESS, BY_ARGUMENT)


def filter_program(machine: str, *, also: Sequence[str] = ()) -> bytes:
    """The filter as an array of struct sock_filter. `also`: calls that tests allow to see the probe find them."""
    code: list[Instruction] = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, AUDIT_ARCH[machine]), _fail(errno.ENOSYS)]
    code.append((_LOAD, 0, 0, _NR))
    if machine == "x86_64":
        # The x32 interface has the same architecture and calls of its own.
        code += [(_AT_LEAST, 0, 1, X32_BIT), _fail(errno.ENOSYS)]
    known = calls(machine, BY_ARGUMENT, NETWORK, ATTRIBUTES, SHARING, DANGEROUS)
    for number in (*calls(machine, HARMLESS).values(), *(known[name] for name in also if name != "*")):
        code += _on(number, [_ALLOW])
    for name, rule in _rules().items():
        if name in known:
            code += _on(known[name], rule)
    for number, error in refusals(machine).items():
        code += _on(number, [_fail(error)])
    code.append(_ALLOW if "*" in also else _fail(errno.ENOSYS))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def refusals(machine: str) -> dict[int, int]:
    """Number → error of the calls that are refused with an error that their callers expect instead of ENOSYS."""
    numbers = calls(machine, NETWORK, ATTRIBUTES)
    return {numbers[name]: error for name, error in _refusals_by_name(machine).items()}


def _refusals_by_name(machine: str) -> dict[str, int]:
    return {"socket": errno.EAFNOSUPPORT, **dict.fromkeys(calls(machine, ATTRIBUTES), errno.EOPNOTSUPP)}


def _rules() -> dict[str, list[Instruction]]:
    return {
        "mmap": [
            _argument(3),
            (_ANY_BIT, 0, 1, MAP_HUGETLB),
            _fail(errno.EPERM),
            (_AND, 0, 0, MAP_SHARED_ANONYMOUS),
            *_refuse(MAP_SHARED_ANONYMOUS, errno.EPERM),
        ],
        "clone": [_argument(0), (_ANY_BIT, 0, 1, CLONE_NAMESPACES), _fail(errno.EPERM), _ALLOW],
        "socketpair": [_argument(0), *_only((AF_UNIX,), errno.EAFNOSUPPORT)],
        "ioctl": [_argument(1), *_only(IOCTL_REQUESTS, errno.ENOTTY)],
        "prctl": [_argument(0), *_only(PRCTL_OPTIONS, errno.EINVAL)],
        "fcntl": [_argument(1), *_refuse(F_SETPIPE_SZ, errno.EPERM)],
        # Accepted and not done: programs lower this limit to be tidy and take an error for a fault.
        "setrlimit": [_argument(0), *_refuse(RLIMIT_CORE, 0)],
        # Reading a limit passes no pointer to a new one, and both halves of a pointer count.
        "prlimit64": [
            *(_argument(1), (_EQUAL, 1, 0, RLIMIT_CORE), _ALLOW),
            *(_argument(2), (_EQUAL, 1, 0, 0), _fail(0)),
            *(_argument(2, high=True), (_EQUAL, 1, 0, 0), _fail(0)),
            _ALLOW,
        ],
    }


def _on(number: int, then: list[Instruction]) -> list[Instruction]:
    """`then`, which ends in a return, for one call; the number stays loaded for the others."""
    return [(_EQUAL, 0, len(then), number), *then]


def _only(values: Sequence[int], refusal: int) -> list[Instruction]:
    return [*(step for value in values for step in ((_EQUAL, 0, 1, value), _ALLOW)), _fail(refusal)]


def _refuse(value: int, refusal: int) -> list[Instruction]:
    return [(_EQUAL, 0, 1, value), _fail(refusal), _ALLOW]


def _argument(index: int, *, high: bool = False) -> Instruction:
    # The kernel takes flags, families, requests and options as 32 bits: only of pointers does the upper half count.
    return (_LOAD, 0, 0, _ARGS + 8 * index + 4 * high)


def _fail(error: int) -> Instruction:
    return (_RETURN, 0, 0, 0x0005_0000 | error)


def container_profile(*, session: bool) -> dict[str, Any]:
    """The list for Docker, Podman and Apptainer (the OCI runtime's seccomp object, in Docker's JSON).

    Every known call is named with its answer: Docker before 23 takes no default but EPERM, and with that for clone3
    libc starts no thread. In a session a repository's own tests talk over sockets and share memory."""
    machines = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}
    groups = (HARMLESS, NETWORK, SHARING, ATTRIBUTES) if session else (HARMLESS,)
    names = {name for machine in machines for name in calls(machine, *groups)} - {"socket"}
    names |= {"mmap"} | ({"ioctl", "prctl"} if session else set())
    families = (AF_UNIX, AF_INET, AF_INET6) if session else ()
    values = {
        ("socket", 0): families,
        ("socketpair", 0): (AF_UNIX,),
        ("ioctl", 1): () if session else IOCTL_REQUESTS,
        ("prctl", 0): () if session else PRCTL_OPTIONS,
    }
    accepted = {"action": "SCMP_ACT_ERRNO", "errnoRet": 0}
    conditional = {"clone", "fcntl", "setrlimit", "prlimit64", *(name for (name, _), some in values.items() if some)}
    answers: dict[int, list[str]] = {}
    for name in {name for machine in machines for name in calls(machine, *GROUPS)} - names - conditional:
        answers.setdefault(_refusals_by_name("x86_64").get(name, errno.ENOSYS), []).append(name)
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.ENOSYS,
        "archMap": [{"architecture": name, "subArchitectures": []} for name in machines.values()],
        "syscalls": [
            {"names": sorted(names), "action": "SCMP_ACT_ALLOW"},
            *(
                {"names": sorted(refused), "action": "SCMP_ACT_ERRNO", "errnoRet": error}
                for error, refused in sorted(answers.items())
            ),
            _when("clone", (0, "SCMP_CMP_MASKED_EQ", CLONE_NAMESPACES)),
            _when("fcntl", (1, "SCMP_CMP_NE", F_SETPIPE_SZ)),
            *(_when(name, (at, "SCMP_CMP_EQ", value)) for (name, at), some in values.items() for value in some),
            _when("setrlimit", (0, "SCMP_CMP_NE", RLIMIT_CORE)),
            {**_when("setrlimit", (0, "SCMP_CMP_EQ", RLIMIT_CORE)), **accepted},
            _when("prlimit64", (1, "SCMP_CMP_NE", RLIMIT_CORE)),
            _when("prlimit64", (1, "SCMP_CMP_EQ", RLIMIT_CORE), (2, "SCMP_CMP_EQ", 0)),
            {**_when("prlimit64", (1, "SCMP_CMP_EQ", RLIMIT_CORE), (2, "SCMP_CMP_NE", 0)), **accepted},
        ],
    }


def _when(name: str, *conditions: tuple[int, str, int]) -> dict[str, Any]:
    # For MASKED_EQ `value` is the mask and `valueTwo` what must remain: nothing.
    args = [{"index": index, "op": op, "value": value, "valueTwo": 0} for index, op, value in conditions]
    return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": args}
